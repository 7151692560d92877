"""`mesh.updates`: the changes of one update, computed by the sidecars from two snapshots.

Both steps are requested before they come, so that they follow each other. A token may pin about
an arena's worth of snapshots, so large selections are taken in groups, each at a different step.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from paramd.documents import Document, Finite
from paramd.errors import (
    AbortedError,
    ConflictError,
    DeadlineError,
    ExhaustedError,
    NotFoundError,
    UsageError,
)
from paramd.layout.dtypes import item_bytes
from paramd.layout.plan import ReadPlan, plan_read
from paramd.layout.select import Pattern, SelectedTensor, select
from paramd.mesh.exports.download import batches
from paramd.mesh.frames.stepping import CAPTURE_LEASE, PinnedStep
from paramd.mesh.insight.steps import Facts, facts_of, hold, pin_step, present
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.grpc import LeaseEndedError, all_ended
from paramd.mesh.peers.sidecars import Pinned, Sidecars, Spans
from paramd.mesh.reading.reductions import compute_stats
from paramd.mesh.reading.stream import Reading
from paramd.mesh.results import Table, mesh_status
from paramd.state import At

AHEAD = 3
"""Steps between request and the first step requested; more after each that was missed."""

SLOW_S = 0.5
"""Steps that take longer leave time to ask for the next one."""

MOST_AHEAD = 100

STATUS_S = 5.0
MAX_STEPS = 100_000

KEY = "exp_avg_sq"
"""Adam's second moment."""

ADAMS = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW")
"""Optimizers whose rule gives the effective learning rate."""

Moments: TypeAlias = tuple[PinnedStep, Mapping[int, Facts]]
"""The moments after an update, and what the update used, by rank."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class UpdateRow(Document):
    """The changes of one parameter by one update."""

    name: str
    step: int
    """The last update: together they led from step - `steps` to step."""
    norm: Finite
    """Norm of the update."""
    rms: Finite
    """The norm divided by the root of the number of elements."""
    max_abs: Finite
    weight_norm: Finite
    """Norm of the weight before the update."""
    ratio: Finite
    """norm / weight_norm; NaN for a weight of zeros."""
    changed: int
    """Elements that the update changed, as far as their dtype shows it."""
    numel: int
    nonfinite: int
    """Elements whose change is NaN or infinite."""
    moment_rms: Finite
    """Root mean square of Adam's second moment after the update; NaN where it is not known."""
    effective_lr: Finite
    """lr / (sqrt(v) + eps) of an element whose bias-corrected second moment v is the parameter's
    mean, with the update's own lr. Of Adam and AdamW; NaN for others, and where it is not known."""


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
        ("v rms", lambda row: f"{row.moment_rms:.3g}"),
        ("effective lr", lambda row: f"{row.effective_lr:.3g}"),
    )
    row_type = UpdateRow
    about = ("job", "incarnation")
    job: str
    incarnation: int
    history: int = 0
    """As in `Summoned`, for all rows."""
    moments_missing: str = ""
    """Why there are no second moments; empty when there are."""

    def summary(self) -> str:
        norm = math.hypot(*(row.norm for row in self if math.isfinite(row.norm)))
        return f"{len(self)} parameters of {self.job!r}, updates of norm {norm:.4g} together"


def _order(row: UpdateRow) -> tuple[bool, float, str]:
    return not math.isnan(row.ratio), -row.ratio if not math.isnan(row.ratio) else 0.0, row.name


