"""Replica drift: which pieces must be equal, which to compare now, and who differs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paramd.layout.dtypes import ITEM_BYTES, item_bytes
from paramd.layout.types import Layout, Piece, Region, TensorKind, TensorLayout
from paramd_service.control.alerts.book import Finding, Severity
from paramd_service.control.alerts.config import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaGroup:
    """Pieces of one tensor that hold the same elements in the same order on several ranks."""

    fqn: str
    region: Region
    size_bytes: int
    item_bytes: int
    begins: Mapping[int, int]
    """First byte in the arena, by rank; two ranks or more."""

    def on(self, ranks: Iterable[int]) -> ReplicaGroup:
        """The same group, asked of these ranks only."""
        return ReplicaGroup(
            fqn=self.fqn,
            region=self.region,
            size_bytes=self.size_bytes,
            item_bytes=self.item_bytes,
            begins={rank: self.begins[rank] for rank in sorted(ranks)},
        )


def replica_groups(tensor: TensorLayout) -> list[ReplicaGroup]:
    """What of a tensor is held more than once. Buffers are not: every rank has its own."""
    if tensor.kind is not TensorKind.PARAMETER:
        return []
    holders: dict[tuple[Region, tuple[int, ...] | None], list[Piece]] = {}
    for piece in tensor.pieces:
        if piece.region.numel:
            holders.setdefault((piece.region, piece.strides), []).append(piece)
    size = item_bytes(tensor.dtype)
    return [
        ReplicaGroup(
            fqn=tensor.fqn,
            region=region,
            size_bytes=region.numel * size,
            item_bytes=size,
            begins={piece.rank: piece.arena_begin for piece in pieces},
        )
        for (region, _), pieces in holders.items()
        if len({piece.rank for piece in pieces}) > 1
    ]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one round looks at, and where the next one goes on."""

    tensors: tuple[TensorLayout, ...]
    next_begin: int


def next_sample(
    layout: Layout, begin: int, *, most_bytes: int, first: Iterable[str] = ()
) -> Sample:
    """Parameters from index `begin` on, round and round, until a rank would copy too much.

    At least one is chosen. `first` names tensors to look at again before all others.
    """
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
    """Most bytes of the tensor that one rank holds in one piece."""
    size = item_bytes(tensor.dtype)
    return max((piece.region.numel for piece in tensor.pieces), default=0) * size


def choose_holders(
    groups: Sequence[ReplicaGroup], *, most_ranks: int, turn: int
) -> list[ReplicaGroup]:
    """Groups on at most `most_ranks` ranks together, each with two holders or more.

    All holders when they fit; else as many as do, beginning elsewhere at each `turn`, so
    that every rank has its turn. Groups that do not fit at all are left out.
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
    """Replicas of one group that are not equal."""

    group: ReplicaGroup
    ranks: tuple[int, ...]
    """Those that differ from the majority; all of them when there is none."""
    majority: int
    """Ranks that agree; 0 when no digest has more holders than every other."""


def compare(group: ReplicaGroup, digests: Mapping[int, bytes]) -> Difference | None:
    """None when all digests are equal."""
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
    """One finding for each tensor that differs.

    Args:
        places: What is known of where it differs, by index of the difference.
        most: Tensors told by name.
    """
    by_tensor: dict[str, list[int]] = {}
    for index, difference in enumerate(differences):
        by_tensor.setdefault(difference.group.fqn, []).append(index)
    found = [
        _finding(fqn, [differences[i] for i in indices], places.get(indices[0], ""), step)
        for fqn, indices in list(by_tensor.items())[:most]
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


def _finding(fqn: str, parts: Sequence[Difference], place: str, step: int) -> Finding:
    first = parts[0]
    ranks = tuple(sorted({rank for part in parts for rank in part.ranks}))
    if all(part.majority for part in parts):
        who = f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {_listed(ranks)} differ"
        who += f" from {first.majority} equal replicas"
    else:
        who = f"ranks {_listed(ranks)} differ from each other; which is wrong, two cannot tell"
        if len(ranks) > 2:
            who = f"ranks {_listed(ranks)} differ, and none of them has a majority"
    more = f" (and {len(parts) - 1} more parts of it)" if len(parts) > 1 else ""
    where = f"; {place}" if place else ""
    return Finding(
        rule=Rule.REPLICA_DRIFT,
        subject=fqn,
        severity=Severity.CRITICAL,
        reason=f"{fqn} at step {step}: {who}{where}{more}",
        ranks=ranks[:64],
        fqn=fqn,
        step=step,
    )


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} ranks)"
