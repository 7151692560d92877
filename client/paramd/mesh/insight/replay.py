"""`mesh.verify`: one update of one rank repeated by its sidecar, and compared bit by bit.

Parameters and optimizer state before and after the update and the gradients it consumed are pinned
on that rank; its sidecar repeats the update on copies, with torch's own optimizer. It needs no
replicas, and training continues meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from paramd.errors import AbortedError, DeadlineError, NotFoundError, UsageError
from paramd.layout.select import Pattern, SelectedTensor, select
from paramd.layout.types import joined
from paramd.mesh.insight.steps import Facts, facts_of, hold, present
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.grpc import all_ended
from paramd.mesh.peers.sidecars import Sidecars, Spans
from paramd.mesh.results import Table
from paramd.state import At
from paramd.v1 import sidecar_pb2 as pb

AHEAD = 3
MOST_AHEAD = 100

FEW = 64
"""Flipped bits damage few elements; arithmetic that cannot be repeated shows in many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRow:
    """One tensor of a repeated update."""

    name: str
    """Name of the parameter; of several that share one flat parameter, all of them."""
    key: str
    """Kind of optimizer state; empty for the parameter itself."""
    numel: int
    """Elements on this rank."""
    differing: int
    """Elements that differ from the recomputed ones."""
    element: int
    """The first of them, counted in this rank's memory; -1 for none."""
    bits: tuple[int, ...]
    """The bits that differ, 0 the lowest."""
    refused: str
    """Why it was not repeated; empty: it was."""


class Replay(Table[ReplayRow]):
    """A repeated update of one rank; differing tensors first."""

    columns = (
        ("name", lambda row: row.name),
        ("state", lambda row: row.key or "-"),
        ("differing", lambda row: row.refused or f"{row.differing:,} of {row.numel:,}"),
        ("element", lambda row: str(row.element) if row.differing else ""),
        ("bits", lambda row: ", ".join(map(str, row.bits[:8]))),
    )
    row_type = ReplayRow
    about = ("job", "incarnation", "rank", "step")
    job: str
    incarnation: int
    rank: int
    step: int
    """The update: it led from step - 1 to step."""

    @property
    def differing(self) -> list[ReplayRow]:
        """Rows of tensors that differ."""
        return [row for row in self if row.differing]

    @property
    def clean(self) -> bool:
        """Whether some tensors were repeated, and none differs."""
        return not self.differing and any(not row.refused for row in self)

    def summary(self) -> str:
        made = [row for row in self if not row.refused]
        what = f"update {self.step} on rank {self.rank}"
        if not made:
            reason = self[0].refused if self else "the rank has no parameter that matches"
            return f"{what} could not be verified: {reason}"
        if not self.differing:
            left = [row.refused for row in self if row.refused]
            more = f"; {len(left)} were not: {left[0]}" if left else ""
            return f"{what} verified: {len(made)} tensors recomputed, bit-identical{more}"
        if sum(row.differing for row in self) > FEW:
            return (
                f"{what} could not be reproduced: {len(self.differing)} of {len(made)} tensors "
                "differ in many elements, so this is not a flipped bit. Likely causes: a hook of "
                "the optimizer changes gradients or hyper-parameters, or the sidecar uses other "
                "kernels or threads"
            )
        first = self.differing[0]
        which = f"{first.key} of {first.name}" if first.key else first.name
        bits = ", ".join(map(str, first.bits[:8]))
        return (
            f"{what} is wrong: {which} differs in {first.differing} elements, first in element "
            f"{first.element}, bits {bits}. Check another update: were the same elements wrong "
            "again, the hardware is at fault, or the rank computes differently from its sidecar"
        )


async def compute_replay(
    reach: SidecarFinder, rank: int, patterns: Sequence[Pattern], deadline_s: float
) -> Replay:
    """Repeat one update of a rank, as `AsyncMesh.verify`.

    Args:
        reach: What finds the sidecars.
        rank: The rank.
        patterns: Globs over names.
        deadline_s: When it must be done, by the monotonic clock.

    Raises:
        ParamdError: As `AsyncMesh.verify`.
    """

    async def attempt(sidecars: Sidecars) -> Replay:
        index = await reach.index(sidecars)
        world_size = sidecars.document.world_size
        if not 0 <= rank < world_size:
            # A rank that has not joined, or whose sidecar is being started again, is waited for.
            raise NotFoundError(f"rank: {rank}; the job has ranks 0 to {world_size - 1}")
        chosen = list(select(index, patterns, with_buffers=False))
        ahead = AHEAD
        while True:
            now = await present(sidecars, rank)
            try:
                return await _replayed(sidecars, rank, chosen, now, ahead, deadline_s)
            except AbortedError as error:
                ahead = min(2 * ahead, MOST_AHEAD)
                if time.monotonic() > deadline_s:
                    raise DeadlineError(f"no update could be captured: {error}") from error

    return await reach.attempts(attempt, deadline_s)


