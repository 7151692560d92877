"""Boundaries: what all ranks do together, asked for by the control plane."""

from __future__ import annotations

from google.protobuf.message import Message

from paramd.errors import UsageError
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar import admission, messages
from paramd_service.sidecar.calls import Call, CallTable
from paramd_service.sidecar.rank import RankSidecar


def calls(rank: RankSidecar) -> CallTable:
    """Methods of this subject."""
    subject = _BoundaryCalls(rank)
    return {"ReachBoundary": Call(request=pb.ReachBoundaryRequest, unary=subject.reach)}


class _BoundaryCalls:
    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank

    async def reach(self, request: pb.ReachBoundaryRequest, timeout_s: float) -> Message:
        rank = self._rank
        rank.check_plan(request.epoch, rank.ready_mesh().layout_digest)
        if request.boundary < 1 or len(request.snapshot_ids) > admission.MAX_SNAPSHOT_IDS:
            raise UsageError(
                f"boundary, snapshot_ids: {request.boundary}, {len(request.snapshot_ids)} ids; "
                f"expected a number from 1 on and at most {admission.MAX_SNAPSHOT_IDS} ids"
            )
        rank.follow_control(request.generation)
        outcome = await rank.pins.boundaries.capture(
            request.boundary, request.snapshot_ids, timeout_s=timeout_s
        )
        return pb.ReachBoundaryResponse(
            header=messages.header(rank, outcome.step),
            captured=outcome.captured,
            reason=outcome.reason,
        )
