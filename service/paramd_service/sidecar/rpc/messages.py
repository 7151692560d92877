"""Messages about this rank; a domain error as a gRPC status, with one public text and reason."""

import os
import secrets
import time
import traceback
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio

from paramd.errors import MAX_ID_CHARS, METADATA_KEY, ParamdError, codes_of, exhausted_of, reason_of
from paramd.memory.control_page import ControlPage, Word, rewinds_of, stands_of, unserved_reason
from paramd.memory.descriptors import reserved_bytes
from paramd.state_files import resident_bytes
from paramd.v1 import common_pb2, layout_pb2, sidecar_pb2
from paramd_service.sidecar import boundaries
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.owner import AttachedMemory, Ownership, process_state, worked
from paramd_service.sidecar.parts import SidecarHost
from paramd_service.sidecar.phase import Doing, doing
from paramd_service.sidecar.snapshots.store import Snapshot

DOMAIN = "paramd"
RETRY_AFTER_S = 0.1
_DETAILS_KEY = "grpc-status-details-bin"


async def abort_with(
    context: grpc.aio.ServicerContext[Any, Any],
    error: ParamdError,
    code: grpc.StatusCode | None = None,
) -> None:
    """End the call with the error's status, or `code`, and ErrorInfo. Always raises."""
    codes = codes_of(error)
    code = code if code is not None else grpc.StatusCode[codes.grpc]
    details = _details(code, error, retry=codes.retry)
    await context.abort(code, str(error), trailing_metadata=((_DETAILS_KEY, details),))


async def abort_internal(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, log: Log
) -> None:
    """End the call without revealing details, unless a resource ran out; the log has them by id."""
    error_id = secrets.token_hex(4)
    log(
        "internal-error",
        id=error_id,
        error=repr(error),
        at=_where(error),
        # Truncated: it is untrusted.
        request_id=metadata_of(context, METADATA_KEY)[:MAX_ID_CHARS],
    )
    if (exhausted := exhausted_of(error)) is not None:
        await abort_with(context, exhausted)
    await context.abort(
        grpc.StatusCode.INTERNAL, f"internal error, see the sidecar's log (id {error_id})"
    )


