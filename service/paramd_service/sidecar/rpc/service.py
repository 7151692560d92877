"""SidecarService over gRPC: requests in, answers out. What they mean is decided elsewhere.

Every method takes the same path: a deadline, a slot if its work is heavy, the request parsed
here (so that malformed bytes get a clear answer), and one mapping of errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from paramd.errors import RANK_KEY, DeadlineError, ParamdError, UsageError
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import CHUNK_BYTES, data_chunk
from paramd_service import shares
from paramd_service.revoked import TokenRevokedError
from paramd_service.shares import Shares
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import boundaries, edits, exports, gateway, limits, messages, pins
from paramd_service.sidecar.rpc.auth import CALLER, SERVICE
from paramd_service.sidecar.rpc.digests import digest_snapshot
from paramd_service.sidecar.rpc.errors import abort_internal, abort_with
from paramd_service.sidecar.rpc.gateway import Gateway
from paramd_service.sidecar.rpc.methods import Answers, Call, CallTable, Requests, Unary
from paramd_service.sidecar.rpc.metrics import sidecar_metrics
from paramd_service.sidecar.rpc.statistics import compute_stats, pool_snapshot

MAX_WAITING = 256
"""Calls that wait for a later step; they cost little but their place."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class SidecarServicer:
    """The methods of SidecarService for one rank."""

    def __init__(self, rank: RankSidecar, gateway: Gateway) -> None:
        self._rank = rank
        self._gateway = gateway
        self._slots = Shares(rank.config.max_calls, "calls of this sidecar")
        self._waits = Shares(MAX_WAITING, "calls that wait for later steps")

    def handler(self) -> grpc.GenericRpcHandler:
        """All methods, to be added to a server."""
        rank = self._rank
        table: dict[str, Call] = {
            **self._calls(),
            **boundaries.calls(rank),
            **edits.calls(rank),
            **pins.calls(rank),
            **gateway.calls(self._gateway),
            **exports.calls(rank),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE, {name: self._served(call) for name, call in table.items()}
        )

    def _calls(self) -> CallTable:
        return {
            "GetState": Call(request=pb.GetStateRequest, unary=self._get_state),
            "GetMesh": Call(request=pb.GetMeshRequest, unary=self._get_mesh),
            "GetLayout": Call(request=pb.GetLayoutRequest, answers=self._get_layout),
            "ReadSnapshot": Call(request=pb.ReadSnapshotRequest, answers=self._read),
            "RenewSnapshot": Call(request=pb.RenewSnapshotRequest, unary=self._renew),
            "ReleaseSnapshot": Call(request=pb.ReleaseSnapshotRequest, unary=self._release),
            "ComputeStats": Call(request=pb.ComputeStatsRequest, unary=self._stats, heavy=True),
            "PoolSnapshot": Call(request=pb.PoolSnapshotRequest, unary=self._pool, heavy=True),
            "ListSnapshots": Call(request=pb.ListSnapshotsRequest, unary=self._list),
            "DigestSnapshot": Call(
                request=pb.DigestSnapshotRequest, unary=self._digest, heavy=True
            ),
            "GetMetrics": Call(request=pb.GetMetricsRequest, unary=self._metrics),
            "Summon": Call(request=pb.SummonRequest, answers=self._summon),
        }

    def _served(self, call: Call) -> grpc.RpcMethodHandler[Any, Any]:
        if call.unary is not None:
            return self._unary(call.unary, call.request, heavy=call.heavy)
        if call.answers is not None:
            return self._answering(call.answers, call.request)
        assert call.requests is not None
        return self._gathering(call.requests, call.part or partial(_parse, call.request))

    def _unary(
        self,
        method: Unary,
        request_type: type[Message],
        *,
        heavy: bool | Callable[[Any], bool],
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def serve(data: bytes, context: Context) -> bytes:
            async with self._admitted(context, heavy=heavy is True) as timeout_s:
                request = _parse(request_type, data)
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
                aclosing(method(_parse(request_type, data), timeout_s)) as answers,
            ):
                async for message in answers:
                    await context.write(message)

        return grpc.unary_stream_rpc_method_handler(serve)

    def _gathering(
        self, method: Requests, part: Callable[[bytes], Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for data in requests:
                yield part(data)

        async def serve(requests: AsyncIterator[bytes], context: Context) -> bytes:
            async with self._admitted(context, heavy=True) as timeout_s:
                answer = await method(parsed(requests), timeout_s)
                return answer.SerializeToString()
            raise AssertionError("a refused call has been aborted")

        return grpc.stream_unary_rpc_method_handler(serve)

    def _place(
        self, heavy: bool | Callable[[Any], bool], request: Message
    ) -> AbstractContextManager[None]:
        """The slot of a call that is heavy for some requests only; for others, a place to wait."""
        if not callable(heavy):
            return nullcontext()
        return (self._slots if heavy(request) else self._waits).one(shares.CALLER.get())

    @asynccontextmanager
    async def _admitted(self, context: Context, *, heavy: bool) -> AsyncIterator[float]:
        """Admit a call and yield the seconds it may take; map errors to statuses."""
        try:
            self._rank.check_meant(_meant(context))
            timeout_s = limits.check_deadline(
                context.time_remaining(), self._rank.config.max_deadline_s
            )
            with self._slots.one(shares.CALLER.get()) if heavy else nullcontext():
                async with self._rank.revocations.running(CALLER.get()):
                    yield timeout_s
        except grpc.aio.AbortError:
            raise
        except TokenRevokedError as error:
            await abort_with(context, error, grpc.StatusCode.UNAUTHENTICATED)
        except ParamdError as error:
            await abort_with(context, error)
        except TimeoutError:
            await abort_with(context, DeadlineError("the work did not end within the deadline"))
        except Exception as error:
            await abort_internal(context, error, self._rank.log)

    async def _get_state(self, _request: pb.GetStateRequest, _timeout_s: float) -> Message:
        return pb.GetStateResponse(
            header=messages.header(self._rank), state=messages.rank_state(self._rank)
        )

    async def _get_mesh(self, _request: pb.GetMeshRequest, _timeout_s: float) -> Message:
        mesh, attached = self._rank.ready_mesh(), self._rank.attached
        return pb.GetMeshResponse(
            header=messages.header(self._rank),
            world_size=attached.request.world_size if attached is not None else 0,
            peers=[messages.peer(info) for info in mesh.peers],
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
        begin, end = limits.check_range(
            request.offset_bytes, request.size_bytes, snapshot.size_bytes
        )
        header = messages.header_of(self._rank, snapshot)
        yield pb.ReadSnapshotResponse(header=header).SerializeToString()
        for offset in range(begin, end, CHUNK_BYTES):
            # Between two chunks the lease may have ended and its memory been reused.
            snapshot = store.filled(request.snapshot_id)
            yield data_chunk(snapshot.view()[offset : min(offset + CHUNK_BYTES, end)], offset)
            self._rank.faults.at("read-chunk")
        # What was sent is right only if the trainer found nothing wrong with it meanwhile.
        store.filled(request.snapshot_id)

    async def _renew(self, request: pb.RenewSnapshotRequest, _timeout_s: float) -> Message:
        lease_s = self._lease_s(request.lease_ms)
        self._rank.pins.store.renew(request.snapshot_id, lease_s, shares.CALLER.get())
        return pb.RenewSnapshotResponse(
            header=messages.header(self._rank), lease_ms=int(lease_s * 1000)
        )

    async def _release(self, request: pb.ReleaseSnapshotRequest, _timeout_s: float) -> Message:
        self._rank.pins.store.release(request.snapshot_id, shares.CALLER.get())
        self._rank.pins.sweep()
        return pb.ReleaseSnapshotResponse(header=messages.header(self._rank))

    async def _stats(self, request: pb.ComputeStatsRequest, timeout_s: float) -> Message:
        if len(request.items) > limits.MAX_STATS_ITEMS:
            raise UsageError(
                f"items: {len(request.items):,}; expected at most {limits.MAX_STATS_ITEMS:,}"
            )
        store = self._rank.pins.store
        snapshot = store.hold(store.filled(request.snapshot_id))
        try:
            async with asyncio.timeout(timeout_s):
                found = await compute_stats(
                    self._rank,
                    snapshot,
                    request.items,
                    with_exponents=request.with_exponents,
                    edges=request.edges,
                )
        finally:
            store.drop(snapshot)
        return pb.ComputeStatsResponse(header=messages.header_of(self._rank, snapshot), stats=found)

    async def _pool(self, request: pb.PoolSnapshotRequest, timeout_s: float) -> Message:
        store = self._rank.pins.store
        snapshot = store.hold(store.filled(request.snapshot_id))
        try:
            async with asyncio.timeout(timeout_s):
                answer = await pool_snapshot(self._rank, snapshot, request)
        finally:
            store.drop(snapshot)
        answer.header.CopyFrom(messages.header_of(self._rank, snapshot))
        return answer

    async def _list(self, _request: pb.ListSnapshotsRequest, _timeout_s: float) -> Message:
        return messages.snapshot_list(self._rank)

    async def _digest(self, request: pb.DigestSnapshotRequest, timeout_s: float) -> Message:
        store = self._rank.pins.store
        snapshot = store.hold(store.filled(request.snapshot_id))
        try:
            async with asyncio.timeout(timeout_s):
                digests = await digest_snapshot(self._rank, snapshot, request.ranges)
        finally:
            store.drop(snapshot)
        header = messages.header_of(self._rank, snapshot)
        return pb.DigestSnapshotResponse(header=header, digests=digests)

    async def _metrics(self, _request: pb.GetMetricsRequest, _timeout_s: float) -> Message:
        header = messages.header(self._rank)
        return pb.GetMetricsResponse(header=header, text=sidecar_metrics(self._rank))

    async def _summon(
        self, request: pb.SummonRequest, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._gateway.summon(request, timeout_s)) as parts:
            async for message in parts:
                yield message

    def _lease_s(self, lease_ms: int) -> float:
        config = self._rank.config
        return limits.granted_lease_s(lease_ms, config.default_lease_s, config.max_lease_s)


def _meant(context: Context) -> str | None:
    """The rank that the caller means to call; None if it does not say."""
    for key, value in context.invocation_metadata() or ():
        if key == RANK_KEY:
            return str(value)
    return None


def _parse(request_type: type[Message], data: bytes) -> Message:
    try:
        return request_type.FromString(data)
    except DecodeError:
        raise UsageError(f"the request is no {request_type.DESCRIPTOR.full_name}") from None
