"""Replica drift: which pieces must be equal, which to compare now, and which ranks differ. Only
digests are requested: alerts name the differing bits, never values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import xxhash

from paramd.layout.dtypes import ITEM_BYTES, item_bytes
from paramd.layout.replicas import shared_pieces
from paramd.layout.types import Layout, Region, TensorKind, TensorLayout, joined
from paramd_service.alerts.book import Finding, Severity
from paramd_service.alerts.config import Rule
from paramd_service.control.mesh.registry import listed

if TYPE_CHECKING:
    from paramd_service.alerts.sampling import Digests

Spans: TypeAlias = Mapping[int, Sequence[tuple[int, int]]]
"""Half-open byte ranges of arenas, sorted and disjoint, by rank."""

PARTS = 64
"""Parts a range is split into per search round; 64 MiB take at most five."""

_BYTE_OF = {xxhash.xxh3_128_digest(bytes([value])): value for value in range(256)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaGroup:
    """Pieces of one tensor with the same elements in the same order on several ranks."""

    fqn: str
    region: Region
    size_bytes: int
    item_bytes: int
    begins: Mapping[int, int]
    """First byte in the arena, by rank; two ranks or more."""
    state_key: str = ""
    """The kind of optimizer state; empty: the parameter itself."""

    @property
    def name(self) -> str:
        """The tensor or its state, in words."""
        return f"{self.state_key} of {self.fqn}" if self.state_key else self.fqn

    def on(self, ranks: Iterable[int]) -> ReplicaGroup:
        return replace(self, begins={rank: self.begins[rank] for rank in sorted(ranks)})


def replica_groups(tensor: TensorLayout) -> list[ReplicaGroup]:
    """Replicated pieces of a tensor; none for buffers: every rank has its own."""
    if tensor.kind is not TensorKind.PARAMETER:
        return []
    size = item_bytes(tensor.dtype)
    return [
        ReplicaGroup(
            fqn=tensor.fqn,
            region=region,
            size_bytes=region.numel * size,
            item_bytes=size,
            begins=begins,
        )
        for region, begins in shared_pieces(tensor)
    ]


@dataclass(frozen=True, slots=True)
class Sample:
    """The tensors of one round, and where the next one continues."""

    tensors: tuple[TensorLayout, ...]
    next_begin: int


def next_sample(
    layout: Layout, begin: int, *, most_bytes: int, first: Iterable[str] = ()
) -> Sample:
    """Parameters from index `begin` on, cyclically, until a rank would copy too much; at least one.
    `first` names tensors to sample again before all others."""
    params = [
        tensor
        for tensor in layout.tensors
        if tensor.kind is TensorKind.PARAMETER and tensor.dtype in ITEM_BYTES and tensor.numel
    ]
    if not params:
        return Sample((), 0)
    begin %= len(params)
    wanted = set(first)
    again = [tensor for tensor in params if tensor.fqn in wanted]
    chosen: dict[str, TensorLayout] = {}
    left_bytes = most_bytes
    for tensor in again:
        if chosen and _rank_bytes(tensor) > left_bytes // 2:
            continue
        chosen[tensor.fqn] = tensor
        left_bytes -= _rank_bytes(tensor)
    for count in range(len(params)):
        tensor = params[(begin + count) % len(params)]
        if tensor.fqn in chosen:
            continue
        if count and _rank_bytes(tensor) > left_bytes:
            return Sample(tuple(chosen.values()), (begin + count) % len(params))
        chosen[tensor.fqn] = tensor
        left_bytes -= _rank_bytes(tensor)
    return Sample(tuple(chosen.values()), begin)


def _rank_bytes(tensor: TensorLayout) -> int:
    """Bytes of the largest piece of the tensor on one rank."""
    size = item_bytes(tensor.dtype)
    return max((piece.region.numel for piece in tensor.pieces), default=0) * size


def groups_of(
    tensors: Iterable[TensorLayout], joined: set[int], *, most_ranks: int, turn: int
) -> list[ReplicaGroup]:
    """The tensors' replicated pieces on the joined ranks, restricted as in `choose_holders`."""
    groups = [
        group.on(joined.intersection(group.begins))
        for tensor in tensors
        for group in replica_groups(tensor)
        if len(joined.intersection(group.begins)) > 1
    ]
    return choose_holders(groups, most_ranks=most_ranks, turn=turn)


def choose_holders(
    groups: Sequence[ReplicaGroup], *, most_ranks: int, turn: int
) -> list[ReplicaGroup]:
    """Restrict groups to at most `most_ranks` ranks in total, with two holders or more each.

    All holders if they fit. Otherwise as many as fit, starting at another holder on each `turn` so
    that every rank gets its turn. Groups that do not fit are left out.
    """
    asked: set[int] = set()
    chosen: list[ReplicaGroup] = []
    for group in groups:
        holders = sorted(group.begins)
        start = turn * (most_ranks - 1) % len(holders)
        turned = holders[start:] + holders[:start]
        known = [rank for rank in turned if rank in asked]
        new = [rank for rank in turned if rank not in asked][: most_ranks - len(asked)]
        if len(known) + len(new) < 2:
            continue
        asked.update(new)
        chosen.append(group.on([*known, *new]))
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Unequal replicas of one group."""

    group: ReplicaGroup
    ranks: tuple[int, ...]
    """Ranks that differ from the majority; all of them when there is none."""
    majority: int
    """Ranks that agree; 0 when no digest has more holders than every other."""


def compare(group: ReplicaGroup, digests: Mapping[int, bytes]) -> Difference | None:
    """The difference among a group's digests by rank; None when all are equal."""
    counted = Counter(digests.values()).most_common()
    if len(counted) < 2:
        return None
    usual, count = counted[0]
    clear = count > counted[1][1]
    odd = tuple(rank for rank in sorted(digests) if not clear or digests[rank] != usual)
    return Difference(group=group, ranks=odd, majority=count if clear else 0)