def metadata_of(context: grpc.aio.ServicerContext[Any, Any], wanted: str) -> str:
    """The value of this key in a call's metadata; empty if there is none."""
    pairs = context.invocation_metadata() or ()
    return next((str(value) for key, value in pairs if key == wanted), "")


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _details(code: grpc.StatusCode, error: ParamdError, *, retry: bool) -> bytes:
    # Imported on first use: sidecars without errors do not load them.
    from google.protobuf import any_pb2, duration_pb2
    from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

    status = status_pb2.Status(code=code.value[0], message=str(error))
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=reason_of(error), domain=DOMAIN)]
    if retry:
        delay = duration_pb2.Duration(nanos=int(RETRY_AFTER_S * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return bytes(status.SerializeToString())


MEMORY_SHORT = "memory-short"
"""Id in `RankState.alerts`: the reserve of the host or of a cgroup is being used."""

MAX_LISTED = 1024
"""Most leases in one answer."""
SNAPSHOT_NAME_CHARS = 8
"""Characters shown of a snapshot's id: anyone who sees the whole id could release it."""
LAYOUT_BATCH_BYTES = 1 << 20


def header(
    rank: SidecarHost, step: int | None = None, edits: int | None = None
) -> common_pb2.Header:
    """Header of an answer. Without `step`, of the current state; with it, `edits` None is -1."""
    now = rank.state
    if edits is None:
        edits = now.edits if step is None else -1
    return common_pb2.Header(
        job=rank.config.job,
        incarnation=rank.incarnation,
        step=step if step is not None else now.step,
        edits=edits,
        rank=rank.config.rank,
        layout_digest=rank.mesh.layout_digest if rank.mesh is not None else "",
        iteration=now.iteration if step is None else -1,
        unsettled=now.unsettled and step is None,
        history=now.history,
    )


def header_of(rank: SidecarHost, snapshot: Snapshot) -> common_pb2.Header:
    """Header of an answer about a snapshot, with the snapshot's state."""
    message = header(rank, snapshot.step, snapshot.edits)
    message.iteration, message.unsettled = snapshot.iteration, snapshot.unsettled
    message.label, message.history = snapshot.label, snapshot.history
    message.incarnation, message.boundary_token = snapshot.key.incarnation, snapshot.token
    return message


def doing_now(rank: SidecarHost) -> Doing:
    """Phase of the rank, and why it needs attention."""
    attached = rank.attached
    if attached is None:
        return doing(Ownership.WAITING, (), process_state="", now_ns=0)
    pid, now_ns = attached.trainer_pid, time.monotonic_ns()
    return doing(
        rank.ownership,
        attached.page.words,
        process_state=process_state(pid),
        now_ns=now_ns,
        works=rank.work.seen(pid, worked(pid), now_ns),
        activity=rank.parts.activity(),
    )


def rank_state(rank: SidecarHost) -> common_pb2.RankState:
    """State of the rank, from its control page, its snapshots and its parts."""
    now = doing_now(rank)
    state = common_pb2.RankState(
        rank=rank.config.rank,
        phase=now.phase,
        phase_reason=now.reason,
        waits_for_others=now.waits,
        works=now.works,
        sidecar_rss_bytes=resident_bytes(os.getpid()),
        step=rank.step,
        sidecar_pid=os.getpid(),
        boundary_age_ns=-1,
        agreement_works=True,
        refused_call_count=rank.refusals.count,
        last_refusal=rank.refusals.last,
        stream_port=rank.stream_port,
    )
    _report_end(state, rank)
    rank.parts.report(state)
    if rank.shortage:
        state.alerts.append(MEMORY_SHORT)
        state.phase_reason = state.phase_reason or rank.shortage
    attached = rank.attached
    if attached is not None:
        _report_trainer(state, rank, attached)
        _report_updates(state, attached.page)
        boundaries.report(state, attached.page)
        _report_served(state, attached.page)
        _report_pause(state, attached.page)
        state.gradient_bytes = reserved_bytes(attached.shared.gradients)
        if rank.has_pins:
            rank.pins.report(state)
    return state


def _report_end(state: common_pb2.RankState, rank: SidecarHost) -> None:
    """When and how the trainer's process ended, if it has."""
    if rank.end is None or rank.ownership is Ownership.OWNED:
        return
    ended_s, how = rank.end
    state.trainer_ended_ms = max(1, round(1e3 * (time.monotonic() - ended_s)))
    if how is not None:
        state.trainer_signal = how.signal
        state.trainer_ended_well = not (how.signal or how.code)
        state.phase_reason = f"{how.text}: {state.phase_reason}"


def _report_trainer(
    state: common_pb2.RankState, rank: SidecarHost, attached: AttachedMemory
) -> None:
    """The trainer's process and its memory."""
    state.trainer_pid = attached.trainer_pid
    if rank.ownership is Ownership.OWNED:
        # The pid of a trainer that has ended may have been reused.
        state.trainer_rss_bytes = resident_bytes(attached.trainer_pid)
    state.arena_bytes = attached.request.arena_bytes


def _report_updates(state: common_pb2.RankState, page: ControlPage) -> None:
    """How updates go: their pace, their waits for paramd, and the rollbacks."""
    boundary_ns = page[Word.BOUNDARY_NS]
    state.step_time_ns = page[Word.STEP_TIME_NS]
    state.boundary_age_ns = time.monotonic_ns() - boundary_ns if boundary_ns else -1
    state.stall_count = page[Word.STALL_COUNT]
    state.stall_total_ns = page[Word.STALL_TOTAL_NS]
    state.stall_max_ns = page[Word.STALL_MAX_NS]
    state.stands.extend(
        common_pb2.Stand(cause=cause, count=count, total_ns=total_ns, max_ns=max_ns)
        for cause, (count, total_ns, max_ns) in stands_of(page).items()
    )
    state.rewinds.extend(
        common_pb2.Rewind(
            history=rewind.history, from_step=rewind.from_step, to_step=rewind.to_step
        )
        for rewind in rewinds_of(page)
    )
    state.edits = page[Word.EDITS]


def _report_served(state: common_pb2.RankState, page: ControlPage) -> None:
    """What the trainer serves, and what it has found changed outside of updates."""
    state.unserved_reason = unserved_reason(page)
    state.stray_count = page[Word.STRAY_COUNT]
    state.strict = bool(page[Word.STRICT])
    state.optimizer_live = page[Word.MOMENTS_LIVE] == 1


def _report_pause(state: common_pb2.RankState, page: ControlPage) -> None:
    """What is left of a pause's lease, if training is paused."""
    if page[Word.HELD]:
        state.hold_left_ms = max(0, page[Word.HOLD_UNTIL_NS] - time.monotonic_ns()) // 1_000_000
        state.hold_steps_left = page[Word.HOLD_STEPS_LEFT]


def snapshot_list(rank: SidecarHost) -> sidecar_pb2.ListSnapshotsResponse:
    """Leases of this rank. Raises as `SidecarHost.pins`."""
    store, now_ns = rank.pins.store, time.monotonic_ns()
    return sidecar_pb2.ListSnapshotsResponse(
        header=header(rank),
        snapshots=[
            sidecar_pb2.SnapshotInfo(
                name=lease.snapshot_id[:SNAPSHOT_NAME_CHARS],
                step=lease.snapshot.step,
                size_bytes=lease.snapshot.size_bytes,
                lease_left_ms=(lease.expires_ns - now_ns) // 1_000_000,
                at_boundary=lease.snapshot.at_boundary,
            )
            for lease in store.leases(now_ns)[:MAX_LISTED]
        ],
        lease_count=store.lease_count,
        used_bytes=store.used_bytes,
        budget_bytes=store.budget_bytes,
    )


def layout_batches(serialized: bytes) -> Iterator[layout_pb2.Layout]:
    """The layout in messages of about `LAYOUT_BATCH_BYTES`; the ranks' facts are in the first one.
    Parsed again for each caller: the objects would take more memory than the rest of the sidecar.
    """
    whole = layout_pb2.Layout.FromString(serialized)
    tensors, size_bytes = list(whole.tensors), 0
    batch = whole
    del batch.tensors[:]
    for tensor in tensors:
        tensor_bytes = tensor.ByteSize()
        if size_bytes and size_bytes + tensor_bytes > LAYOUT_BATCH_BYTES:
            yield batch
            batch, size_bytes = layout_pb2.Layout(), 0
        batch.tensors.append(tensor)
        size_bytes += tensor_bytes
    yield batch
