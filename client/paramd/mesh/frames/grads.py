"""Streams of gradients: requests a little ahead of training, frames complete or dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

from paramd.errors import ConflictError, UsageError
from paramd.layout.plan import ReadPlan
from paramd.layout.stats import Part, StatsItem, stats_items
from paramd.mesh.frames.frames import (
    KINDS,
    GradFrame,
    GradNote,
    GradPlan,
    GradSelection,
    Kind,
    PartialGroups,
    ask_for,
    lazily_summed,
    make_plan,
)
from paramd.mesh.frames.stepping import (
    READ_S,
    PinnedStep,
    ReachLike,
    StepStream,
    StreamRequest,
    hold_step,
)
from paramd.mesh.peers.grpc import all_ended
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.reductions import compute_parts, stats_message
from paramd.mesh.reading.transfer import Transfer
from paramd.state import At
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import torch

    from paramd.mesh.frames.grad_tensors import TensorPool

REASONS: Final = {
    pb.NO_GRADIENT_NONE: "its grad is None",
    pb.NO_GRADIENT_OTHER_OPTIMIZER: "another optimizer updates it",
    pb.NO_GRADIENT_PLACEMENT: "its placement differs from its parameter's",
    pb.NO_GRADIENT_FROZEN: "it requires no gradient",
    pb.NO_GRADIENT_UNSUPPORTED: "it is not a dense tensor that fits its parameter",
    pb.NO_GRADIENT_CHANGED: (
        "its parameter has another name, shape, dtype or placement now; attachment.refresh() "
        "serves it"
    ),
}

MAX_ITEMS = 20_000
"""With more items on one rank they are reduced from a snapshot, in several calls."""

Items = Mapping[int, tuple[StatsItem, ...]]
"""Each rank's items to reduce; empty for full gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradRequest(StreamRequest):
    """A subscription to gradients; see `AsyncMesh.grads`."""

    kind: Kind = "full"
    rows: int | None = None
    """Evenly spaced rows of the first dim to sample; None takes all."""
    lossless: bool = False
    """Updates wait for this reader, if the trainer's operator allows it."""

    def __post_init__(self) -> None:
        StreamRequest.__post_init__(self)
        if self.kind not in KINDS:
            raise UsageError(f"kind: {self.kind!r}; expected one of {', '.join(KINDS)}")
        if self.kind != "full" and self.dtype is not None:
            raise UsageError("dtype: only frames of kind 'full' are cast")


@dataclass(frozen=True, slots=True)
class _Asking:
    """A plan, and the requests that it makes of each rank."""

    plan: GradPlan
    requests: Mapping[int, pb.PinSnapshotRequest]
    """For gradients read as they are; without sums to one rank at least, for the step."""
    sums: Mapping[int, pb.PinSnapshotRequest]
    """For gradients that are summed here."""
    items: Items


@dataclass(frozen=True, slots=True)
class _Held:
    """The pins of one step, and their request, which may differ from the present one."""

    asking: _Asking
    main: PinnedStep | None
    """None: everything is summed here."""
    sums: PinnedStep | None
    """None: without sums."""

    @property
    def plan(self) -> GradPlan:
        return self.asking.plan

    def steps(self) -> list[PinnedStep]:
        return [step for step in (self.main, self.sums) if step is not None]


