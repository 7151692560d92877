"""Sample parameters from live sidecars, and apply rules to their statistics.

Samples are read as users' reads are (pin, renew, release), and disturb training no more. The rules
(non-finite values, norm jumps) are pure.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from paramd.layout.dtypes import DTYPES
from paramd.layout.select import SelectedTensor
from paramd.layout.types import Layout, TensorLayout, full_box, offsets_in
from paramd.mesh.reading.pin import Pinner
from paramd.mesh.reading.stream import Reading
from paramd_service.control.alerts.book import Finding, Severity
from paramd_service.control.alerts.config import AlertConfig, Rule
from paramd_service.control.alerts.drift import (
    Difference,
    ReplicaGroup,
    Spans,
    ask_where,
    compare,
    spans_of,
)

if TYPE_CHECKING:
    from paramd.mesh.peers.discovery import SidecarFinder
    from paramd.mesh.peers.sidecars import Sidecars

MAX_TENSORS_TOLD = 50
"""Most tensors a rule reports by name; the rest are counted."""

TENSOR_RULES = frozenset({Rule.NON_FINITE, Rule.NORM_JUMP})

# Unordered, or without arithmetic in torch: sidecars refuse statistics of these.
NO_STATS = frozenset(name for name, one in DTYPES.items() if not one.reduced)

GRADIENT_FLOOR = 1e-3
"""Smallest root mean square of a gradient that counts, as a part of the median over all of them."""
VANISHED = 0.01
"""A gradient vanishes when it shrinks to this part of its usual norm, and more than others have."""

MAX_PLACES = 8
"""Most differences per round that are located; each costs a few calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInput:
    """Statistics of one full tensor at one step."""

    fqn: str
    count: int
    nan_count: int
    inf_count: int
    norm: float
    """Of the finite elements; NaN if there are elements and none is finite."""

    @classmethod
    def of(cls, fqn: str, told: Mapping[str, Any]) -> TensorInput:
        """From a document of statistics."""
        norm = told["norm"] if told["norm"] is not None else math.nan
        counts = {name: told[name] for name in ("count", "nan_count", "inf_count")}
        return cls(fqn=fqn, norm=norm, **counts)


class NormHistory:
    """The last norms of each tensor."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._norms: dict[str, deque[float]] = {}

    def of(self, fqn: str) -> Sequence[float]:
        """A tensor's earlier norms, oldest first."""
        return self._norms.get(fqn, ())

    def seen(self, tensors: Iterable[TensorInput]) -> None:
        """Add one round; tensors without a finite element have no norm to compare with."""
        for tensor in tensors:
            if math.isnan(tensor.norm):
                continue
            norms = self._norms.setdefault(tensor.fqn, deque(maxlen=self._window))
            norms.append(tensor.norm)

    def keep_only(self, fqns: Iterable[str]) -> None:
        """Drop tensors that a new layout no longer has."""
        kept = set(fqns)
        self._norms = {fqn: norms for fqn, norms in self._norms.items() if fqn in kept}


def tensor_findings(
    tensors: Sequence[TensorInput], history: NormHistory, step: int, config: AlertConfig
) -> list[Finding]:
    """Problems of the sampled tensors, compared with earlier rounds."""
    found: list[Finding] = []
    if config.looks_for(Rule.NON_FINITE):
        bad = [tensor for tensor in tensors if tensor.nan_count or tensor.inf_count]
        found += _told(bad, Rule.NON_FINITE, Severity.CRITICAL, _why_non_finite, step)
    if config.looks_for(Rule.NORM_JUMP):
        why = {
            tensor.fqn: reason
            for tensor in tensors
            if (reason := norm_jump(tensor, history.of(tensor.fqn), config))
        }
        jumped = [tensor for tensor in tensors if tensor.fqn in why]
        found += _told(jumped, Rule.NORM_JUMP, Severity.WARNING, lambda t: why[t.fqn], step)
    return found


