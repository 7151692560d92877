"""A call that ends with an error keeps nothing of its requests until a garbage collection."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from paramd.errors import NotFoundError, UsageError
from paramd.v1 import control_pb2 as pb
from paramd_service.admission import Doors, Shares
from paramd_service.control.access.join import errors_as_statuses

pytestmark = pytest.mark.usefixtures("grpc_is_up")

REQUEST = pb.ProveControlRequest(address="x" * 1000)


class Held:
    """Something that only a call's frames hold, beside its request."""


class Refusing:
    """Handlers that end each call in one of the ways that servers do."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[Held]] = []

    def _hold(self) -> Held:
        held = Held()
        self.held.append(weakref.ref(held))
        return held

    async def by_status(self, request: Any, context: Any) -> Any:
        held = self._hold()
        async with errors_as_statuses(context, "by_status"):
            raise NotFoundError(f"there is no {type(held).__name__}")

    async def by_abort(self, request: Any, context: Any) -> Any:
        held = self._hold()
        await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no {type(held).__name__}")

    async def by_own_error(self, request: Any, context: Any) -> Any:
        """The frame has the error that has the frame: from Python 3.12 on, all that pass through
        an asynchronous context manager are so."""
        held = self._hold()
        try:
            raise NotFoundError(f"there is no {type(held).__name__}")
        except NotFoundError as error:
            kept = error
            await context.abort(grpc.StatusCode.NOT_FOUND, str(kept))

    async def streaming(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            held = self._hold()
            async with errors_as_statuses(context, "streaming"):
                raise UsageError(f"{type(held).__name__} is wrong")
        yield REQUEST  # makes this a generator


def calling(port: int, name: str) -> None:
    """One call that has to be refused. Blocks."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        data = REQUEST.SerializeToString()
        one = channel.unary_unary(f"/ends/{name}")
        many = channel.stream_stream(f"/ends/{name}")
        with pytest.raises(grpc.RpcError) as refused:
            list(many(iter([data]), timeout=60)) if name == "streaming" else one(data, timeout=60)
        assert refused.value.code() is not grpc.StatusCode.UNKNOWN


@pytest.mark.parametrize("name", ["by_status", "by_abort", "by_own_error", "streaming"])
def test_a_refused_call_keeps_nothing_until_a_collection(name: str) -> None:
    refusing = Refusing()
    parse = pb.ProveControlRequest.FromString
    unary: Callable[..., Any] = grpc.unary_unary_rpc_method_handler
    handlers = {
        "by_status": unary(refusing.by_status, parse),
        "by_abort": unary(refusing.by_abort, parse),
        "by_own_error": unary(refusing.by_own_error, parse),
        "streaming": grpc.stream_stream_rpc_method_handler(
            refusing.streaming, parse, pb.ProveControlRequest.SerializeToString
        ),
    }

    async def served() -> None:
        doors = Doors(counted=lambda method: False, calls=Shares(9, "calls"), who=lambda: None)
        server = grpc.aio.server(interceptors=[doors])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ends", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            await asyncio.to_thread(calling, port, name)
            # The call's task ends after its caller has the answer.
            while any(held() is not None for held in refusing.held) and not over.is_set():
                await asyncio.sleep(0.01)
        finally:
            await server.stop(None)

    over = threading.Event()
    timer = threading.Timer(20, over.set)
    timer.start()
    gc.disable()
    try:
        asyncio.run(served())
    finally:
        gc.enable()
        timer.cancel()
    assert [held() for held in refusing.held] == [None]
