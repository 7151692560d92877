"""PinSnapshot: parameters at any step, at an exact one or at a boundary; gradients."""

from __future__ import annotations

from google.protobuf.message import Message

from paramd.errors import UsageError
from paramd.memory.gradient_program import Notes
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.gradients.slots import EndedError
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import auth, messages
from paramd_service.sidecar.rpc.auth import Call, CallTable
from paramd_service.sidecar.snapshots.blocks import Key, Lease
from paramd_service.sidecar.snapshots.moments import table_key

MAX_REDUCTION_ITEMS = 20_000


def calls(rank: RankSidecar) -> CallTable:
    """Methods of this subject."""
    subject = _PinCalls(rank)
    return {
        "PinSnapshot": Call(request=pb.PinSnapshotRequest, unary=subject.pin, heavy=_works_at_once)
    }


def _works_at_once(request: pb.PinSnapshotRequest) -> bool:
    # Waits for a later step are bounded elsewhere and must not crowd out other calls.
    return request.at_step == 0


class _PinCalls:
    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank

    async def pin(self, request: pb.PinSnapshotRequest, timeout_s: float) -> Message:
        rank = self._rank
        rank.check_plan(request.epoch, request.layout_digest)
        _check(request)
        attached = rank.attached
        assert attached is not None
        spans = auth.check_spans(request.spans, attached.request.arena_bytes)
        config = rank.config
        lease_s = auth.granted_lease_s(request.lease_ms, config.default_lease_s, config.max_lease_s)
        key = Key(request.epoch, spans, request.source, request.state_key)
        if request.source == pb.SOURCE_GRADIENTS:
            return await self._gradients(request, key, lease_s, timeout_s)
        pins = rank.pins
        if request.source == pb.SOURCE_MOMENTS:
            return await self._moments(request, key, lease_s)
        if request.at_boundary:
            lease = await pins.prepare(key, with_buffers=request.with_buffers, lease_s=lease_s)
        else:
            lease = await pins.pin(
                key,
                lease_s=lease_s,
                timeout_s=timeout_s,
                at_step=request.at_step,
                unsettled=request.unsettled,
            )
        rank.faults.at("pin-answered")
        return self._answer(lease, lease_s)

    async def _moments(self, request: pb.PinSnapshotRequest, key: Key, lease_s: float) -> Message:
        pins = self._rank.pins
        if request.at_boundary:
            table = table_key(request.epoch)
            lease = await pins.prepare(table, with_buffers=False, lease_s=lease_s)
        else:
            lease = await pins.moments.pin(key, request.at_step, lease_s)
        self._rank.faults.at("pin-answered")
        return self._answer(lease, lease_s)

    async def _gradients(
        self, request: pb.PinSnapshotRequest, key: Key, lease_s: float, timeout_s: float
    ) -> Message:
        pins = self._rank.pins.gradient_pins
        pins.gradients.heard(request.lossless_every)
        try:
            if request.HasField("reduction"):
                stats, notes = await pins.reduce(
                    key, request.at_step, request.reduction, timeout_s=timeout_s
                )
                header = messages.header(self._rank, request.at_step)
                header.iteration = notes.iteration
                return pb.PinSnapshotResponse(
                    header=header,
                    gradients=_facts(notes),
                    stats=stats,
                )
            lease = await pins.pin(key, request.at_step, lease_s=lease_s, timeout_s=timeout_s)
        except EndedError:
            return pb.PinSnapshotResponse(header=messages.header(self._rank), ended=True)
        finally:
            # Again: a reader's presence lapses quickly, and the capture may have taken longer.
            pins.gradients.heard(request.lossless_every)
        self._rank.faults.at("pin-answered")
        answer = self._answer(lease, lease_s)
        if lease.snapshot.notes is not None:
            answer.gradients.CopyFrom(_facts(lease.snapshot.notes))
        return answer

    def _answer(self, lease: Lease, lease_s: float) -> pb.PinSnapshotResponse:
        return pb.PinSnapshotResponse(
            header=messages.header_of(self._rank, lease.snapshot),
            snapshot_id=lease.snapshot_id,
            size_bytes=lease.snapshot.size_bytes,
            lease_ms=int(lease_s * 1000),
        )


def _check(request: pb.PinSnapshotRequest) -> None:
    """Raise UsageError if the request's fields do not go together."""
    if request.with_buffers and not request.at_boundary:
        raise UsageError("with_buffers: needs at_boundary; only a boundary copies buffers")
    if request.unsettled and (request.at_boundary or request.at_step):
        raise UsageError("unsettled: not with at_boundary or at_step, which settled states have")
    if request.at_step < 0 or (request.at_step and request.at_boundary):
        raise UsageError(
            f"at_step: {request.at_step}; expected 1 or more, and not with at_boundary"
        )
    if request.source == pb.SOURCE_GRADIENTS and not request.at_step:
        raise UsageError("at_step: gradients are those of one update; name it")
    moments = request.source == pb.SOURCE_MOMENTS
    if moments and bool(request.state_key) != bool(request.at_step):
        raise UsageError("source: optimizer state needs a state_key and the at_step of its table")
    if moments and request.at_boundary and (request.state_key or request.spans):
        raise UsageError("source: the table of optimizer state needs no state_key and no spans")
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
