"""Gradients of a running job, frame by frame: asked for a little ahead, whole or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from paramd.layout.stats import Part, StatsItem, stats_items
from paramd.mesh.frames import GradFrame, lazily_summed
from paramd.mesh.grad_parts import at_step, pin_request, pin_requests, read_parts
from paramd.mesh.grad_plan import Asked, GradNote, GradPlan, Learnt, ask_for, make_plan
from paramd.mesh.grad_request import REASONS, GradRequest
from paramd.mesh.held_step import HeldStep, hold_step
from paramd.mesh.pin import Pinned
from paramd.mesh.sidecars import Sidecars
from paramd.mesh.stepping import ReachLike, StepStream
from paramd.mesh.transfer import Transfer
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import torch

    from paramd.mesh.grad_tensors import TensorPool

READ_S = 60.0
"""Longest time to read what was captured of one step."""


@dataclass(frozen=True, slots=True)
class _Held:
    """One step of everything that was asked for."""

    plan: GradPlan
    main: HeldStep
    sums: HeldStep | None

    def steps(self) -> list[HeldStep]:
        return [self.main] if self.sums is None else [self.main, self.sums]


class GradSteps:
    """Asks for gradients and reads them; the stream decides which steps."""

    def __init__(
        self, reach: ReachLike, transfer: Transfer, wanted: GradRequest, asked: Sequence[Asked]
    ) -> None:
        self._reach = reach
        self._transfer = transfer
        self._wanted = wanted
        self._asked = asked
        self._learnt = Learnt()
        self._plan: GradPlan | None = None
        self._requests: dict[int, pb.PinSnapshotRequest] = {}
        self._sum_requests: dict[int, pb.PinSnapshotRequest] = {}
        self._items: dict[int, tuple[StatsItem, ...]] = {}
        self._pool: TensorPool | None = None
        self.ranks: tuple[int, ...] = ()

    async def prepare(self, sidecars: Sidecars) -> None:
        """Makes the first plan."""
        await self._make_plan(sidecars)

    async def hold(self, sidecars: Sidecars, step: int, timeout_s: float) -> _Held:
        """As `Steps.hold`."""
        if self._plan is None:
            await self._make_plan(sidecars)
        plan = self._plan
        assert plan is not None
        requests = [r for r in (self._requests, self._sum_requests) if r]
        # Together: once the update has begun it is too late to ask.
        tasks = [
            asyncio.create_task(hold_step(sidecars, at_step(one, step), step, timeout_s))
            for one in requests
        ]
        try:
            found = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    task.result().let_go()
            raise
        return _Held(plan, found[0], found[1] if len(found) > 1 else None)

    def let_go(self, held: _Held) -> None:
        """As `Steps.let_go`."""
        for step in held.steps():
            step.let_go()

    async def read(
        self, sidecars: Sidecars, step: int, dropped: int, held: _Held
    ) -> GradFrame[Any] | None:
        """The frame; None when the notes make another plan necessary."""
        began_s = time.monotonic()
        notes = [note for one in held.steps() for note in _notes(held.plan, one)]
        if not self._learnt.hear(held.plan, notes):
            self._plan = None
            return None
        none = {
            held.plan.asked[note.asked].name: REASONS.get(note.none, "of a reason unknown here")  # type: ignore[call-overload]
            for note in notes
            if note.none and (note.rank, note.asked) in held.plan.used
        }
        bad: dict[str, list[int]] = {}
        values, parts = await self._values(sidecars, step, held, none, bad)
        facts = next(iter(held.main.answers.values())).gradients
        return GradFrame(
            values,
            job=sidecars.document.job,
            epoch=held.main.epoch,
            step=step,
            dropped=dropped,
            none=none,
            scale=facts.scale,
            clip_factor=facts.clip_factor if facts.clip_factor else None,
            read_s=time.monotonic() - began_s,
            parts=parts,
            bad_ranks=bad,
        )

    async def _make_plan(self, sidecars: Sidecars) -> None:
        index = await self._reach.index(sidecars)
        plan = make_plan(index.layout, self._asked, self._learnt, prefer=self._reach.costs())
        self._items = stats_items(plan.plan) if self._wanted.kind != "full" else {}
        self._requests = pin_requests(sidecars, plan.plan, self._wanted, self._items)
        self._sum_requests = pin_requests(sidecars, plan.sums, self._wanted, {})
        if not self._requests:
            if self._sum_requests:
                self._requests, self._sum_requests = self._sum_requests, {}
            else:
                # Nothing to read, but still something to say: at which step.
                self._requests = {
                    min(sidecars.document.peers): pin_request(sidecars, self._wanted, ())
                }
        self.ranks = tuple(self._requests)
        self._plan = plan

    async def _values(
        self,
        sidecars: Sidecars,
        step: int,
        held: _Held,
        none: Mapping[str, str],
        bad: dict[str, list[int]],
    ) -> tuple[dict[str, Callable[[], Any]], dict[str, list[Part]] | None]:
        plan, deadline_s = held.plan, time.monotonic() + READ_S
        sums: dict[int, torch.Tensor] = {}
        if plan.sums.tensors:
            sums = await self._summed(sidecars, step, held, deadline_s)
        values: dict[str, Callable[[], Any]] = {}
        if self._wanted.kind == "full":
            tensors = await self._tensors(sidecars, step, held, deadline_s)
            for index, one in enumerate(plan.asked):
                found = sums[index] if plan.layers[index] else tensors[index]
                values[one.name] = partial(_same, None if one.name in none else found)
            return values, None
        exponents = self._wanted.kind == "histogram"
        parts = await read_parts(
            sidecars, held.plan, held.main, self._items, deadline_s, bad, with_exponents=exponents
        )
        if sums:
            from paramd.mesh.grad_tensors import tensor_stats

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

    async def _tensors(
        self, sidecars: Sidecars, step: int, held: _Held, deadline_s: float
    ) -> dict[int, torch.Tensor]:
        from paramd.mesh.grad_tensors import read_tensors

        return await read_tensors(
            sidecars, self._transfer, self.pool, held.plan.plan, held.plan.asked,
            held.plan.numbers, Pinned(held.main.epoch, step, held.main.pins),
            self._wanted.dtype, self._wanted.transport, deadline_s,
        )  # fmt: skip

    async def _summed(
        self, sidecars: Sidecars, step: int, held: _Held, deadline_s: float
    ) -> dict[int, torch.Tensor]:
        """Gradients that are sums over ranks, added up in the order of ranks."""
        from paramd.mesh.grad_tensors import read_tensors

        await self._transfer.load_torch()
        source = held.sums if held.sums is not None else held.main
        pinned = Pinned(source.epoch, step, source.pins)
        found: dict[int, torch.Tensor] = {}
        for layer in range(max(map(len, held.plan.layers))):
            numbers = [of[layer] if layer < len(of) else range(0) for of in held.plan.layers]
            tensors = await read_tensors(
                sidecars, self._transfer, self.pool, held.plan.sums, held.plan.asked, numbers,
                pinned, self._wanted.dtype, self._wanted.transport, deadline_s,
            )  # fmt: skip
            for index, tensor in tensors.items():
                found[index] = found[index].add_(tensor) if index in found else tensor
        return found

    @property
    def pool(self) -> TensorPool:
        if self._pool is None:
            from paramd.mesh.grad_tensors import TensorPool

            self._pool = TensorPool()
        return self._pool


async def open_stream(
    reach: ReachLike, transfer: Transfer, wanted: GradRequest
) -> StepStream[_Held, GradFrame[Any]]:
    """A subscription; to be closed.

    Raises:
        NotFoundError: a pattern matches nothing. UnreachableError: no sidecar answers.
    """
    if wanted.kind == "full":
        await transfer.load_torch()

    async def attempt(sidecars: Sidecars) -> GradSteps:
        index = await reach.index(sidecars)
        asked = ask_for(index, wanted.patterns, wanted.rows)
        steps = GradSteps(reach, transfer, wanted, asked)
        await steps.prepare(sidecars)
        return steps

    steps = await reach.attempts(attempt, time.monotonic() + READ_S)
    return StepStream(reach, steps, steps.read, every=wanted.every, keep_all=wanted.lossless)


def _notes(plan: GradPlan, held: HeldStep) -> list[GradNote]:
    found = []
    for rank, answer in held.answers.items():
        for note in answer.gradients.notes:
            for asked in plan.owners.get((rank, note.arena_begin), ()):
                found.append(GradNote(rank, asked, note.none, note.partial_group))
    return found


def _same(value: Any) -> Any:
    return value
