"""ReplayUpdate: check that the snapshots belong to one update, then make it again on a thread."""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paramd.errors import UsageError
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.rpc.statistics import on_stats_thread
from paramd_service.sidecar.snapshots.store import Key, Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySnapshots:
    """What an update began with, consumed and left; the caller holds all of them."""

    before: Mapping[str, Snapshot]
    """By state key; "" is the parameters."""
    after: Mapping[str, Snapshot]
    gradients: Snapshot
    facts: Snapshot


async def replay_update(rank: RankSidecar, snapshots: ReplaySnapshots) -> pb.ReplayUpdateResponse:
    """Raises UsageError: the snapshots are not of one update and the same spans."""
    _check(snapshots)
    rows = await on_stats_thread(rank, lambda stop: _replay(snapshots, stop))
    header = messages.header_of(rank, snapshots.after[""])
    return pb.ReplayUpdateResponse(header=header, tensors=rows)


def _check(found: ReplaySnapshots) -> None:
    first = found.before.get("")
    if first is None:
        raise UsageError("pairs: expected one with an empty state_key, the parameters")
    wanted = [
        *((one, key, pb.SOURCE_MOMENTS if key else 0, 0) for key, one in found.before.items()),
        *((one, key, pb.SOURCE_MOMENTS if key else 0, 1) for key, one in found.after.items()),
        (found.gradients, "", pb.SOURCE_GRADIENTS, 1),
    ]
    for one, key, source, later in wanted:
        is_it = one.key == Key(first.key.incarnation, first.key.spans, source, key)
        if not is_it or one.step != first.step + later:
            raise UsageError(
                f"pairs, gradients_snapshot_id: a snapshot of step {one.step}; expected step "
                f"{first.step + later}, the same spans, and {key or 'what its place says'}"
            )
        if one.edits not in (first.edits, -1):
            raise UsageError("pairs: an edit was applied within the update's step; try again")
    facts = found.facts
    if not facts.optimizer or facts.step != first.step:
        raise UsageError(
            f"facts_snapshot_id: expected optimizer state of step {first.step}, read from memory"
        )


def _replay(found: ReplaySnapshots, stop: Sequence[bool]) -> list[pb.ReplayedTensor]:
    from paramd_service.sidecar.statistics import replay

    notes = found.gradients.notes.notes if found.gradients.notes is not None else ()
    captured = replay.Captured(
        facts=json.loads(zlib.decompress(found.facts.optimizer)),
        before={key: one.view() for key, one in found.before.items()},
        after={key: one.view() for key, one in found.after.items()},
        gradients=found.gradients.view(),
        without_gradient=frozenset(note.arena_begin for note in notes if note.none),
        partial=frozenset(note.arena_begin for note in notes if note.partial_group),
        place=_place_in(found.before[""].key.spans),
    )
    return replay.replay(captured, lambda: bool(stop))


def _place_in(spans: Sequence[tuple[int, int]]) -> Callable[[int, int], int | None]:
    begins = [begin for begin, _ in spans]
    offsets = [0]
    for begin, end in spans:
        offsets.append(offsets[-1] + end - begin)

    def place(at: int, size: int) -> int | None:
        index = bisect_right(begins, at) - 1
        if index < 0 or at + size > spans[index][1]:
            return None
        return offsets[index] + at - begins[index]

    return place