async def _replayed(
    sidecars: Sidecars,
    rank: int,
    chosen: Sequence[SelectedTensor],
    now: At,
    ahead: int,
    deadline_s: float,
) -> Replay:
    """An update about two times `ahead` steps from `now`. Raises AbortedError: it was missed."""
    step = now.step + ahead
    async with AsyncExitStack() as stack:
        at = At(now.history, step)
        facts = facts_of(await hold(stack, sidecars, {rank: ()}, "any", at, deadline_s))[rank]
        spans = spans_of(facts, rank, chosen)
        if not spans:
            raise UsageError(
                f"rank {rank}: no optimizer given to attach updates a parameter that matches"
            )
        step += ahead
        before = At(now.history, step)
        request = await _pin_update(
            stack, sidecars, {rank: spans}, ["", *facts.keys], before, deadline_s
        )
        left_s = deadline_s - time.monotonic()
        answer = await sidecars.ask(rank, request, pb.ReplayUpdateResponse, left_s)
    names = names_of(facts, rank, chosen)
    document = sidecars.document
    rows = (_row(tensor, names) for tensor in answer.tensors)
    return Replay(
        sorted(rows, key=lambda row: (-row.differing, row.name)),
        job=document.job,
        incarnation=document.incarnation,
        rank=rank,
        step=step + 1,
    )


async def _pin_update(
    stack: AsyncExitStack,
    sidecars: Sidecars,
    spans: Spans,
    keys: Sequence[str],
    before: At,
    deadline_s: float,
) -> pb.ReplayUpdateRequest:
    """Pin what the update after the step `before` needs and makes; `stack` releases it.

    `spans`: of one rank. `keys`: of the parameters ("") and of each kind of state.

    Raises:
        AbortedError: If the rank missed a step, else as `hold`.
    """
    (rank,) = spans
    after = At(before.history, before.step + 1)
    # (spans, key, step): parameters and state before and after, gradients, hyper-parameters.
    wanted: list[tuple[Spans, str | None, At]]
    wanted = [(spans, key, at) for at in (before, after) for key in keys]
    wanted += [(spans, None, after), ({rank: ()}, "any", before)]
    # If one fails, the others must not enter their leases into a closed stack.
    pinned = await all_ended([hold(stack, sidecars, *pin, deadline_s) for pin in wanted])
    ids = [held.answers[rank].snapshot_id for held in pinned]
    befores, afters, (gradients, used) = ids[: len(keys)], ids[len(keys) : -2], ids[-2:]
    return pb.ReplayUpdateRequest(
        pairs=[
            pb.ReplayPair(state_key=key, before_snapshot_id=old, after_snapshot_id=new)
            for key, old, new in zip(keys, befores, afters, strict=True)
        ],
        gradients_snapshot_id=gradients,
        facts_snapshot_id=used,
    )


def spans_of(facts: Facts, rank: int, chosen: Sequence[SelectedTensor]) -> list[tuple[int, int]]:
    """The bytes of all optimizers' parameters on a rank that have a chosen piece."""
    return joined(
        {(param["begin"], param["end"]) for param, _ in _params_of(facts, rank, chosen)}, 0
    )


def names_of(facts: Facts, rank: int, chosen: Sequence[SelectedTensor]) -> Mapping[int, str]:
    """Names of the optimizers' parameters on a rank, by their first byte."""
    by_begin: dict[int, dict[str, None]] = {}
    for param, fqn in _params_of(facts, rank, chosen):
        by_begin.setdefault(param["begin"], {})[fqn] = None
    return {begin: ", ".join(names) for begin, names in by_begin.items()}


def _params_of(
    facts: Facts, rank: int, chosen: Sequence[SelectedTensor]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The optimizers' parameter of each chosen piece on a rank, and that one's fqn."""
    for item in chosen:
        for piece in item.tensor.pieces:
            param = facts.param_at(piece.arena_begin)
            if piece.rank == rank and piece.region.numel and param is not None:
                yield param, item.tensor.fqn


def _row(tensor: pb.ReplayedTensor, names: Mapping[int, str]) -> ReplayRow:
    return ReplayRow(
        name=names.get(tensor.arena_begin, f"arena byte {tensor.arena_begin}"),
        key=tensor.state_key,
        numel=tensor.numel,
        differing=tensor.differing_count,
        element=tensor.element if tensor.differing_count else -1,
        bits=tuple(bit for bit in range(64) if tensor.bits >> bit & 1),
        refused=tensor.refused,
    )
