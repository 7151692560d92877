"""Calls whose channel is closed because their peer has left the mesh are outages."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from paramd.errors import UnreachableError
from paramd.mesh.peers.grpc import Asked, Channels
from paramd.v1 import sidecar_pb2, sidecar_pb2_grpc

pytestmark = pytest.mark.usefixtures("grpc_is_up")


class Slow(sidecar_pb2_grpc.SidecarServiceServicer):  # type: ignore[misc]
    """Says that it was asked, and never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def GetState(self, request: Any, context: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()

    GetEdit = GetState


async def _started(slow: Slow, port: int) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    sidecar_pb2_grpc.add_SidecarServiceServicer_to_server(slow, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Slow, Channels, Asked]]:
    slow = Slow()
    server, port = await _started(slow, 0)
    address = f"127.0.0.1:{port}"
    channels = Channels(lambda _rank: "ticket")
    try:
        yield slow, channels, Asked(job="run", incarnation=1, rank=3, address=address)
    finally:
        await channels.close()
        await server.stop(None)


async def test_a_call_whose_peer_left_is_an_outage() -> None:
    async with serving() as (slow, channels, asked):
        call = channels.ask(asked, "GetState", sidecar_pb2.GetStateRequest(), timeout_s=10.0)
        calling = asyncio.ensure_future(call)
        await asyncio.wait_for(slow.asked.wait(), 60)
        await channels.close()
        with pytest.raises(UnreachableError, match=r"rank 3 .*: its sidecar was lost in the"):
            await calling


async def test_a_peer_that_is_back_at_its_address_is_called_without_a_pause() -> None:
    async with serving() as (slow, channels, asked):
        pass
    request = sidecar_pb2.GetEditRequest()  # not a method that gRPC retries by itself
    with pytest.raises(UnreachableError):
        await channels.ask(asked, "GetEdit", request, timeout_s=10.0)
    server, _ = await _started(slow, int(asked.address.rpartition(":")[2]))
    try:
        # Within gRPC's pause of a second; without `is_back` the old failure is told again.
        await channels.is_back(asked.address)
        calling = asyncio.ensure_future(channels.ask(asked, "GetEdit", request, timeout_s=10.0))
        heard = asyncio.ensure_future(slow.asked.wait())
        await asyncio.wait({calling, heard}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert heard.done(), calling
    finally:
        await channels.close()
        await server.stop(None)
    with pytest.raises(UnreachableError):
        await calling


async def test_a_method_is_opened_once_for_each_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    stub = sidecar_pb2_grpc.SidecarServiceStub

    def counted(channel: Any) -> Any:
        opened.append(channel)
        return stub(channel)

    monkeypatch.setattr(sidecar_pb2_grpc, "SidecarServiceStub", counted)
    async with serving() as (_, channels, asked):
        for name in ("GetState", "GetEdit", "GetState"):
            assert channels.method(asked.address, name) is channels.method(asked.address, name)
        first = channels.channel(asked.address)
        await channels.keep_only(frozenset())
        channels.method(asked.address, "GetState")
        assert opened == [first, first, channels.channel(asked.address)]
        assert first is not channels.channel(asked.address)
