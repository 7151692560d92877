"""What is reached through the control plane, and how bytes get there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from paramd.errors import DeniedError, NotFoundError, UnreachableError
from paramd.mesh.peers import relay
from paramd.mesh.peers.control import JobDocument, PeerAddress, RestClient
from paramd.mesh.peers.relay import TunnelRelay
from paramd.state_files import host_id

FAR = "kernel/1"


def document(*peers: tuple[str, str], control: str = "127.0.0.1:8471") -> JobDocument:
    """A job whose peers are (address, host id)."""
    return JobDocument(
        job="run",
        incarnation=1,
        world_size=len(peers),
        control_address=control,
        layout_digest="d",
        peers={n: PeerAddress(n, address, "", host) for n, (address, host) in enumerate(peers)},
        ticket="t",
        ticket_expires_s=0.0,
    )


class Control:
    """Opens tunnels to a real server that sends back what it gets, in capitals."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self.paths: list[str] = []

    async def tunnel(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.paths.append(path)
        if not self.port:
            raise UnreachableError("the control plane does not reach rank 1")
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses that answer, of those that are asked."""
    found: set[str] = set()

    async def answer(addresses: Iterable[str]) -> set[str]:
        return found & set(addresses)

    monkeypatch.setattr(relay, "_reached", answer)
    return found


async def test_what_is_here_or_answers_is_reached_itself(reached: set[str]) -> None:
    here = document(("127.0.0.1:4000", host_id()), ("127.0.0.1:4001", ""))
    routes = TunnelRelay(Control())
    assert await routes.routed(here) is here
    reached |= {"mtls://10.0.0.1:8471", "mtls://10.0.0.2:4000"}
    there = document(("mtls://10.0.0.2:4000", FAR), control="mtls://10.0.0.1:8471")
    assert await routes.routed(there) is there


async def test_what_does_not_answer_and_another_hosts_loopback_are_relayed(
    reached: set[str],
) -> None:
    reached |= {"mtls://10.0.0.1:4000"}
    found = await TunnelRelay(Control()).routed(
        document(
            ("mtls://10.0.0.1:4000", FAR),
            ("mtls://10.0.0.2:4000", FAR),
            control="mtls://10.0.0.1:8471",
        )
    )
    assert [found.peer(rank).address for rank in range(2)] == [
        "mtls://10.0.0.1:4000",
        "relay/1/mtls://10.0.0.2:4000",
    ]
    assert found.control_address == "relay/control/mtls://10.0.0.1:8471"
    # What SSH forwards: all of the job listens on loopback over there.
    found = await TunnelRelay(Control()).routed(document(("127.0.0.1:4000", FAR)))
    assert found.control_address == "relay/control/127.0.0.1:8471"
    assert found.peer(0).address == "relay/0/127.0.0.1:4000"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            b'HTTP/1.1 404 Not Found\r\ncontent-length: 20\r\n\r\n{"detail": "no rank"}',
            NotFoundError,
        ),
        (b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n", DeniedError),
        (b"HTTP/1.1 503 Busy\r\n\r\n", UnreachableError),
        (b"220 smtp.example\r\n\r\n", UnreachableError),
        (b"\x00" * 20_000, UnreachableError),
        (b"", UnreachableError),
    ],
)
async def test_anything_but_a_tunnel_is_an_error_of_ours(
    answer: bytes, error: type[Exception]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = RestClient(f"http://127.0.0.1:{port}", "token")
        with pytest.raises(error):
            await client.tunnel("/jobs/run/ranks/0/tunnel")
        await client.close()
