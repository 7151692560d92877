"""Admission in both gRPC servers: every call takes a place, and its request must be readable.

Calls that need no ticket have places of their own, so that strangers who hold streams open
cannot lock out ticket holders; the other places are shared by token. Malformed requests are
refused as such: gRPC itself would log a traceback for each, and answer UNKNOWN.
"""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from paramd.errors import ExhaustedError, ParamdError, UsageError, codes_of
from paramd_service.shares import Shares, Who

MAX_OPEN_CALLS: Final = 64
"""Concurrent calls of methods that need no ticket."""

CONNECTION_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # Drop connections that stay silent: no HTTP/2, or no call.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # What a stranger may reset and open again without being served is not worth remembering.
    ("grpc.max_concurrent_streams", 256),
    ("grpc.max_metadata_size", 16 << 10),
)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = Callable[
    [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
]


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as the operator permits: gRPC has no cap on connections, and
    accepts none without a descriptor.

    A process started from a shell has 1,024, which idle strangers would use up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Doors(grpc.aio.ServerInterceptor):
    """Runs after the interceptor that identifies the caller."""

    def __init__(
        self,
        *,
        open_methods: Container[str],
        counted: Callable[[str], bool],
        calls: Shares,
        who: Callable[[], Who],
    ) -> None:
        """`counted`: which other methods take a place of `calls`; `who`: the current caller."""
        self._open_methods = open_methods
        self._counted = counted
        self._calls = calls
        self._who = who
        self._open_calls = Shares(MAX_OPEN_CALLS, "calls without a ticket")

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method = str(handler_call_details.method)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if method in self._open_methods:
            return _Guarded(handler, method, lambda: self._open_calls.one(None)).handler()
        if self._counted(method):
            return _Guarded(handler, method, lambda: self._calls.one(self._who())).handler()
        if handler.request_deserializer is None:
            return handler  # it parses its own bytes
        return _Guarded(handler, method, nullcontext).handler()


class _Guarded:
    """A handler whose requests are parsed here, and whose place is held while it runs."""

    def __init__(
        self, inner: Handler, method: str, place: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._inner = inner
        self._method = method
        self._place = place

    def handler(self) -> Handler:
        """The handler to serve instead."""
        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[self._inner.request_streaming, self._inner.response_streaming]
        serve = self._many if self._inner.response_streaming else self._one
        served: Handler = make(serve, response_serializer=self._inner.response_serializer)
        return served

    async def _one(self, incoming: Any, context: Any) -> Any:
        inner = self._inner
        behavior: Any = inner.stream_unary if inner.request_streaming else inner.unary_unary
        try:
            with self._place():
                return await behavior(self._requests(incoming, context), context)
        except (UsageError, ExhaustedError) as error:
            await _abort(context, error)

    async def _many(self, incoming: Any, context: Any) -> None:
        inner = self._inner
        behavior: Any = inner.stream_stream if inner.request_streaming else inner.unary_stream
        try:
            with self._place():
                answers = behavior(self._requests(incoming, context), context)
                if not hasattr(answers, "__aiter__"):
                    await answers  # it writes by itself
                    return
                async for answer in answers:
                    await context.write(answer)
        except (UsageError, ExhaustedError) as error:
            await _abort(context, error)

    def _requests(self, incoming: Any, context: Any) -> Any:
        if self._inner.request_streaming:
            return self._parsed_stream(incoming, context)
        return self._parsed(incoming)

    async def _parsed_stream(self, incoming: AsyncIterator[Any], context: Any) -> Any:
        async for data in incoming:
            try:
                request = self._parsed(data)
            except UsageError as error:
                await _abort(context, error)
            yield request

    def _parsed(self, data: Any) -> Any:
        if self._inner.request_deserializer is None:
            return data
        try:
            return self._inner.request_deserializer(data)
        except DecodeError:
            raise UsageError(f"the request cannot be read as one of {self._method[:128]}") from None


async def _abort(context: Any, error: ParamdError) -> None:
    await context.abort(grpc.StatusCode[codes_of(error).grpc], str(error))
