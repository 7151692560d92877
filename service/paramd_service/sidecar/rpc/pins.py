"""PinSnapshot (parameters now, at a step or at a boundary; gradients), and boundary calls."""

from functools import partial

from google.protobuf.message import Message

from paramd.errors import ConflictError, UsageError
from paramd.memory.gradient_program import Notes
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import MAX_LEASE_S
from paramd_service.sidecar.boundaries import BoundaryRequest
from paramd_service.sidecar.calls import (
    MAX_SNAPSHOT_IDS,
    Call,
    CallTable,
    check_spans,
    granted_lease_s,
)
from paramd_service.sidecar.gradients.slots import EndedError
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.snapshots.moments import table_key
from paramd_service.sidecar.snapshots.store import Key, Lease

MAX_STEPS = 1_000_000
MAX_REDUCTION_ITEMS = 20_000


def calls(rank: RankSidecar) -> CallTable:
    return {
        # Waits for a later step have their own bound and must not crowd out other calls.
        "PinSnapshot": Call(unary=partial(_pin, rank), heavy=lambda asked: asked.at_step == 0),
        "ReachBoundary": Call(unary=partial(_reach, rank)),
        "WithdrawBoundary": Call(unary=partial(_withdraw, rank)),
        "RenewHold": Call(unary=partial(_renew_hold, rank)),
    }


async def _reach(rank: RankSidecar, request: pb.ReachBoundaryRequest, timeout_s: float) -> Message:
    rank.check_plan(request.incarnation, rank.ready_mesh().layout_digest)
    reach = check_reach(request)
    # After the checks: an invalid request must not raise the fence.
    rank.follow_control(request.generation)
    outcome = await rank.pins.boundaries.reach(reach, timeout_s=timeout_s)
    header = messages.header(rank, outcome.step, outcome.edits)
    header.history, header.boundary_token = outcome.history, outcome.token
    return pb.ReachBoundaryResponse(
        header=header, captured=outcome.captured, reason=outcome.reason, stop_ns=outcome.stop_ns
    )


async def _withdraw(
    rank: RankSidecar, request: pb.WithdrawBoundaryRequest, _timeout_s: float
) -> Message:
    _check_incarnation(rank, request.incarnation)
    if request.boundary < 1:
        raise UsageError(f"boundary: {request.boundary}; expected a number from 1 on")
    rank.follow_control(request.generation)
    fate = await rank.pins.boundaries.withdraw(request.boundary)
    return pb.WithdrawBoundaryResponse(header=messages.header(rank), fate=fate)


async def _renew_hold(
    rank: RankSidecar, request: pb.RenewHoldRequest, _timeout_s: float
) -> Message:
    _check_incarnation(rank, request.incarnation)
    lease_s = check_hold_lease(request.lease_ms)
    rank.follow_control(request.generation)
    rank.pins.boundaries.renew_hold(lease_s)
    return pb.RenewHoldResponse(header=messages.header(rank), lease_ms=int(1000 * lease_s))


def _check_incarnation(rank: RankSidecar, incarnation: int) -> None:
    if incarnation != rank.incarnation:
        raise ConflictError(
            f"the request is of run {incarnation}, the job is in run {rank.incarnation}"
        )


