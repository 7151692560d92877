"""SidecarService over gRPC: requests in, answers out; other modules decide what they mean.

Every method takes the same path: a deadline, a slot if its work is heavy, the request parsed
here (so that malformed bytes get a clear answer), and one mapping of errors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from paramd.errors import DeadlineError, ParamdError, UsageError
from paramd.memory.control_page import label_of
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import CHUNK_BYTES, data_chunk
from paramd_service import admission
from paramd_service.admission import Shares, TokenRevokedError, check_parts
from paramd_service.sidecar import calls
from paramd_service.sidecar.calls import CALLER, SERVICE, Answers, Call, CallTable, Requests, Unary
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages, pins
from paramd_service.sidecar.rpc.messages import abort_internal, abort_with
from paramd_service.sidecar.rpc.samples import sidecar_metrics
from paramd_service.sidecar.rpc.streams import StreamServer

MAX_WAITING = 256
"""Most calls waiting for a later step; each costs little."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class SidecarServicer:
    """The methods of SidecarService for one rank."""

    def __init__(self, rank: RankSidecar, streams: StreamServer) -> None:
        self._rank = rank
        self._streams = streams
        self._slots = Shares(rank.config.max_calls, "calls of this sidecar")
        self._waits = Shares(MAX_WAITING, "calls that wait for later steps")

    def handler(self) -> grpc.GenericRpcHandler:
        """All methods, to be added to a server."""
        rank = self._rank
        table: dict[str, Call] = {
            **self._calls(),
            **pins.calls(rank),
            **self._streams.calls(),
            **rank.parts.calls(),
        }
        methods = pb.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]].methods_by_name
        served = {name: _missing(name) for name in methods} | {
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
                request = _parse(request_type, calls.as_ordered(data))
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
                aclosing(
                    method(_parse(request_type, calls.as_ordered(data)), timeout_s)
                ) as answers,
            ):
                async for message in answers:
                    await context.write(message)

        return grpc.unary_stream_rpc_method_handler(serve)

    def _gathering(
        self, method: Requests, part: Callable[[bytes], Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for data in requests:
                yield part(calls.as_ordered(data, last=False))
            calls.check_ordered()

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
            timeout_s = calls.check_deadline(
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
        begin, end = calls.check_range(
            request.offset_bytes, request.size_bytes, snapshot.size_bytes
        )
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
        lease_s = calls.granted_lease_s(
            request.lease_ms, config.default_lease_s, config.max_lease_s
        )
        self._rank.pins.store.renew(request.snapshot_id, lease_s, admission.CALLER.get())
        return pb.RenewSnapshotResponse(
            header=messages.header(self._rank), lease_ms=int(lease_s * 1000)
        )

    async def _release(self, request: pb.ReleaseSnapshotRequest, _timeout_s: float) -> Message:
        self._rank.pins.store.release(request.snapshot_id, admission.CALLER.get())
        self._rank.pins.sweep()
        return pb.ReleaseSnapshotResponse(header=messages.header(self._rank))

    async def _list(self, _request: pb.ListSnapshotsRequest, _timeout_s: float) -> Message:
        return messages.snapshot_list(self._rank)

    async def _metrics(self, _request: pb.GetMetricsRequest, _timeout_s: float) -> Message:
        header = messages.header(self._rank)
        return pb.GetMetricsResponse(header=header, text=sidecar_metrics(self._rank))


def _missing(name: str) -> grpc.RpcMethodHandler[Any, Any]:
    """Refuses a method that no part of this sidecar has."""

    async def refuse(_requests: Any, context: Context) -> None:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            f"{name} is not served here: the part of paramd that has it is not installed",
        )

    return grpc.stream_stream_rpc_method_handler(refuse)


def _parse(request_type: type[Message], data: bytes) -> Message:
    check_parts(request_type.DESCRIPTOR, data)
    try:
        return request_type.FromString(data)
    except DecodeError:
        raise UsageError(f"the request is not a {request_type.DESCRIPTOR.full_name}") from None
