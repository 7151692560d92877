"""`mesh.updates`: what one update changed, computed by the sidecars from two snapshots.

Both steps are asked for before they come, so that they follow each other. A token may hold about
an arena's worth of snapshots, so large selections are taken in groups, each at a step of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from paramd.errors import ConflictError, DeadlineError
from paramd.layout.dtypes import item_bytes
from paramd.layout.plan import ReadPlan, plan_read
from paramd.layout.select import SelectedTensor, select
from paramd.mesh.insight.states import pin_step
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.sidecars import Pinned, Sidecars
from paramd.mesh.reading.summary import compute_stats
from paramd.mesh.results import Table, mesh_status

AHEAD = 3
"""Steps between asking and the first step asked for; more after each that was missed."""

MOST_AHEAD = 100
STATUS_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRow:
    """What one update did to one parameter."""

    name: str
    step: int
    """The update: it led from step - 1 to step."""
    norm: float
    """Of the update."""
    rms: float
    """The same divided by the root of the number of elements."""
    max_abs: float
    weight_norm: float
    """Before it."""
    ratio: float
    """norm / weight_norm; NaN for a weight of zeros."""
    changed: int
    """Elements that the update changed, as far as their dtype shows it."""
    numel: int
    nonfinite: int
    """Elements whose change is NaN or infinite."""


class Updates(Table[UpdateRow]):
    """One row per parameter, the largest ratio first."""

    columns = (
        ("name", lambda row: row.name),
        ("step", lambda row: str(row.step)),
        ("norm", lambda row: f"{row.norm:.4g}"),
        ("ratio", lambda row: f"{row.ratio:.3g}"),
        ("rms", lambda row: f"{row.rms:.3g}"),
        ("max", lambda row: f"{row.max_abs:.3g}"),
        ("changed", lambda row: f"{row.changed:,} of {row.numel:,}"),
    )
    row_type = UpdateRow
    about = ("job", "incarnation")
    job: str
    incarnation: int

    def __new__(cls, rows: Iterable[UpdateRow], *, job: str, incarnation: int) -> Updates:
        self = super().__new__(cls, sorted(rows, key=_order))
        self.job, self.incarnation = job, incarnation
        return self

    def summary(self) -> str:
        norm = math.hypot(*(row.norm for row in self if math.isfinite(row.norm)))
        return f"{len(self)} parameters of {self.job!r}, updates of norm {norm:.4g} together"


def _order(row: UpdateRow) -> tuple[bool, float, str]:
    return not math.isnan(row.ratio), -row.ratio if not math.isnan(row.ratio) else 0.0, row.name


async def compute_updates(
    reach: SidecarFinder, patterns: Sequence[str], deadline_s: float
) -> Updates:
    """Raises as `AsyncMesh.updates`."""

    async def attempt(sidecars: Sidecars) -> Updates:
        index = await reach.index(sidecars)
        if index.layout.mirrored:
            raise ConflictError(
                "the parameters are mirrored, so exact steps cannot be read; compare states with "
                "mesh.diff instead"
            )
        selection = list(select(index, patterns, with_buffers=False))
        rows: list[UpdateRow] = []
        for group in groups(selection, max(index.layout.arena_bytes, default=0) // 3):
            plan = plan_read(index.layout, group, prefer=reach.costs())
            rows += await _next_update(sidecars, plan, deadline_s)
        document = sidecars.document
        return Updates(rows, job=document.job, incarnation=document.incarnation)

    return await reach.attempts(attempt, deadline_s)


def groups(selection: Sequence[SelectedTensor], most_bytes: int) -> Iterator[list[SelectedTensor]]:
    """Consecutive tensors of at most `most_bytes`; a larger one is alone."""
    group: list[SelectedTensor] = []
    size_bytes = 0
    for item in selection:
        if group and size_bytes + _bytes(item) > most_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(item)
        size_bytes += _bytes(item)
    if group:
        yield group


def _bytes(item: SelectedTensor) -> int:
    return item.tensor.numel * item_bytes(item.tensor.dtype)


async def _next_update(sidecars: Sidecars, plan: ReadPlan, deadline_s: float) -> list[UpdateRow]:
    ahead = AHEAD
    while True:
        status = await mesh_status(sidecars, time.monotonic() + STATUS_S)
        step = max(row.step for row in status) + ahead
        try:
            async with AsyncExitStack() as stack:
                before, after = await _two_steps(stack, sidecars, plan, step, deadline_s)
                return await _rows(sidecars, plan, before, after, deadline_s)
        except ConflictError as error:
            # Training was quicker than the request, or than a copy: ask further ahead, but not
            # so far that few attempts are left.
            ahead = min(2 * ahead, MOST_AHEAD)
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"two steps in a row could not be pinned: {error}") from error


async def _two_steps(
    stack: AsyncExitStack, sidecars: Sidecars, plan: ReadPlan, step: int, deadline_s: float
) -> tuple[Pinned, Pinned]:
    tasks = [
        asyncio.create_task(pin_step(stack, sidecars, plan, at, deadline_s))
        for at in (step, step + 1)
    ]
    try:
        before, after = await asyncio.gather(*tasks)
    finally:
        # If one fails, the other must not enter its lease into a closed stack.
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return before, after


async def _rows(
    sidecars: Sidecars, plan: ReadPlan, before: Pinned, after: Pinned, deadline_s: float
) -> list[UpdateRow]:
    weights, changes = await asyncio.gather(
        compute_stats(sidecars, plan, before, deadline_s, with_exponents=False),
        compute_stats(sidecars, plan, after, deadline_s, with_exponents=False, before=before),
    )
    rows = []
    for weight, change in zip(weights, changes, strict=True):
        one, norm = change.summary, change.summary.norm
        weight_norm = weight.summary.norm
        rows.append(
            UpdateRow(
                name=change.name,
                step=after.step,
                norm=norm,
                rms=norm / math.sqrt(one.count) if one.count else 0.0,
                max_abs=max(abs(one.min), abs(one.max)) if one.count else 0.0,
                weight_norm=weight_norm,
                ratio=norm / weight_norm if weight_norm else math.nan,
                changed=one.count - one.zero_count,
                numel=one.count,
                nonfinite=one.nan_count + one.inf_count,
            )
        )
    return rows
