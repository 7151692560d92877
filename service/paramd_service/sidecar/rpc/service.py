"""SidecarService over gRPC: requests in, answers out; other modules decide what they mean.

Every method takes the same path: a deadline, a slot if its work is heavy, the request parsed
here (so that malformed bytes get a clear answer), and one mapping of errors.

GetMetrics writes Prometheus text by hand: prometheus-client costs 5 MiB, a sixth of the sidecar,
for two dozen numbers. A scrape port would not require tickets as the gRPC port does; the control
plane serves the text at /api/v1/jobs/{job}/ranks/{rank}/metrics.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    nullcontext,
)
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from paramd.errors import DeadlineError, ParamdError, UsageError
from paramd.memory.control_page import Word, label_of
from paramd.memory.device_arena import DeviceReader
from paramd.state_files import resident_bytes
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import CHUNK_BYTES, data_chunk
from paramd_service import admission
from paramd_service.admission import Shares, TokenRevokedError, check_parts
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import auth, copies, deltas, edits, insight, late, messages, pins
from paramd_service.sidecar.rpc.auth import (
    CALLER,
    SERVICE,
    Answers,
    Call,
    CallTable,
    Requests,
    Unary,
)
from paramd_service.sidecar.rpc.late import Gateway
from paramd_service.sidecar.rpc.messages import abort_internal, abort_with
from paramd_service.sidecar.rpc.statistics import (
    ReplaySnapshots,
    SnapshotWork,
    compute_stats,
    digest,
    multiply,
    on_stats_thread,
    pool,
    profile,
    replay_update,
)
from paramd_service.sidecar.rpc.streams import StreamServer
from paramd_service.sidecar.snapshots.store import Snapshot

_NS = 1e9
_STARTED_S = time.time()


Row: TypeAlias = tuple[str, str, float | Mapping[str, float]]
"""A metric's name without "paramd_sidecar_", its text, its value or values by cause."""


def sidecar_metrics(rank: RankSidecar) -> str:
    """This rank's current metrics as text."""
    rows = [*_rank_samples(rank), *_process_samples()]
    return render(rows, job=rank.config.job, rank=rank.config.rank)


def render(rows: Iterable[Row], *, job: str, rank: int) -> str:
    """Text format 0.0.4; a name that ends in _total is a counter. The labels are job and rank."""
    labels = f'job="{_escaped(job)}",rank="{rank}"'
    lines: list[str] = []
    for name, text, value in rows:
        full, kind = f"paramd_sidecar_{name}", "counter" if name.endswith("_total") else "gauge"
        lines.append(f"# HELP {full} {text}")
        lines.append(f"# TYPE {full} {kind}")
        by_cause = value if isinstance(value, Mapping) else {"": value}
        for cause, one in by_cause.items():
            more = f',cause="{cause}"' if cause else ""
            lines.append(f"{full}{{{labels}{more}}} {_number(one)}")
    return "\n".join(lines) + "\n"


def _rank_samples(rank: RankSidecar) -> list[Row]:
    state = messages.rank_state(rank)
    age_ns = state.boundary_age_ns
    age_s = age_ns / _NS if age_ns >= 0 else -1
    device = rank.attached.device if rank.attached is not None else None
    stands = {one.cause: one for one in state.stands}
    stood_s = {cause: one.total_ns / _NS for cause, one in stands.items()}
    longest_s = {cause: one.max_ns / _NS for cause, one in stands.items()}
    copied = rank.attached.page[Word.COPIED] if rank.attached is not None else 0
    budget_bytes = rank.budget_bytes(state.arena_bytes) if rank.has_pins else 0
    return [
        ("incarnation", "Run of the job, 0 before attach", rank.incarnation),
        ("step", "Finished updates, -1 before attach", rank.step),
        ("phase", "Phase by its number in paramd.v1", state.phase),
        ("step_time_seconds", "Smoothed", state.step_time_ns / _NS),
        ("boundary_age_seconds", "Since the last boundary, -1 before the first", age_s),
        ("stalls_total", "Updates that waited for a copy", state.stall_count),
        ("stall_seconds_total", "Time that updates waited for copies", state.stall_total_ns / _NS),
        ("stall_max_seconds", "Longest such wait", state.stall_max_ns / _NS),
        ("stands_total", "Updates that stood", {name: one.count for name, one in stands.items()}),
        ("stand_seconds_total", "Time that updates stood because of paramd", stood_s),
        ("stand_max_seconds", "Longest such time", longest_s),
        ("abandoned_copies_total", "Copies that an update cut short", state.abandoned_copy_count),
        ("arena_bytes", "Bytes of the arena", state.arena_bytes),
        (
            "device_context",
            "1 once this sidecar has a context on a GPU, which takes memory there",
            int(device is not None and device.is_open),
        ),
        *_context_samples(device),
        ("snapshots", "Snapshots under lease", state.snapshot_count),
        ("snapshot_bytes", "Held by snapshots", state.snapshot_bytes),
        ("snapshot_budget_bytes", "Most that snapshots may hold", budget_bytes),
        ("agreement_works", "1 while agreeing", state.agreement_works),
        ("refused_calls_total", "Calls without a ticket that permits them", rank.refusals.count),
        ("copied_step", "Of the last standing snapshot whole on another host, 0 if none", copied),
        ("copies_bytes", "Memory of other ranks' standing snapshots", rank.copies.size_bytes),
        *_delta_samples(rank),
        *_edit_samples(rank),
        *_tls_samples(rank),
    ]