def norm_jump(tensor: TensorInput, norms: Sequence[float], config: AlertConfig) -> str:
    """Why the norm is a jump; "" when it is none or there are too few rounds. Norms below the floor
    count as the floor: biases that start at zero grow by large factors harmlessly."""
    if len(norms) < config.norm_least or not tensor.count:
        return ""
    floor = config.norm_floor * tensor.count**0.5
    usual = max(median(norms), floor)
    if usual == 0:
        return ""
    ratio = tensor.norm / usual
    if ratio > config.norm_jump_ratio:
        return f"its norm is {ratio:.3g} times the median of the last {len(norms)} rounds"
    if ratio < 1 / config.norm_jump_ratio and usual > floor:
        return f"its norm fell to {ratio:.3g} of the median of the last {len(norms)} rounds"
    return ""


def gradient_findings(
    tensors: Sequence[TensorInput], history: NormHistory, step: int, config: AlertConfig
) -> list[Finding]:
    """Gradients that explode or vanish, compared with their own earlier norms.

    All gradients shrink as training converges: one vanishes only if it shrinks more than others. A
    gradient far below the others counts as growing from zero.
    """
    usual = {
        tensor.fqn: median(norms) / tensor.count**0.5
        for tensor in tensors
        if tensor.count and len(norms := history.of(tensor.fqn)) >= config.norm_least
    }
    floor = GRADIENT_FLOOR * median(usual.values()) if usual else 0.0
    ratios = {
        tensor.fqn: tensor.norm / tensor.count**0.5 / max(usual[tensor.fqn], floor)
        for tensor in tensors
        if usual.get(tensor.fqn, 0.0) > 0 and math.isfinite(tensor.norm)
    }
    common = min(median(ratios.values()), 1.0) if ratios else 1.0
    why: dict[str, str] = {}
    for fqn, ratio in ratios.items():
        if ratio > config.norm_jump_ratio:
            why[fqn] = f"its gradient explodes: {ratio:.3g} times its usual norm"
        elif ratio < common * VANISHED and usual[fqn] > floor:
            why[fqn] = f"its gradient vanishes: {ratio:.3g} of its usual norm"
    # The gradient that is farthest off is the likely cause, so it is reported first.
    worst = sorted(
        (tensor for tensor in tensors if tensor.fqn in why),
        key=lambda tensor: -abs(math.log(ratios[tensor.fqn] or 1e-300)),
    )
    return _told(worst, Rule.GRADIENT_JUMP, Severity.WARNING, lambda t: why[t.fqn], step)


def _why_non_finite(tensor: TensorInput) -> str:
    return (
        f"{tensor.nan_count:,} NaN and {tensor.inf_count:,} infinite of {tensor.count:,} elements"
    )


