"""Reaches sidecars through the control plane's one port where no direct connection is possible.

The control plane carries bytes to a sidecar and back (`GET .../tunnel`). gRPC, which brings its own
sockets, connects to a Unix socket of ours, and we carry its bytes to the tunnel. TLS within a job
is end to end, so the control plane sees none of it; without TLS everything is as private as the
connection to the control plane.

A relayed address is "relay/<rank>/<address>", or "relay/control/<address>" for the control plane's
own gRPC.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from paramd.errors import ParamdError
from paramd.mesh.peers.control import JobDocument, RestClient, behind
from paramd.mesh.peers.grpc import is_relayed
from paramd.security.tls import host_of, is_loopback
from paramd.state_files import host_id, same_network

PROBE_S: Final = 1.5
"""How long, in seconds, a sidecar's host may take to answer before the control plane relays."""

PROBES_AT_ONCE: Final = 64
PART_BYTES: Final = 256 << 10
CONTROL: Final = "control"


class TunnelRelay:
    """The relayed addresses of one job, each with a Unix socket. Event loop only."""

    def __init__(self, control: RestClient) -> None:
        self._control = control
        self._job = ""
        self._folder: Path | None = None
        self._listeners: dict[str, socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: dict[str, str] = {}

    def way(self, address: str) -> tuple[str, str]:
        """The address behind a relayed one, and the gRPC target that leads there."""
        who = address.split("/", 2)[1]
        if who not in self._listeners:
            self._listen(who)
        return behind(address), f"unix:{self._path(who)}"

    def why_not(self, address: str) -> str:
        """Why the last tunnel to a relayed address could not be opened; empty if it could."""
        return self._failures.get(address.split("/", 2)[1], "") if is_relayed(address) else ""

    async def routed(self, document: JobDocument) -> JobDocument:
        """The document with relayed addresses where others cannot be reached from here."""
        self._job = document.job
        here = host_id()
        # Without a host id the host is unknown; a sidecar on this host needs no relay.
        far = [
            peer
            for peer in document.peers.values()
            if peer.host_id and not same_network(peer.host_id, here)
        ]
        local = len(far) < len(document.peers)
        control = document.control_address
        asked = {peer.address for peer in far} | {control}
        reached = await _reached(one for one in asked if not is_loopback(host_of(one)))
        peers = dict(document.peers)
        for peer in far:
            if peer.address not in reached:
                peers[peer.rank] = replace(peer, address=f"relay/{peer.rank}/{peer.address}")
        # A control plane on loopback is on this host if any rank is, or if all ranks are on
        # separate addresses, as with a site beside us.
        beside = local or not any(is_loopback(host_of(peer.address)) for peer in far)
        if control not in reached and not (is_loopback(host_of(control)) and beside):
            control = f"relay/{CONTROL}/{control}"
        if control == document.control_address and peers == document.peers:
            return document
        return replace(document, peers=peers, control_address=control)

    async def close(self) -> None:
        """End all tunnels. Idempotent."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners.values():
            loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _path(self, who: str) -> Path:
        if self._folder is None:
            # Only this user may enter it: behind it are our tunnels.
            self._folder = Path(tempfile.mkdtemp(prefix="paramd-relay-"))
        return self._folder / who

    def _listen(self, who: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(str(self._path(who)))
            listener.listen(16)
        except BaseException:
            listener.close()
            raise
        self._listeners[who] = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, who)

    def _accept(self, who: str) -> None:
        with suppress(OSError):
            connection, _ = self._listeners[who].accept()
            task = asyncio.get_running_loop().create_task(self._carry(who, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, who: str, connection: socket.socket) -> None:
        near_in, near_out = await asyncio.open_unix_connection(sock=connection, limit=PART_BYTES)
        try:
            try:
                job = quote(self._job, safe="")
                of = "" if who == CONTROL else f"/ranks/{who}"
                far_in, far_out = await self._control.tunnel(f"/jobs/{job}{of}/tunnel")
            except ParamdError as error:
                self._failures[who] = str(error)
                return  # gRPC sees the end of its connection, and tries again
            self._failures.pop(who, None)
            await carried((near_in, near_out), (far_in, far_out))
        finally:
            near_out.close()


async def _reached(addresses: Iterable[str]) -> set[str]:
    """The addresses that answer from here. One connection per host: its ranks share a fate."""
    by_host: dict[str, list[str]] = {}
    for address in addresses:
        by_host.setdefault(host_of(address), []).append(address)
    found: set[str] = set()
    limit = asyncio.Semaphore(PROBES_AT_ONCE)

    async def probe(host: str, port: str) -> bool:
        async with limit:
            try:
                async with asyncio.timeout(PROBE_S):
                    _, writer = await asyncio.open_connection(host, int(port))
            except (OSError, ValueError):
                return False
        writer.close()
        return True

    hosts = [host for host in by_host if host]
    ports = [by_host[host][0].rpartition(":")[2] for host in hosts]
    answers = await asyncio.gather(*map(probe, hosts, ports))
    for host, answers_us in zip(hosts, answers, strict=True):
        if answers_us:
            found.update(by_host[host])
    return found


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def carried(
    near: Connection, far: Connection, *, heard: Callable[[], None] = lambda: None
) -> None:
    """Carry bytes both ways until one side ends; closes `far`.

    `heard`: called for each part that comes from `near`.
    """
    try:
        await _both(_copy(near[0], far[1], heard), _copy(far[0], near[1]))
    finally:
        far[1].close()


async def _copy(
    source: asyncio.StreamReader,
    sink: asyncio.StreamWriter,
    heard: Callable[[], None] = lambda: None,
) -> None:
    with suppress(OSError):
        while part := await source.read(PART_BYTES):
            heard()
            sink.write(part)
            await sink.drain()


async def _both(*directions: Coroutine[Any, Any, None]) -> None:
    """Run both until one ends: a half-closed connection is of no use to gRPC."""
    tasks = [asyncio.ensure_future(one) for one in directions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