class GradSteps:
    """Pins and reads gradients, for a `StepStream` that chooses the steps."""

    def __init__(
        self,
        reach: ReachLike,
        transfer: Transfer,
        wanted: GradRequest,
        asked: Sequence[GradSelection],
    ) -> None:
        self._reach = reach
        self._transfer = transfer
        self._wanted = wanted
        self._asked = asked
        self._learnt = PartialGroups()
        self._asking: _Asking | None = None
        """The next request; None: plan again."""
        self.ranks: tuple[int, ...] = ()

    async def hold(self, sidecars: Sidecars, at: At, timeout_s: float) -> _Held:
        asking = await self.planned(sidecars)
        requests = [asked for asked in (asking.requests, asking.sums) if asked]
        # Concurrently: once the update has begun it is too late to pin its gradients.
        found = await all_ended(
            [hold_step(sidecars, one, at, timeout_s) for one in requests], PinnedStep.release
        )
        main = found[0] if asking.requests else None
        return _Held(asking, main, found[-1] if asking.sums else None)

    def release(self, held: _Held) -> None:
        for step in held.steps():
            step.release()

    async def read(
        self, sidecars: Sidecars, at: At, dropped: int, held: _Held
    ) -> GradFrame[Any] | None:
        """The frame; None if its notes require a new plan."""
        began_s = time.monotonic()
        notes = [
            GradNote(rank, asked, note.none, note.partial_group)
            for one in held.steps()
            for rank, answer in one.answers.items()
            for note in answer.gradients.notes
            for asked in held.plan.owners.get((rank, note.arena_begin), ())
        ]
        if not self._learnt.update(held.plan, notes):
            self._asking = None
            return None
        none = {
            held.plan.asked[note.asked].name: REASONS.get(note.none, "unknown reason")  # type: ignore[call-overload]
            for note in notes
            if note.none and (note.rank, note.asked) in held.plan.used
        }
        bad: dict[str, list[int]] = {}
        values, parts = await self._values(held, none, bad)
        first = held.steps()[0]
        facts = next(iter(first.answers.values())).gradients
        return GradFrame(
            values,
            job=sidecars.document.job,
            incarnation=first.state.incarnation,
            history=at.history,
            step=at.step,
            dropped=dropped,
            replica=held.plan.plan.replica,
            none=none,
            scale=facts.scale,
            clip_factor=facts.clip_factor if facts.clip_factor else None,
            read_s=time.monotonic() - began_s,
            parts=parts,
            bad_ranks=bad,
        )

    async def planned(self, sidecars: Sidecars) -> _Asking:
        if self._asking is None:
            index = await self._reach.index(sidecars)
            plan = make_plan(index.layout, self._asked, self._learnt, costs=self._reach.costs())
            items = stats_items(plan.plan) if self._wanted.kind != "full" else {}
            requests = pin_requests(sidecars, plan.plan, self._wanted, items)
            sums = pin_requests(sidecars, plan.sums, self._wanted, {})
            if not requests and not sums:
                # Nothing to read (empty tensors), but frames still come at the right steps.
                rank = min(sidecars.document.peers, default=0)
                requests = {rank: pin_request(sidecars, self._wanted, ())}
            self.ranks = tuple(requests if requests else sums)
            self._asking = _Asking(plan, requests, sums, items)
        return self._asking

    async def _values(
        self, held: _Held, none: Mapping[str, str], bad: dict[str, list[int]]
    ) -> tuple[dict[str, Callable[[], Any]], dict[str, list[Part]] | None]:
        plan = held.plan
        sums: dict[int, torch.Tensor] = {}
        if plan.sums.tensors:
            sums = await self._summed(held)
        values: dict[str, Callable[[], Any]] = {}
        if self._wanted.kind == "full":
            from paramd.mesh.frames.grad_tensors import read_tensors

            tensors = await read_tensors(
                held.steps()[0].reading(self._wanted.transport),
                self._transfer,
                self.pool,
                plan.plan,
                plan.asked,
                plan.numbers,
                dtype=self._wanted.dtype,
            )
            for index, one in enumerate(plan.asked):
                found = sums[index] if plan.layers[index] else tensors[index]
                values[one.name] = partial(_same, None if one.name in none else found)
            return values, None
        exponents = self._wanted.kind == "histogram"
        parts = await read_parts(held.asking, held.main, bad, with_exponents=exponents)
        if sums:
            from paramd.mesh.frames.grad_tensors import tensor_stats

            for index, tensor in sums.items():
                parts[index] = [tensor_stats(tensor, with_exponents=exponents)]
        said: dict[str, list[Part]] = {}
        for index, one in enumerate(plan.asked):
            if one.name in none:
                values[one.name] = partial(_same, None)
                continue
            said[one.name] = parts[index]
            values[one.name] = lazily_summed(parts[index])
        return values, said

    async def _summed(self, held: _Held) -> dict[int, torch.Tensor]:
        """Partial gradients, summed in rank order: deterministic. The sum is rounded once."""
        from paramd.mesh.frames.grad_tensors import Sums, read_tensors

        await self._transfer.load_torch()
        assert held.sums is not None
        reading = held.sums.reading(self._wanted.transport)
        found = Sums()
        for layer in range(max(map(len, held.plan.layers))):
            numbers = [of[layer] if layer < len(of) else range(0) for of in held.plan.layers]
            tensors = await read_tensors(
                reading,
                self._transfer,
                self.pool,
                held.plan.sums,
                held.plan.asked,
                numbers,
                zeroed=layer > 0,
            )
            await self._transfer.run(partial(found.add, tensors))
        return found.rounded(self._wanted.dtype)

    @cached_property
    def pool(self) -> TensorPool:
        from paramd.mesh.frames.grad_tensors import TensorPool

        return TensorPool()