def _context_samples(device: DeviceReader | None) -> list[Row]:
    found = device.context_bytes if device is not None else None
    if found is None:
        return []
    text = "Device memory that this sidecar's context takes, by NVML"
    return [("device_context_bytes", text, found)]


def _tls_samples(rank: RankSidecar) -> list[Row]:
    if rank.tls is None:
        return []
    return [
        ("tls_expiry_timestamp_seconds", "End of the certificate in force", rank.tls.expires_s),
        ("tls_files_ok", "0 while newer files of TLS cannot be used", not rank.tls.failure),
    ]


def _delta_samples(rank: RankSidecar) -> list[Row]:
    counts = rank.delta_counts
    return [
        ("deltas_computed_total", "Comparisons of two states for followers", counts.computed_count),
        ("deltas_answered_total", "Followers' requests answered from them", counts.answered_count),
        ("delta_sent_bytes_total", "Bytes of changes sent to followers", counts.sent_bytes),
        (
            "delta_changed_bytes_total",
            "Bytes of the elements that had changed",
            counts.changed_bytes,
        ),
        (
            "delta_base_bytes",
            "States kept for followers",
            rank.pins.bases.size_bytes if rank.has_pins else 0,
        ),
    ]


def _edit_samples(rank: RankSidecar) -> list[Row]:
    applied = staged_bytes = undo_bytes = 0
    if rank.has_edits:
        edits = rank.edits
        applied, staged_bytes = edits.applied_count, edits.staged_bytes
        undo_bytes = edits.undo_bytes
    return [
        ("edits_applied_total", "Edits that this process saw applied", applied),
        ("edit_staged_bytes", "Memory of edits that are not applied", staged_bytes),
        ("edit_undo_bytes", "Memory kept to undo applied edits", undo_bytes),
    ]


def _process_samples() -> list[Row]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return [
        ("cpu_seconds_total", "Processor time of the sidecar", usage.ru_utime + usage.ru_stime),
        ("resident_bytes", "Memory of the sidecar", resident_bytes(os.getpid())),
        ("open_descriptors", "Open files", len(os.listdir("/proc/self/fd"))),
        ("start_time_seconds", "Start, since the Unix epoch", _STARTED_S),
    ]