async def compute_updates(
    reach: SidecarFinder, patterns: Sequence[Pattern], deadline_s: float, steps: int = 1
) -> Updates:
    """The changes of each parameter by the next updates, as `AsyncMesh.updates`.

    Args:
        reach: What finds the sidecars.
        patterns: Globs over names.
        deadline_s: When it must be done, by the monotonic clock.
        steps: Updates to measure together.

    Raises:
        ParamdError: As `AsyncMesh.updates`.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
        raise UsageError(f"steps: {steps!r}; expected 1 to {MAX_STEPS:,}")

    async def attempt(sidecars: Sidecars) -> Updates:
        index = await reach.index(sidecars)
        if index.layout.mirrored:
            raise ConflictError(
                "the parameters are mirrored, so exact steps cannot be read; compare states with "
                "mesh.diff instead"
            )
        selection = list(select(index, patterns, with_buffers=False))
        replica = plan_read(index.layout, selection, costs=reach.costs()).replica
        groups = [
            (plan_read(index.layout, group, replica=replica), group)
            for group in batches(selection, _bytes, max(index.layout.arena_bytes, default=0) // 3)
        ]
        parts = await _all_groups(sidecars, groups, deadline_s, steps)
        document = sidecars.document
        rows = sorted((row for part in parts for row in part.rows), key=_order)
        missing = [part.missing for part in parts if part.missing]
        return Updates(
            rows,
            job=document.job,
            incarnation=document.incarnation,
            history=parts[0].history if parts else 0,
            moments_missing=missing[0] if missing else "",
        )

    return await reach.attempts(attempt, deadline_s)


def _bytes(item: SelectedTensor) -> int:
    """Most that one rank holds of it, which is what counts for the rank's budget."""
    held: Counter[int] = Counter()
    for piece in item.tensor.pieces:
        held[piece.rank] += piece.region.numel
    return max(held.values(), default=0) * item_bytes(item.tensor.dtype)


@dataclass(frozen=True, slots=True)
class _Part:
    """The results of some of the tensors."""

    rows: Sequence[UpdateRow]
    missing: str
    """Why they have no moments; empty: they have."""
    history: int


async def _all_groups(
    sidecars: Sidecars,
    groups: Sequence[tuple[ReadPlan, Sequence[SelectedTensor]]],
    deadline_s: float,
    steps: int,
) -> list[_Part]:
    """The groups' updates, one after the other, all of one history. Raises as `_next_update`."""
    parts: list[_Part] = []
    while len(parts) < len(groups):
        part = await _next_update(sidecars, *groups[len(parts)], deadline_s, steps)
        if parts and parts[0].history != part.history:
            # Rolled back meanwhile: what was found before is of a training that was left.
            parts.clear()
        else:
            parts.append(part)
    return parts


async def _next_update(
    sidecars: Sidecars,
    plan: ReadPlan,
    group: Sequence[SelectedTensor],
    deadline_s: float,
    steps: int,
) -> _Part:
    ahead = 0
    while True:
        status = await mesh_status(sidecars, time.monotonic() + STATUS_S)
        ahead = ahead or (1 if min(row.step_time_s for row in status) > SLOW_S else AHEAD)
        step = max(row.step for row in status) + ahead
        history = (await present(sidecars)).history
        try:
            async with AsyncExitStack() as stack:
                between = At(history, step), At(history, step + steps)
                before, after, moments = await _two_steps(
                    stack, sidecars, plan, between, deadline_s
                )
                if before.state.edits != after.state.edits:
                    raise ConflictError("an edit was applied between the two steps")
                rows = await _rows(Reading(sidecars, before, deadline_s), plan, after)
                why = moments if isinstance(moments, str) else ""
                if not isinstance(moments, str):
                    reading = Reading(sidecars, moments[0].pinned, deadline_s)
                    rows = await _with_moments(rows, reading, plan, group, moments)
                return _Part(rows, why, history)
        except ConflictError as error:
            # Training was quicker than the request, or than a copy: request further ahead, but not
            # so far
            # that few attempts are left.
            ahead = min(2 * ahead, MOST_AHEAD)
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"two steps in a row could not be pinned: {error}") from error
        except LeaseEndedError as error:
            # This host was too busy to renew it in time: pin the next steps, for longer.
            CAPTURE_LEASE.ended()
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    "two steps were pinned, but this host is too busy to keep them until they are "
                    "read; allow more time (timeout=), or name fewer parameters"
                ) from error