async def open_stream(
    reach: ReachLike, transfer: Transfer, wanted: GradRequest
) -> StepStream[_Held, GradFrame[Any]]:
    """Open a subscription; the caller closes it.

    Raises:
        NotFoundError: If a pattern matches nothing.
        UnreachableError: If no sidecar responds.
    """
    if wanted.kind == "full":
        await transfer.load_torch()

    async def attempt(sidecars: Sidecars) -> GradSteps:
        index = await reach.index(sidecars)
        asked = ask_for(index, wanted.patterns, wanted.rows)
        steps = GradSteps(reach, transfer, wanted, asked)
        await steps.planned(sidecars)
        return steps

    steps = await reach.attempts(attempt, time.monotonic() + READ_S)
    return StepStream(reach, steps, steps.read, every=wanted.every, keep_all=wanted.lossless)


def _same(value: Any) -> Any:
    return value


def pin_requests(
    sidecars: Sidecars, plan: ReadPlan, wanted: GradRequest, items: Items
) -> dict[int, pb.PinSnapshotRequest]:
    """Templates of the requests to a plan's ranks; `hold_step` sets the step."""
    found = {read.rank: pin_request(sidecars, wanted, read.spans) for read in plan.ranks}
    if not items or any(len(of_rank) > MAX_ITEMS for of_rank in items.values()):
        return found
    for rank, request in found.items():
        request.reduction.with_exponents = wanted.kind == "histogram"
        request.reduction.items.extend(map(stats_message, items[rank]))
    return found


def pin_request(
    sidecars: Sidecars, wanted: GradRequest, spans: Sequence[tuple[int, int]]
) -> pb.PinSnapshotRequest:
    """Template of the request to one rank."""
    every = wanted.every if wanted.lossless else 0
    return sidecars.pin_request(spans, source=pb.SOURCE_GRADIENTS, lossless_every=every)


async def read_parts(
    asking: _Asking, held: PinnedStep | None, bad: dict[str, list[int]], *, with_exponents: bool
) -> list[list[Part]]:
    """Statistics of each rank's part, by index into the plan's `asked`.

    Adds to `bad`, by name, the ranks whose part is not finite.

    Raises:
        ConflictError: If a rank's response does not match its request.
    """
    plan, items = asking.plan, asking.items
    owner = [index for index, of in enumerate(plan.numbers) for _ in of]
    found: list[list[Part]] = [[] for _ in plan.asked]

    def note(rank: int, item: StatsItem, part: Part) -> None:
        index = owner[item.tensor]
        found[index].append(part)
        if part.nan_count or part.inf_count:
            ranks = bad.setdefault(plan.asked[index].name, [])
            if rank not in ranks:
                ranks.append(rank)

    if held is None:
        return found
    if held.pins and plan.plan.tensors:
        wanted = pb.ComputeStatsRequest(with_exponents=with_exponents)
        parts = await compute_parts(held.reading(), items, wanted)
        ranks = (rank for rank, asked in items.items() for _ in asked)
        for rank, (item, stats) in zip(ranks, parts, strict=True):
            note(rank, item, stats)
        return found
    for rank, answer in held.answers.items():
        asked = items.get(rank, ())
        if [item.numel for item in asked] != [one.count for one in answer.stats]:
            raise ConflictError(
                f"{held.sidecars.who(rank)} returned statistics that do not match the request; try "
                "again"
            )
        for item, message in zip(asked, answer.stats, strict=True):
            note(rank, item, message)
    return found