def _number(value: float) -> str:
    return repr(float(value)) if value != int(value) else str(int(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


MAX_WAITING = 256
"""Most calls waiting for a later step; each costs little."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class SidecarServicer:
    """The methods of SidecarService for one rank."""

    def __init__(self, rank: RankSidecar, gateway: Gateway, streams: StreamServer) -> None:
        self._rank = rank
        self._gateway = gateway
        self._streams = streams
        self._slots = Shares(rank.config.max_calls, "calls of this sidecar")
        self._waits = Shares(MAX_WAITING, "calls that wait for later steps")

    def handler(self) -> grpc.GenericRpcHandler:
        """All methods, to be added to a server."""
        rank = self._rank
        table: dict[str, Call] = {
            **self._calls(),
            **edits.calls(rank),
            **pins.calls(rank),
            "Summon": Call(answers=self._gateway.summon),
            "StreamGradients": Call(answers=self._gateway.gradients),
            **late.export_calls(rank),
            **insight.calls(rank),
            **copies.calls(rank),
            **deltas.calls(rank),
            **self._streams.calls(),
        }
        methods = pb.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]].methods_by_name
        served = {
            name: self._served(call, GetMessageClass(methods[name].input_type))
            for name, call in table.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, served)

    def _calls(self) -> CallTable:
        return {
            "GetState": Call(unary=self._get_state),
            "FindControl": Call(unary=self._find_control),
            "GetMesh": Call(unary=self._get_mesh),
            "GetLayout": Call(answers=self._get_layout),
            "ReadSnapshot": Call(answers=self._read),
            "RenewSnapshot": Call(unary=self._renew),
            "ReleaseSnapshot": Call(unary=self._release),
            "ComputeStats": Call(unary=self._stats, heavy=True),
            **{
                name: Call(unary=partial(self._on_thread, work), heavy=True)
                for name, work in _ON_THREAD.items()
            },
            "ReplayUpdate": Call(unary=self._replay, heavy=True),
            "ListSnapshots": Call(unary=self._list),
            "GetMetrics": Call(unary=self._metrics),
        }

    def _served(self, call: Call, request: type[Message]) -> grpc.RpcMethodHandler[Any, Any]:
        if call.unary is not None:
            return self._unary(call.unary, request, heavy=call.heavy)
        if call.answers is not None:
            return self._answering(call.answers, request)
        assert call.requests is not None
        return self._gathering(call.requests, call.part or partial(_parse, request))

    def _unary(
        self, method: Unary, request_type: type[Message], *, heavy: bool | Callable[[Any], bool]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def serve(data: bytes, context: Context) -> bytes:
            async with self._admitted(context, heavy=heavy is True) as timeout_s:
                request = _parse(request_type, auth.as_ordered(data))
                with self._place(heavy, request):
                    answer = await method(request, timeout_s)
                    return answer.SerializeToString()
            raise AssertionError("a refused call has been aborted")

        return grpc.unary_unary_rpc_method_handler(serve)

    def _answering(
        self, method: Answers, request_type: type[Message]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def serve(data: bytes, context: Context) -> None:
            async with (
                self._admitted(context, heavy=True) as timeout_s,
                aclosing(method(_parse(request_type, auth.as_ordered(data)), timeout_s)) as answers,
            ):
                async for message in answers:
                    await context.write(message)

        return grpc.unary_stream_rpc_method_handler(serve)

    def _gathering(
        self, method: Requests, part: Callable[[bytes], Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for data in requests:
                yield part(auth.as_ordered(data, last=False))
            auth.check_ordered()

        async def serve(requests: AsyncIterator[bytes], context: Context) -> bytes:
            async with self._admitted(context, heavy=True) as timeout_s:
                answer = await method(parsed(requests), timeout_s)
                return answer.SerializeToString()
            raise AssertionError("a refused call has been aborted")

        return grpc.stream_unary_rpc_method_handler(serve)

    def _place(
        self, heavy: bool | Callable[[Any], bool], request: Message
    ) -> AbstractContextManager[None]:
        """A work slot or a place to wait, for calls whose weight depends on the request."""
        if not callable(heavy):
            return nullcontext()
        return (self._slots if heavy(request) else self._waits).one(admission.CALLER.get())

    @asynccontextmanager
    async def _admitted(self, context: Context, *, heavy: bool) -> AsyncIterator[float]:
        """Admit a call and yield the seconds it may take; map errors to statuses."""
        try:
            timeout_s = auth.check_deadline(
                context.time_remaining(), self._rank.config.max_deadline_s
            )
            with self._slots.one(admission.CALLER.get()) if heavy else nullcontext():
                caller = CALLER.get(None)
                async with self._rank.revocations.running(caller) if caller else nullcontext():
                    yield timeout_s
        except grpc.aio.AbortError:
            raise
        except TokenRevokedError as error:
            await abort_with(context, error, grpc.StatusCode.UNAUTHENTICATED)
        except ParamdError as error:
            await abort_with(context, error)
        except TimeoutError:
            await abort_with(context, DeadlineError("the call did not finish within its deadline"))
        except Exception as error:
            await abort_internal(context, error, self._rank.log)

    @asynccontextmanager
    async def _held(self, snapshot_id: str, timeout_s: float) -> AsyncIterator[Snapshot]:
        """Hold a filled snapshot, for at most `timeout_s`; its lease may end meanwhile."""
        store = self._rank.pins.store
        snapshot = store.hold(store.filled(snapshot_id))
        try:
            async with asyncio.timeout(timeout_s):
                yield snapshot
            if self._rank.has_pins and self._rank.pins.store is store:
                store.check(snapshot)  # no stray change was found meanwhile
        finally:
            store.drop(snapshot)

    async def _get_state(self, _request: pb.GetStateRequest, _timeout_s: float) -> Message:
        address = self._rank.mesh.control_address if self._rank.mesh is not None else ""
        header, attached = messages.header(self._rank), self._rank.attached
        if attached is not None:
            header.label = label_of(attached.page)
        return pb.GetStateResponse(
            header=header,
            state=messages.rank_state(self._rank),
            control_address=address,
        )

    async def _find_control(self, _request: pb.FindControlRequest, _timeout_s: float) -> Message:
        address = await self._rank.find_control()
        return pb.FindControlResponse(header=messages.header(self._rank), control_address=address)

    async def _get_mesh(self, _request: pb.GetMeshRequest, _timeout_s: float) -> Message:
        mesh, attached = self._rank.ready_mesh(), self._rank.attached
        return pb.GetMeshResponse(
            header=messages.header(self._rank),
            world_size=attached.request.world_size if attached is not None else 0,
            peers=mesh.peers,
            control_address=mesh.control_address,
        )

    async def _get_layout(
        self, _request: pb.GetLayoutRequest, _timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        mesh = self._rank.ready_mesh()
        header = messages.header(self._rank)
        for batch in messages.layout_batches(mesh.layout):
            yield pb.GetLayoutResponse(header=header, layout=batch).SerializeToString()

    async def _read(
        self, request: pb.ReadSnapshotRequest, _timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        store = self._rank.pins.store
        snapshot = store.filled(request.snapshot_id)
        begin, end = auth.check_range(request.offset_bytes, request.size_bytes, snapshot.size_bytes)
        header = messages.header_of(self._rank, snapshot)
        yield pb.ReadSnapshotResponse(header=header).SerializeToString()
        for offset in range(begin, end, CHUNK_BYTES):
            # Between two chunks the lease may have ended and its memory been reused.
            snapshot = store.filled(request.snapshot_id)
            yield data_chunk(snapshot.view()[offset : min(offset + CHUNK_BYTES, end)], offset)
            self._rank.faults.at("read-chunk")
        # The bytes sent are valid only if the trainer has found no stray change meanwhile.
        store.filled(request.snapshot_id)

    async def _renew(self, request: pb.RenewSnapshotRequest, _timeout_s: float) -> Message:
        config = self._rank.config
        lease_s = auth.granted_lease_s(request.lease_ms, config.default_lease_s, config.max_lease_s)
        self._rank.pins.store.renew(request.snapshot_id, lease_s, admission.CALLER.get())
        return pb.RenewSnapshotResponse(
            header=messages.header(self._rank), lease_ms=int(lease_s * 1000)
        )

    async def _release(self, request: pb.ReleaseSnapshotRequest, _timeout_s: float) -> Message:
        self._rank.pins.store.release(request.snapshot_id, admission.CALLER.get())
        self._rank.pins.sweep()
        return pb.ReleaseSnapshotResponse(header=messages.header(self._rank))

    async def _stats(self, request: pb.ComputeStatsRequest, timeout_s: float) -> Any:
        async with AsyncExitStack() as stack:
            before = None
            if request.before_snapshot_id:
                held = self._held(request.before_snapshot_id, timeout_s)
                before = (await stack.enter_async_context(held)).view()
            return await self._on_thread(partial(compute_stats, before), request, timeout_s)

    async def _on_thread(self, work: SnapshotWork, request: Any, timeout_s: float) -> Any:
        """The answer that `work` computes from a snapshot's bytes, with the header added."""
        async with self._held(request.snapshot_id, timeout_s) as snapshot:
            data, rank = snapshot.view(), self._rank
            answer = await on_stats_thread(rank, lambda stop: work(rank, data, request, stop))
        answer.header.CopyFrom(messages.header_of(rank, snapshot))
        return answer

    async def _replay(self, request: pb.ReplayUpdateRequest, timeout_s: float) -> Message:
        async with AsyncExitStack() as stack:

            async def held(snapshot_id: str) -> Snapshot:
                return await stack.enter_async_context(self._held(snapshot_id, timeout_s))

            snapshots = ReplaySnapshots(
                before={one.state_key: await held(one.before_snapshot_id) for one in request.pairs},
                after={one.state_key: await held(one.after_snapshot_id) for one in request.pairs},
                gradients=await held(request.gradients_snapshot_id),
                facts=await held(request.facts_snapshot_id),
            )
            return await replay_update(self._rank, snapshots)

    async def _list(self, _request: pb.ListSnapshotsRequest, _timeout_s: float) -> Message:
        return messages.snapshot_list(self._rank)

    async def _metrics(self, _request: pb.GetMetricsRequest, _timeout_s: float) -> Message:
        header = messages.header(self._rank)
        return pb.GetMetricsResponse(header=header, text=sidecar_metrics(self._rank))


_ON_THREAD: dict[str, SnapshotWork] = {
    "PoolSnapshot": pool,
    "ProfileSnapshot": profile,
    "MultiplySnapshot": multiply,
    "DigestSnapshot": digest,
}
"""Methods that reduce a snapshot to one answer."""


def _parse(request_type: type[Message], data: bytes) -> Message:
    check_parts(request_type.DESCRIPTOR, data)
    try:
        return request_type.FromString(data)
    except DecodeError:
        raise UsageError(f"the request is not a {request_type.DESCRIPTOR.full_name}") from None
