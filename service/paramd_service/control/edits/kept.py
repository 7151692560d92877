"""States that the sidecars keep: of single ranks, and of the whole job. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.mesh.registry import listed


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptState:
    """A state that the sidecars keep."""

    mark: str
    """Name; empty: a standing snapshot."""
    step: int
    lineage: int
    edits: int
    size_bytes: int
    """Of all ranks."""
    made_s: float
    """Seconds since the Unix epoch; 0 of standing snapshots."""
    by: str
    why_not_whole: str
    """Why training cannot go back to it; empty if it can."""


def merged(found: Mapping[int, Sequence[pb.KeptState]], world_size: int) -> list[KeptState]:
    """The ranks' states as states of the job, by step. Pure."""
    groups: dict[tuple[str, int, int, int], dict[int, pb.KeptState]] = defaultdict(dict)
    for rank, states in found.items():
        for state in states:
            groups[state.mark, state.step, state.lineage, state.edits][rank] = state
    merged = []
    for (mark, step, lineage, edits), parts in groups.items():
        # Standing snapshots of single ranks come and go all the time.
        if not mark and len(parts) < world_size:
            continue
        kept = list(parts.values())
        merged.append(
            KeptState(
                mark=mark,
                step=step,
                lineage=lineage,
                edits=edits,
                size_bytes=sum(one.size_bytes for one in kept),
                made_s=max(one.made_s for one in kept),
                by=kept[0].by,
                why_not_whole=_why_not_whole(parts, world_size),
            )
        )
    return sorted(merged, key=lambda one: (one.step, one.made_s))


def _why_not_whole(parts: dict[int, pb.KeptState], world_size: int) -> str:
    unready = sorted(rank for rank, one in parts.items() if not one.whole)
    if unready:
        return f"ranks {listed(unready)} have not finished it"
    missing = sorted(set(range(world_size)) - set(parts))
    return (
        f"ranks {listed(missing)} do not have it (their sidecars were restarted)" if missing else ""
    )
