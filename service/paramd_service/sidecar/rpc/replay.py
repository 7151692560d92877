"""ReplayUpdate: check that the snapshots belong to one update, then make it again on a thread."""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paramd.errors import AbortedError, UsageError
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
    """Make the update again.

    Raises:
        UsageError: the snapshots are not of one update and the same spans.
        AbortedError: something else happened within it; capture another one.
    """
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
    facts = found.facts
    if not facts.optimizer or facts.step != first.step:
        raise UsageError(
            f"facts_snapshot_id: expected optimizer state of step {first.step}, read from memory"
        )
    before = [*found.before.values(), facts]
    after = list(found.after.values())
    _check_alike([*before, *after, found.gradients], before, [*after, found.gradients])


def _check_alike(
    snapshots: Sequence[Snapshot], before: Sequence[Snapshot], after: Sequence[Snapshot]
) -> None:
    """Check that they are of one history, with one update between them and nothing else.

    An edit changes parameters, optimizer state or hyper-parameters within a step; and a step that a
    rank made of another number of backward passes is not the one that its gradients are of.

    Raises:
        AbortedError: they are not; another update may do.
    """
    if len({one.history for one in snapshots}) > 1:
        raise AbortedError("the training was rolled back within the update; try again")
    if len({one.edits for one in snapshots if one.edits >= 0}) > 1:
        raise AbortedError("an edit was applied within the update's step; try again")
    for some in (before, after):
        found = sorted({one.iteration for one in some if one.iteration >= 0})
        if len(found) > 1:
            raise AbortedError(
                f"what was captured is of iterations {found[0]} and {found[-1]}; try again"
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