def drift_findings(
    differences: Sequence[Difference], places: Mapping[int, str], step: int, most: int = 50
) -> list[Finding]:
    """One finding per differing tensor, at most `most` by name. `places` has known locations of
    differences, by index of the difference."""
    by_tensor: dict[str, list[int]] = {}
    for index, difference in enumerate(differences):
        by_tensor.setdefault(difference.group.name, []).append(index)
    found = [
        _finding(name, [differences[i] for i in indices], places.get(indices[0], ""), step)
        for name, indices in list(by_tensor.items())[:most]
    ]
    if len(by_tensor) > most:
        found.append(
            Finding(
                rule=Rule.REPLICA_DRIFT,
                subject="more tensors",
                severity=Severity.CRITICAL,
                reason=f"replicas of {len(by_tensor) - most:,} more tensors differ at step {step}",
                step=step,
            )
        )
    return found


def _finding(name: str, parts: Sequence[Difference], place: str, step: int) -> Finding:
    first = parts[0]
    ranks = tuple(sorted({rank for part in parts for rank in part.ranks}))
    if all(part.majority for part in parts):
        who = f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {listed(ranks)} differ"
        who += f" from {first.majority} equal replicas"
    else:
        who = f"ranks {listed(ranks)} differ from each other; two cannot show which is wrong"
        if len(ranks) > 2:
            who = f"ranks {listed(ranks)} differ, and none of them has a majority"
    more = f" (and {len(parts) - 1} more parts of it)" if len(parts) > 1 else ""
    where = f"; {place}" if place else ""
    return Finding(
        rule=Rule.REPLICA_DRIFT,
        subject=name,
        severity=Severity.CRITICAL,
        reason=f"{name} at step {step}: {who}{where}{more}",
        ranks=ranks[:64],
        fqn=first.group.fqn,
        step=step,
    )


def spans_of(groups: Sequence[ReplicaGroup]) -> Spans:
    """Spans to pin on each rank: the groups' pieces, merged where they touch."""
    pieces: dict[int, list[tuple[int, int]]] = {}
    for group in groups:
        for rank, begin in group.begins.items():
            pieces.setdefault(rank, []).append((begin, begin + group.size_bytes))
    return {rank: joined(found, 0) for rank, found in pieces.items()}


async def ask_where(digests: Digests, difference: Difference) -> str:
    """Describe the first differing element, and how many of its bits differ, between the first
    differing rank and the first rank that it differs from."""
    group = difference.group
    one = difference.ranks[0]
    others = [rank for rank in group.begins if rank != one]
    # Without a majority all ranks are listed, and some may still equal the first.
    for other in others:
        if difference.majority and other in difference.ranks:
            continue
        found = await _first_differing_byte(digests, group, one, other)
        if found is not None:
            return await _told(digests, group, one, other, found)
    return ""


async def _first_differing_byte(
    digests: Digests, group: ReplicaGroup, one: int, other: int
) -> int | None:
    begin, end = 0, group.size_bytes
    while True:
        parts = _cut(begin, end)
        equal = [
            a == b
            for a, b in zip(
                await _digests(digests, group, one, parts),
                await _digests(digests, group, other, parts),
                strict=True,
            )
        ]
        if all(equal):
            return None
        begin, end = parts[equal.index(False)]
        if end - begin == 1:
            return begin


async def _told(digests: Digests, group: ReplicaGroup, one: int, other: int, byte: int) -> str:
    element = byte // group.item_bytes
    first = element * group.item_bytes
    parts = [(at, at + 1) for at in range(first, first + group.item_bytes)]
    ours = await _digests(digests, group, one, parts)
    theirs = await _digests(digests, group, other, parts)
    bits = [
        8 * at + bit
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True))
        for bit in range(8)
        if (_BYTE_OF[a] ^ _BYTE_OF[b]) >> bit & 1
    ]
    what = f"bit {bits[0]}" if len(bits) == 1 else f"{len(bits)} bits"
    return (
        f"the first difference of rank {one} from rank {other} is {what} of element {element} "
        "of its piece"
    )


async def _digests(
    digests: Digests, group: ReplicaGroup, rank: int, parts: Sequence[tuple[int, int]]
) -> list[bytes]:
    base = group.begins[rank]
    return await digests.ask(rank, [(base + begin, base + end) for begin, end in parts])


def _cut(begin: int, end: int) -> list[tuple[int, int]]:
    """Split [begin, end) into at most `PARTS` equal parts; the last may be smaller."""
    size = max(1, -(-(end - begin) // PARTS))
    return [(at, min(at + size, end)) for at in range(begin, end, size)]