def check_reach(request: pb.ReachBoundaryRequest) -> BoundaryRequest:
    """Check that a request is consistent in itself. Raises UsageError naming the field."""
    number, token = request.boundary, request.token
    if number < 1 or len(request.snapshot_ids) > MAX_SNAPSHOT_IDS:
        raise UsageError(
            f"boundary, snapshot_ids: {number}, {len(request.snapshot_ids)} ids; "
            f"expected a number from 1 on and at most {MAX_SNAPSHOT_IDS} ids"
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
    """Lease of a pause, in seconds. Raises UsageError."""
    if not 1 <= lease_ms <= 1000 * MAX_LEASE_S:
        raise UsageError(f"lease_ms: {lease_ms}; expected 1 to {1000 * MAX_LEASE_S:.0f}")
    return lease_ms / 1000


async def _pin(rank: RankSidecar, request: pb.PinSnapshotRequest, timeout_s: float) -> Message:
    rank.check_plan(request.incarnation, request.layout_digest)
    _check(request)
    attached = rank.attached
    assert attached is not None
    spans = check_spans(request.spans, attached.request.arena_bytes)
    config = rank.config
    lease_s = granted_lease_s(request.lease_ms, config.default_lease_s, config.max_lease_s)
    key = Key(request.incarnation, spans, request.source, request.state_key)
    if request.source == pb.SOURCE_GRADIENTS:
        return await _gradients(rank, request, key, lease_s, timeout_s)
    pins = rank.pins
    moments = request.source == pb.SOURCE_MOMENTS
    if (moments and not request.state_key) or request.source == pb.SOURCE_EXTRA_STATE:
        key = table_key(request.incarnation, request.source)
    if request.mark:
        read = partial(rank.parts.kept_states().read, request.mark, request.layout_digest, spans)
        return _answer(rank, await pins.pin_mark(key, read, lease_s=lease_s), lease_s)
    if request.at_boundary:
        with_buffers = request.with_buffers and not moments
        lease = await pins.prepare(key, with_buffers=with_buffers, lease_s=lease_s)
    else:
        pin = pins.pin_state if moments else partial(pins.pin, unsettled=request.unsettled)
        lease = await pin(
            key,
            lease_s=lease_s,
            timeout_s=timeout_s,
            at_step=request.at_step,
            history=_history(request),
        )
    rank.faults.at("pin-answered")
    return _answer(rank, lease, lease_s)


async def _gradients(
    rank: RankSidecar, request: pb.PinSnapshotRequest, key: Key, lease_s: float, timeout_s: float
) -> Message:
    pins = rank.pins.gradient_pins
    pins.gradients.lossless.update(request.lossless_every)
    try:
        if request.HasField("reduction"):
            stats, notes = await pins.reduce(
                key,
                request.at_step,
                request.reduction,
                history=_history(request),
                timeout_s=timeout_s,
            )
            header = messages.header(rank, request.at_step)
            header.iteration, header.history = notes.iteration, notes.history
            return pb.PinSnapshotResponse(header=header, gradients=_facts(notes), stats=stats)
        lease = await pins.pin(
            key, request.at_step, history=_history(request), lease_s=lease_s, timeout_s=timeout_s
        )
    except EndedError:
        return pb.PinSnapshotResponse(header=messages.header(rank), ended=True)
    finally:
        # Again: a reader's presence lapses quickly, and the capture may have outlasted it.
        pins.gradients.lossless.update(request.lossless_every)
    rank.faults.at("pin-answered")
    answer = _answer(rank, lease, lease_s)
    if lease.snapshot.notes is not None:
        answer.gradients.CopyFrom(_facts(lease.snapshot.notes))
    return answer


def _answer(rank: RankSidecar, lease: Lease, lease_s: float) -> pb.PinSnapshotResponse:
    return pb.PinSnapshotResponse(
        header=messages.header_of(rank, lease.snapshot),
        snapshot_id=lease.snapshot_id,
        size_bytes=lease.snapshot.size_bytes,
        lease_ms=int(lease_s * 1000),
        optimizer=lease.snapshot.optimizer,
        settling=int(rank.pins.settling(lease.snapshot)),  # type: ignore[arg-type]  # the same numbers
    )


def _history(request: pb.PinSnapshotRequest) -> int | None:
    """The history that `at_step` belongs to; None: the present one."""
    return request.at_history if request.HasField("at_history") else None


def _check(request: pb.PinSnapshotRequest) -> None:
    """Raise UsageError if the request's fields contradict each other."""
    if request.with_buffers and not request.at_boundary:
        raise UsageError("with_buffers: needs at_boundary; only a boundary copies buffers")
    if request.unsettled and (request.at_boundary or request.at_step):
        raise UsageError("unsettled: not with at_boundary or at_step, which settled states have")
    if request.at_step < 0 or (request.at_step and request.at_boundary):
        raise UsageError(
            f"at_step: {request.at_step}; expected 1 or more, and not with at_boundary"
        )
    if request.mark and (
        request.at_boundary or request.at_step or request.unsettled or request.source
    ):
        raise UsageError(
            "mark: only parameters of a restore point can be pinned, with no other source"
        )
    if request.source == pb.SOURCE_GRADIENTS and not request.at_step:
        raise UsageError("at_step: gradients are those of one update; name it")
    moments = request.source == pb.SOURCE_MOMENTS
    if moments and not request.state_key and (request.spans or request.at_step):
        raise UsageError("source: the table of optimizer state has no spans and no at_step")
    if request.source == pb.SOURCE_EXTRA_STATE and (request.spans or not request.at_boundary):
        raise UsageError("source: extra state has no spans, and only a boundary copies it")
    if request.source not in pb.Source.values():
        raise UsageError(f"source: {request.source} is unknown to this sidecar")
    if request.source != pb.SOURCE_GRADIENTS and (
        request.HasField("reduction") or request.lossless_every
    ):
        raise UsageError("reduction, lossless_every: only with gradients")
    if len(request.reduction.items) > MAX_REDUCTION_ITEMS or request.lossless_every < 0:
        raise UsageError(
            f"reduction, lossless_every: {len(request.reduction.items):,} items, "
            f"{request.lossless_every}; expected at most {MAX_REDUCTION_ITEMS:,}, and 0 or more"
        )


def _facts(notes: Notes) -> pb.GradientFacts:
    return pb.GradientFacts(
        scale=notes.scale,
        clip_factor=notes.clip_factor,
        notes=[
            pb.GradientNote(
                arena_begin=note.arena_begin,
                none=note.none,  # type: ignore[arg-type]  # the same numbers
                partial_group=note.partial_group,
            )
            for note in notes.notes
        ],
    )