def _told(
    tensors: Sequence[TensorInput],
    rule: Rule,
    severity: Severity,
    why: Callable[[TensorInput], str],
    step: int,
) -> list[Finding]:
    found = [
        Finding(
            rule=rule,
            subject=tensor.fqn,
            severity=severity,
            reason=f"{tensor.fqn}: {why(tensor)}",
            fqn=tensor.fqn,
            step=step,
        )
        for tensor in tensors[:MAX_TENSORS_TOLD]
    ]
    more = len(tensors) - len(found)
    if more > 0:
        found.append(
            Finding(
                rule=rule,
                subject="more tensors",
                severity=severity,
                reason=f"{more:,} more tensors",
                step=step,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StatsRound:
    """Statistics of sampled tensors."""

    step: int
    tensors: tuple[TensorInput, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestRound:
    """Compared replicas."""

    step: int
    differences: tuple[Difference, ...]
    places: Mapping[int, str]
    """Location of a difference, in words, by its index; for the first few only."""


class MeshSampler:
    """Access to an incarnation's sidecars. All methods raise ParamdError."""

    def __init__(self, reaching: Callable[[], Awaitable[SidecarFinder]]) -> None:
        """No I/O. `reaching` opens the connections to the sidecars."""
        self._reaching = reaching

    async def layout(self) -> Layout:
        reach = await self._reaching()

        async def attempt(sidecars: Sidecars) -> Layout:
            return (await reach.index(sidecars)).layout

        return await reach.attempts(attempt, time.monotonic() + 30.0)

    async def stats(self, tensors: Sequence[TensorLayout], *, timeout_s: float) -> StatsRound:
        from paramd.layout.plan import plan_read
        from paramd.mesh.reading.pin import while_pinned
        from paramd.mesh.reading.reductions import compute_stats
        from paramd.mesh.reading.transfer import Chosen

        reach, deadline_s = await self._reaching(), time.monotonic() + timeout_s
        chosen = [
            SelectedTensor(tensor, tensor.fqn, full_box(tensor.shape), (tensor.fqn,))
            for tensor in tensors
            if tensor.dtype not in NO_STATS
        ]

        async def choosing(sidecars: Sidecars) -> Chosen:
            layout = (await reach.index(sidecars)).layout
            return Chosen((), plan_read(layout, chosen, costs=reach.costs()), layout.mirrored)

        table = await while_pinned(reach, choosing, compute_stats, deadline_s)
        rows = (TensorInput.of(row.name, row.summary.document()) for row in table)
        return StatsRound(step=table.step if table else -1, tensors=tuple(rows))

    async def gradients(self, patterns: Sequence[str], *, timeout_s: float) -> StatsRound:
        """Statistics of the gradients that one of the next updates consumes; none if no update
        comes in time, as in paused training."""
        from paramd.mesh.frames.grads import GradRequest, open_stream
        from paramd.mesh.reading.transfer import Transfer

        wanted = GradRequest(patterns=tuple(patterns), every=1, kind="stats", transport="auto")
        reach = await self._reaching()
        with closing(Transfer()) as transfer, suppress(TimeoutError):
            stream = await open_stream(reach, transfer, wanted)
            async with aclosing(stream.frames()) as frames, asyncio.timeout(timeout_s):
                async for frame in frames:
                    found = [one for one in frame.document()["params"] if one["none"] is None]
                    rows = tuple(TensorInput.of(one["name"], one) for one in found)
                    return StatsRound(step=frame.step, tensors=rows)
        return StatsRound(step=-1, tensors=())

    async def digests(self, groups: Sequence[ReplicaGroup], *, timeout_s: float) -> DigestRound:
        reach, deadline_s = await self._reaching(), time.monotonic() + timeout_s
        spans = spans_of(groups)

        async def attempt(sidecars: Sidecars) -> DigestRound:
            mirrored = (await reach.index(sidecars)).layout.mirrored
            pinner = Pinner(sidecars, backoff=reach.backoff)
            async with pinner.pinned(spans, deadline_s=deadline_s, with_buffers=mirrored) as pinned:
                reading = Reading(sidecars, pinned, deadline_s)
                return await digests_of(reach, reading, spans, groups)

        return await reach.attempts(attempt, deadline_s)


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of one set of pinned snapshots: bytes of several ranks at one step."""

    reach: SidecarFinder
    reading: Reading
    spans: Spans

    async def ask(self, rank: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Digests of byte ranges of the rank's arena, all within its spans."""
        offset_of = offsets_in(self.spans[rank])
        moved = [(offset_of(begin), offset_of(begin) + end - begin) for begin, end in ranges]
        return await self.reading.digests(rank, moved)


async def digests_of(
    reach: SidecarFinder, reading: Reading, spans: Spans, groups: Sequence[ReplicaGroup]
) -> DigestRound:
    """Compare the groups' replicas, whose `spans` are pinned."""
    all_digests = Digests(reach, reading, spans)
    asked: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        for rank in group.begins:
            asked.setdefault(rank, []).append(index)

    async def of(rank: int) -> list[bytes]:
        parts = [groups[index] for index in asked[rank]]
        ranges = [(g.begins[rank], g.begins[rank] + g.size_bytes) for g in parts]
        return await all_digests.ask(rank, ranges)

    answers = await asyncio.gather(*(of(rank) for rank in asked))
    digests: list[dict[int, bytes]] = [{} for _ in groups]
    for rank, found in zip(asked, answers, strict=True):
        for index, digest in zip(asked[rank], found, strict=True):
            digests[index][rank] = digest
    differences = tuple(
        difference
        for group, by_rank in zip(groups, digests, strict=True)
        if (difference := compare(group, by_rank)) is not None
    )
    places = {
        index: await ask_where(all_digests, difference)
        for index, difference in enumerate(differences[:MAX_PLACES])
    }
    return DigestRound(step=reading.pinned.state.step, differences=differences, places=places)
