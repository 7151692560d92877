"""Boundary calls of the control plane: what all ranks do together."""

from __future__ import annotations

from google.protobuf.message import Message

from paramd.errors import ConflictError, UsageError
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import MAX_LEASE_S
from paramd_service.sidecar.boundaries import BoundaryRequest
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import auth, messages
from paramd_service.sidecar.rpc.auth import Call, CallTable

MAX_STEPS = 1_000_000


def calls(rank: RankSidecar) -> CallTable:
    """Methods of this subject."""
    subject = _BoundaryCalls(rank)
    return {
        "ReachBoundary": Call(request=pb.ReachBoundaryRequest, unary=subject.reach),
        "WithdrawBoundary": Call(request=pb.WithdrawBoundaryRequest, unary=subject.withdraw),
        "RenewHold": Call(request=pb.RenewHoldRequest, unary=subject.renew_hold),
    }


class _BoundaryCalls:
    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank

    async def reach(self, request: pb.ReachBoundaryRequest, timeout_s: float) -> Message:
        rank = self._rank
        rank.check_plan(request.epoch, rank.ready_mesh().layout_digest)
        reach = check_reach(request)
        # After the checks: an invalid request must not raise the fence.
        rank.follow_control(request.generation)
        outcome = await rank.pins.boundaries.reach(reach, timeout_s=timeout_s)
        return pb.ReachBoundaryResponse(
            header=messages.header(rank, outcome.step, outcome.edits),
            captured=outcome.captured,
            reason=outcome.reason,
            stop_ns=outcome.stop_ns,
        )

    async def withdraw(self, request: pb.WithdrawBoundaryRequest, _timeout_s: float) -> Message:
        self._check_epoch(request.epoch)
        if request.boundary < 1:
            raise UsageError(f"boundary: {request.boundary}; expected a number from 1 on")
        self._rank.follow_control(request.generation)
        fate = await self._rank.pins.boundaries.withdraw(request.boundary)
        return pb.WithdrawBoundaryResponse(header=messages.header(self._rank), fate=fate)

    async def renew_hold(self, request: pb.RenewHoldRequest, _timeout_s: float) -> Message:
        self._check_epoch(request.epoch)
        lease_s = check_hold_lease(request.lease_ms)
        self._rank.follow_control(request.generation)
        self._rank.pins.boundaries.renew_hold(lease_s)
        return pb.RenewHoldResponse(
            header=messages.header(self._rank), lease_ms=int(1000 * lease_s)
        )

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._rank.epoch:
            raise ConflictError(
                f"the request is of epoch {epoch}, the job is in epoch {self._rank.epoch}"
            )


def check_reach(request: pb.ReachBoundaryRequest) -> BoundaryRequest:
    """Check that a request is consistent in itself.

    Raises:
        UsageError: the message names the field.
    """
    number, token = request.boundary, request.token
    if number < 1 or len(request.snapshot_ids) > auth.MAX_SNAPSHOT_IDS:
        raise UsageError(
            f"boundary, snapshot_ids: {number}, {len(request.snapshot_ids)} ids; "
            f"expected a number from 1 on and at most {auth.MAX_SNAPSHOT_IDS} ids"
        )
    if token < 1:
        raise UsageError(f"token: {token}; expected 1 to 2^63 - 1")
    if request.action not in pb.BoundaryAction.values():
        raise UsageError(f"action: {request.action} is not known here")
    if request.action != pb.BOUNDARY_ACTION_UNSPECIFIED and request.snapshot_ids:
        raise UsageError("snapshot_ids: only a request without an action fills snapshots")
    if request.action == pb.BOUNDARY_ACTION_STEP and not 1 <= request.step_count <= MAX_STEPS:
        raise UsageError(f"step_count: {request.step_count}; expected 1 to {MAX_STEPS}")
    holds = request.action == pb.BOUNDARY_ACTION_HOLD
    return BoundaryRequest(
        number=number,
        token=token,
        action=request.action,
        snapshot_ids=tuple(request.snapshot_ids),
        edit_id=request.edit_id,
        step_count=request.step_count,
        lease_s=check_hold_lease(request.lease_ms) if holds else 0.0,
    )


def check_hold_lease(lease_ms: int) -> float:
    """Lease of a hold, in seconds. Raises UsageError."""
    if not 1 <= lease_ms <= 1000 * MAX_LEASE_S:
        raise UsageError(f"lease_ms: {lease_ms}; expected 1 to {1000 * MAX_LEASE_S:.0f}")
    return lease_ms / 1000