async def _two_steps(
    stack: AsyncExitStack,
    sidecars: Sidecars,
    plan: ReadPlan,
    steps: tuple[At, At],
    deadline_s: float,
) -> tuple[Pinned, Pinned, Moments | str]:
    spans = {read.rank: read.spans for read in plan.ranks}
    pins: list[Awaitable[Any]] = [pin_step(stack, sidecars, plan, at, deadline_s) for at in steps]
    last = At(steps[1].history, steps[1].step - 1)
    # The hyper-parameters that the last update used are those of the step before it.
    pins += [
        _moments(stack, sidecars, of, at, deadline_s)
        for of, at in ((dict.fromkeys(spans, ()), last), (spans, steps[1]))
    ]
    # If one fails, the others must not enter their leases into a closed stack.
    before, after, used, moments = await all_ended(pins)
    if isinstance(used, str) or isinstance(moments, str):
        return before, after, used if isinstance(used, str) else moments
    return before, after, (moments, facts_of(used))


async def _moments(
    stack: AsyncExitStack,
    sidecars: Sidecars,
    spans: Spans,
    at: At,
    deadline_s: float,
) -> PinnedStep | str:
    """The second moments at a step; or the reason why there are none."""
    try:
        return await hold(stack, sidecars, spans, KEY, at, deadline_s)
    except AbortedError as error:
        raise ConflictError(str(error)) from error
    except (ConflictError, NotFoundError, ExhaustedError) as error:
        return str(error)


async def _with_moments(
    rows: Sequence[UpdateRow],
    reading: Reading,
    plan: ReadPlan,
    group: Sequence[SelectedTensor],
    moments: Moments,
) -> list[UpdateRow]:
    held, used = moments
    facts = facts_of(held)
    table = await compute_stats(reading, plan)
    found = []
    for row, stats, item in zip(rows, table, group, strict=True):
        known = _where(item, facts)
        if known is None or KEY not in known[1]["keys"] or not stats.summary.count:
            found.append(row)
            continue
        rank, param = known
        summary = stats.summary
        found.append(
            replace(
                row,
                moment_rms=summary.norm / math.sqrt(summary.count),
                effective_lr=_effective_lr(used[rank], param, summary.mean),
            )
        )
    return found


def _where(
    item: SelectedTensor, facts: Mapping[int, Facts]
) -> tuple[int, Mapping[str, Any]] | None:
    """A rank that has a piece of the tensor, and the optimizer's parameter that it belongs to."""
    for piece in item.tensor.pieces:
        if piece.rank in facts and piece.region.numel:
            param = facts[piece.rank].param_at(piece.arena_begin)
            if param is not None:
                return piece.rank, param
    return None


def _effective_lr(used: Facts, param: Mapping[str, Any], mean: float) -> float:
    """By Adam's rule: v / (1 - beta2 ** t) is the bias-corrected second moment."""
    group, count = used.group_of(param), param["scalars"].get("step")
    try:
        if used.classes[param["optimizer"]] not in ADAMS or group["amsgrad"]:
            return math.nan
        corrected = mean / (1 - group["betas"][1] ** count)
        return float(group["lr"] / (math.sqrt(corrected) + group["eps"]))
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return math.nan


async def _rows(before: Reading, plan: ReadPlan, after: Pinned) -> list[UpdateRow]:
    weights, changes = await asyncio.gather(
        compute_stats(before, plan),
        compute_stats(replace(before, pinned=after), plan, before=before.pinned),
    )
    rows = []
    for weight, change in zip(weights, changes, strict=True):
        one, norm = change.summary, change.summary.norm
        weight_norm = weight.summary.norm
        rows.append(
            UpdateRow(
                name=change.name,
                step=after.state.step,
                norm=norm,
                rms=norm / math.sqrt(one.count) if one.count else 0.0,
                max_abs=max(abs(one.min), abs(one.max)) if one.count else 0.0,
                weight_norm=weight_norm,
                ratio=norm / weight_norm if weight_norm else math.nan,
                changed=one.count - one.zero_count,
                numel=one.count,
                nonfinite=one.nan_count + one.inf_count,
                moment_rms=math.nan,
                effective_lr=math.nan,
            )
        )
    return rows
