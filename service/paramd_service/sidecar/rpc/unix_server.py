"""The Unix socket: trainers exchange descriptors, clients on this host get mappings.

Messages are small and rare, so each connection is one reader callback on the event loop. A bad
message gets an error and the connection stays open; when it ends, so do its mappings.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

from paramd.errors import ConflictError, DeniedError, ParamdError, UsageError, codes_of
from paramd.memory import handover
from paramd.memory.descriptors import is_pidfd_of_elsewhere, pidfd
from paramd.security.tickets import Claims, Role
from paramd.security.tls import Pems
from paramd_service.admission import Shares, Who
from paramd_service.aio import in_executor
from paramd_service.sidecar.calls import GATHERERS, READERS, check_role
from paramd_service.sidecar.owner import (
    AttachedMemory,
    AttachRequest,
    Ownership,
    parse_attach,
    parse_mesh,
)
from paramd_service.sidecar.parts import Closing, Kept, Op, Peer, whole_number
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.streams import accepted_now
from paramd_service.sidecar.snapshots.store import Snapshot

MAX_CONNECTIONS = 256
"""Most connections of clients that have shown a valid ticket."""
MAX_STRANGERS = 64
"""Most connections of non-trainers without a ticket; beyond it the oldest is closed."""
MAX_LAYOUT_BYTES = 1 << 30


@contextmanager
def _read_only(descriptor: int) -> Iterator[int]:
    """The memory of a descriptor, reopened so that its receiver cannot change it."""
    readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield readable
    finally:
        os.close(readable)


class UnixServer:
    """Accepts connections and gives each to a `_Connection`."""

    def __init__(self, rank: RankSidecar, listener: socket.socket, address: Callable[[], str]):
        self.rank = rank
        self.address = address
        self._listener = listener
        self._connections: dict[_Connection, None] = {}
        self.shares = Shares(MAX_CONNECTIONS, "connections to the socket")
        self.ops: Mapping[str, Op] = rank.parts.ops()
        rank.revocations.on_news.append(self._end_revoked)

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def stop_listening(self) -> None:
        """Refuse new connections and remove the socket file. Idempotent."""
        if self._listener.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        # Before closing: no other sidecar takes the path while this one listens.
        with suppress(OSError):
            os.unlink(self.rank.config.socket_path)
        self._listener.close()

    async def close(self) -> None:
        """End all connections."""
        self.stop_listening()
        for connection in list(self._connections):
            await connection.close()

    def forget(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)

    def _end_revoked(self) -> None:
        for connection in self._connections:
            if connection.is_revoked():
                self.rank.start_task(connection.close())

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self.start()

    def _accept(self) -> None:
        for accepted in accepted_now(self._listener, self.rank, self._accept_again):
            accepted.setblocking(False)
            try:
                peer_pid = handover.check_peer(accepted)
            except DeniedError as error:
                self.rank.log("connection-refused", reason=str(error))
                self.rank.refusals.saw("socket", str(error))
                accepted.close()
                continue
            strangers = [one for one in self._connections if one.is_stranger]
            for one in strangers[: max(len(strangers) - MAX_STRANGERS + 1, 0)]:
                self.rank.start_task(one.close())
            connection = _Connection(self, accepted, peer_pid)
            self._connections[connection] = None
            connection.start()


_OwnOp: TypeAlias = Callable[[dict[str, Any], list[int]], Coroutine[Any, Any, None]]


class _Connection(Peer):
    """One peer: the trainer once it has attached, or a client that maps snapshots."""

    def __init__(self, server: UnixServer, sock: socket.socket, peer_pid: int) -> None:
        self._server = server
        self._rank = server.rank
        self._socket = sock
        self._peer_pid = peer_pid
        self._elsewhere: int | None = None
        """A pidfd of a peer in another container."""
        self._attached: AttachedMemory | None = None
        self._maps: dict[str, list[Snapshot]] = {}
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._claims: dict[str | None, Claims] = {}
        self._counted_for: Who = None
        self._kept: dict[type[Closing], Closing] = {}
        self._own_ops: dict[str, _OwnOp] = {
            "introduce": self._introduce,
            "attach": self._attach,
            "mesh": self._mesh,
            "state": self._state,
            "detach": self._detach,
            "where": self._where,
            "leave": self._leave,
            "live": self._live,
            "map": self._map,
            "unmap": self._unmap,
        }

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)

    @property
    def is_stranger(self) -> bool:
        """Whether the open connection is not the trainer's and has shown no ticket."""
        return self._attached is None and not self._claims and not self._closing

    def is_revoked(self) -> bool:
        """Whether it has shown a ticket whose token was revoked."""
        return any(map(self._rank.revocations.refuses, self._claims.values()))

    async def close(self) -> None:
        self._closing = True
        if self._task is not None:
            await asyncio.wait([self._task])
        self._end()

    def _readable(self) -> None:
        try:
            message, descriptors = handover.receive(self._socket)
        except BlockingIOError:
            return
        except UsageError as error:
            self._refuse(error)
            return
        except (EOFError, OSError):
            self._end()
            return
        # One message at a time: the reader is off until this one has been answered.
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        self._task = loop.create_task(self._serve(message, descriptors))

    async def _serve(self, message: dict[str, Any], descriptors: list[int]) -> None:
        op = message["op"]
        try:
            served = self._own_ops.get(op)
            if served is not None:
                await served(message, descriptors)
            elif (part_op := self._server.ops.get(op)) is not None:
                await part_op(self, message, descriptors)
            else:
                raise UsageError(f"unknown op {op!r}")
        except ParamdError as error:
            self._refuse(error)
        except OSError:
            self._closing = True  # the peer left before its answer
        except Exception as error:
            self._rank.log("handover-failed", op=op, error=repr(error))
            self._refuse(ParamdError("internal error, see the sidecar's log"))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            self._task = None
            if self._closing:
                self._end()
            else:
                self.start()

    async def _introduce(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Exchange pidfds with a peer in another container: they work across pid namespaces."""
        if self._peer_pid:
            raise UsageError("introduce: only for processes of another container")
        if len(descriptors) != 1 or not is_pidfd_of_elsewhere(descriptors[0]):
            raise UsageError("introduce: expected one descriptor, a pidfd of the process itself")
        if self._elsewhere is not None:
            os.close(self._elsewhere)
        self._elsewhere = descriptors.pop()
        descriptors.append(pidfd(os.getpid()))  # closed once this message is served
        handover.send(self._socket, {"op": "introduced"}, descriptors)

    async def _attach(self, message: dict[str, Any], descriptors: list[int]) -> None:
        request = parse_attach(message)
        self._check_pid(request)
        pems = Pems.of_json(message["tls"]) if "tls" in message else None
        handed_back = list(descriptors)
        descriptors.clear()  # attach takes them over
        attached = await self._rank.attach(request, handed_back, elsewhere=self._elsewhere)
        self._attached = attached
        if pems is not None and self._rank.own_pems is not None:
            # The CA of the previous incarnation ended with it.
            self._rank.own_pems.pems = pems
        answer = {
            "op": "attached",
            "sidecar_pid": os.getpid(),
            "address": self._server.address(),
            "socket_path": str(self._rank.config.socket_path),
        }
        handover.send(self._socket, answer, attached.shared.as_list())

    def _check_pid(self, request: AttachRequest) -> None:
        # 0: the kernel cannot name the peer in this pid namespace.
        if not self._peer_pid and self._elsewhere is None:
            raise DeniedError("attach: a process of another container must introduce itself first")
        if self._peer_pid not in (0, request.pid):
            raise DeniedError(
                f"attach: process {self._peer_pid} claims to be process {request.pid}"
            )

    async def _mesh(self, message: dict[str, Any], descriptors: list[int]) -> None:
        self.check_owner("mesh")
        if len(descriptors) != 1:
            raise UsageError(f"mesh: {len(descriptors)} descriptors; expected one, the layout")
        size = os.fstat(descriptors[0]).st_size
        if size > MAX_LAYOUT_BYTES:
            raise UsageError(f"mesh: a layout of {size:,} bytes is over {MAX_LAYOUT_BYTES:,}")
        layout = os.pread(descriptors[0], size, 0)
        self._rank.set_mesh(parse_mesh(message, layout))
        handover.send(self._socket, {"op": "serving"})

    async def _state(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Allocate device memory for more of the optimizer's state."""
        known_count, size_bytes = (
            whole_number(message, "known"),
            whole_number(message, "size_bytes"),
        )
        async with self._rank.using_memory:
            self.check_owner("state")
            attached = self._rank.attached
            assert attached is not None
            allocated = partial(attached.add_state, known_count, size_bytes)
            allocation = await in_executor(self._rank.executor, allocated)
            size_bytes, number = allocation.size_bytes, message.get("number")
            answer = {"op": "state", "number": number, "size_bytes": size_bytes}
            self._rank.faults.at("state-allocated")
            handover.send(self._socket, answer, [allocation.descriptor])
            self._rank.log("state-allocated", size_bytes=size_bytes, after=known_count)

    async def _detach(self, message: dict[str, Any], descriptors: list[int]) -> None:
        self.check_owner("detach")
        self._rank.detach()

    async def _where(self, message: dict[str, Any], descriptors: list[int]) -> None:
        # Asked before a trainer takes the sidecar over, which cannot move to another address; and
        # by clients, before they have a ticket, to find the job whose trainers live.
        answer = {"op": "where", "address": self._server.address()}
        ended = self._rank.ownership in (Ownership.ORPHANED, Ownership.GONE, Ownership.TORN)
        handover.send(self._socket, {**answer, "ended": ended})

    async def _leave(self, message: dict[str, Any], descriptors: list[int]) -> None:
        # Without a ticket, which nobody can mint once the control plane has ended. The kernel
        # vouches for the user, who could as well attach, or send a signal. Unlike a signal, this is
        # refused while a trainer lives, atomically.
        self._rank.leave()
        handover.send(self._socket, {"op": "leaving", "pid": os.getpid()})

    def answer(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        handover.send(self._socket, dict(message), list(descriptors))

    @property
    def sock(self) -> socket.socket:
        return self._socket

    def kept(self, kind: type[Kept]) -> Kept:
        found = self._kept.get(kind)
        if found is None:
            found = self._kept[kind] = kind()
        assert isinstance(found, kind)
        return found

    def check_owner(self, op: str) -> None:
        if self._attached is None or self._attached is not self._rank.attached:
            raise ConflictError(f"{op}: only the attached trainer may send that; attach first")

    def caller(self, message: Mapping[str, Any]) -> Claims:
        self._rank.check_meant(message.get("rank"))
        claims = self._rank.verify(str(message.get("ticket", "")))
        if claims.role is Role.CONTROL:
            raise DeniedError("the control plane's orders come over gRPC")
        self._rank.note_client(message["op"])
        if not self._claims:
            self._server.shares.take(claims.token_id)
            self._counted_for = claims.token_id
        self._claims[claims.token_id] = claims
        return claims

    async def _map(self, message: dict[str, Any], descriptors: list[int]) -> None:
        check_role(self.caller(message), GATHERERS)
        snapshot_id = str(message.get("snapshot_id", ""))
        snapshot = self._rank.pins.store.filled(snapshot_id)
        answer = {
            "op": "mapped",
            "size_bytes": snapshot.size_bytes,
            "state": list(snapshot.state),
            "boundary_token": snapshot.token,
            **self._rank.identity(),
        }
        if snapshot.block is None:
            handover.send(self._socket, answer)
            return
        with _read_only(snapshot.block.descriptor) as readable:
            # Counted before sending the descriptor: from then on the memory must not be reused.
            snapshot.map_count += 1
            self._maps.setdefault(snapshot_id, []).append(snapshot)
            handover.send(self._socket, answer, [readable])
        self._rank.faults.at("mapped")

    async def _live(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Page and arena, for a reader that proves its copies by the page (memory/gate.py)."""
        check_role(self.caller(message), READERS)
        rank = self._rank
        rank.check_plan(whole_number(message, "incarnation"), str(message.get("layout_digest", "")))
        attached = rank.attached
        assert attached is not None
        if rank.ownership not in (Ownership.OWNED, Ownership.ORPHANED):
            raise ConflictError(rank.ownership.value)
        if attached.device is not None:
            raise ConflictError("the parameters are on a device; read a snapshot of them")
        size_bytes = attached.request.arena_bytes
        answer = {"op": "live", "arena_bytes": size_bytes, **rank.identity()}
        with _read_only(attached.shared.page) as page, _read_only(attached.shared.arena) as arena:
            handover.send(self._socket, answer, [page, arena])
        rank.faults.at("live")

    async def _unmap(self, message: dict[str, Any], descriptors: list[int]) -> None:
        mapped = self._maps.get(str(message.get("snapshot_id", "")))
        if mapped:
            mapped.pop().map_count -= 1

    def _refuse(self, error: ParamdError) -> None:
        answer = {"op": "error", "code": codes_of(error).grpc, "message": str(error)}
        try:
            handover.send(self._socket, answer)
        except OSError:
            self._closing = True

    def _end(self) -> None:
        if self._socket.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        if self._elsewhere is not None:
            os.close(self._elsewhere)
            self._elsewhere = None
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()
        for snapshots in self._maps.values():
            for snapshot in snapshots:
                # Without an unmap the peer may still map it: never reuse the memory.
                snapshot.map_count -= 1
                snapshot.tainted = True
        self._maps.clear()
        if self._claims:
            self._server.shares.give_back(self._counted_for)
        self._server.forget(self)
