"""A gRPC channel whose answers are read within bounds; opened by `tls.open_channel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from paramd.answers import parsed

Options = Sequence[tuple[str, Any]]


def open_bounded(
    target: str, credentials: grpc.ChannelCredentials | None, options: Options
) -> grpc.aio.Channel:
    """A channel to a gRPC target, without TLS if there are no credentials. No connection yet."""
    if credentials is None:
        return BoundedChannel(grpc.aio.insecure_channel(target, options=options))
    return BoundedChannel(grpc.aio.secure_channel(target, credentials, options=options))


class BoundedChannel(grpc.aio.Channel):
    """A channel; what its peer answers is read as `answers.parsed` does, method by method."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Takes ownership of the channel."""
        self._channel: Any = channel

    async def __aenter__(self) -> BoundedChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.__aexit__(*error)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        state: grpc.ChannelConnectivity = self._channel.get_state(try_to_connect)
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        parse = self._bounded(method, response_deserializer)
        return self._channel.unary_unary(method, request_serializer, parse, _registered_method)

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        parse = self._bounded(method, response_deserializer)
        return self._channel.unary_stream(method, request_serializer, parse, _registered_method)

    def stream_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        parse = self._bounded(method, response_deserializer)
        return self._channel.stream_unary(method, request_serializer, parse, _registered_method)

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        parse = self._bounded(method, response_deserializer)
        return self._channel.stream_stream(method, request_serializer, parse, _registered_method)

    @staticmethod
    def _bounded(method: str, parse: Any) -> Callable[[bytes], Any]:
        return partial(parsed, method.rpartition("/")[2], parse)
