"""Handover between trainer and sidecar: shared descriptors, sent over a Unix socket.

SOCK_SEQPACKET preserves message boundaries; each message is one JSON object, with descriptors
alongside (SCM_RIGHTS). docs/design.md gives the order of messages.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paramd.errors import DeniedError, UnreachableError, UsageError
from paramd.memory import descriptors
from paramd.memory.control_page import PAGE_BYTES
from paramd.memory.descriptors import close_all, create_sparse, pages

ROOM_EXTRA_BYTES = 1 << 20
"""Size of a gradient slot beyond its arena-shaped room."""

EDITS_EXTRA_BYTES = 64 << 20
EDIT_ARENAS = 4
GRADIENT_SLOTS = 2

OPTIMIZER_ARENAS = 8
OPTIMIZER_EXTRA_BYTES = 64 << 20
CONTINUATION_SLOT_BYTES = 16 << 20
"""Most bytes of one continuation record or table (memory/continuation.py)."""

MAX_ALLOCATIONS = 32
"""Most allocations for optimizer state on a device. Each is at least a quarter of all before it,
so that this does not limit growth."""

MAX_MESSAGE_BYTES = 128 << 10
_SHARED = 7
MAX_DESCRIPTORS = _SHARED + MAX_ALLOCATIONS
# sockaddr_un holds 108 bytes including the terminating NUL.
_MAX_PATH_BYTES = 107
_FULL_PAUSE_S = 0.01

Message = dict[str, Any]


def slot_bytes(arena_bytes: int) -> int:
    """Size of one gradient slot: a room shaped like the arena, then program and notes."""
    return pages(arena_bytes) + ROOM_EXTRA_BYTES


def edits_bytes(arena_bytes: int) -> int:
    """Size of the edit memory: for edits, and for one whole state that is put back."""
    state = pages(arena_bytes) + optimizer_bytes(arena_bytes) + continuation_bytes()
    return EDIT_ARENAS * pages(arena_bytes) + EDITS_EXTRA_BYTES + state


def gradients_bytes(arena_bytes: int) -> int:
    return GRADIENT_SLOTS * slot_bytes(arena_bytes)


def optimizer_bytes(arena_bytes: int) -> int:
    """Size of the optimizer memory: no more than that of its state has a place in it."""
    return OPTIMIZER_ARENAS * pages(arena_bytes) + OPTIMIZER_EXTRA_BYTES


def continuation_bytes() -> int:
    """Size of the continuation memory: two slots each for record, table and extra state."""
    return 6 * CONTINUATION_SLOT_BYTES


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory on a device, for optimizer state."""

    descriptor: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Survived:
    """Memory of a trainer that has ended, for the next one to move into."""

    arena: int
    optimizer: int
    continuation: int
    state: Sequence[Allocation] = ()


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The kernel objects both processes share, in handover order; each holds its own copies."""

    page: int
    wake: int
    arena: int
    edits: int
    gradients: int
    optimizer: int
    continuation: int
    state: list[Allocation] = field(default_factory=list, init=False)
    """Optimizer state on the device of a device arena; grows while training runs."""

    @classmethod
    def create(
        cls,
        arena_bytes: int,
        *,
        survived: Survived | None = None,
        create_memory: Callable[[str, int], int] = descriptors.create_memory,
        create_arena: Callable[[int], int] | None = None,
    ) -> Descriptors:
        """Create all of them, zeroed; of `survived` duplicates are taken instead.

        `create_arena` makes an arena of that many bytes on a device.

        Raises:
            ExhaustedError: Without memory for the arena.
        """
        made: list[int] = []
        state: list[Allocation] = []
        try:
            made.append(create_memory("paramd-page", PAGE_BYTES))
            made.append(descriptors.wake_event())
            if survived is not None:
                made.append(_duplicate(survived.arena))
            elif create_arena is not None:
                made.append(create_arena(arena_bytes))
            else:
                made.append(create_memory("paramd-arena", arena_bytes))
            made.append(create_sparse("paramd-edits", edits_bytes(arena_bytes)))
            made.append(create_sparse("paramd-gradients", gradients_bytes(arena_bytes)))
            if survived is not None:
                made += map(_duplicate, (survived.optimizer, survived.continuation))
                for one in survived.state:
                    state.append(Allocation(_duplicate(one.descriptor), one.size_bytes))
            else:
                made.append(create_sparse("paramd-optimizer", optimizer_bytes(arena_bytes)))
                made.append(create_sparse("paramd-continuation", continuation_bytes()))
        except BaseException:
            close_all([*made, *(one.descriptor for one in state)])
            raise
        found = cls(*made)
        found.state.extend(state)
        return found

    @classmethod
    def received(
        cls,
        fds: Sequence[int],
        arena_bytes: int,
        *,
        on_device: bool = False,
        allocations: Sequence[int] = (),
    ) -> Descriptors:
        """Adopt descriptors from the Unix socket. On error the caller still owns `fds`.

        `on_device`: only a device's driver can check the arena's descriptor. `allocations`: sizes
        of those that have optimizer state on that device.

        Raises:
            UsageError: For other objects than expected.
        """
        if len(fds) != _SHARED + len(allocations):
            raise UsageError(
                f"{len(fds)} descriptors; expected page, wake, arena, edits, gradients, "
                f"optimizer, continuation, and {len(allocations)} of state on a device"
            )
        found = cls(*fds[:_SHARED])
        found.state.extend(map(Allocation, fds[_SHARED:], allocations))
        least = {
            found.page: PAGE_BYTES,
            found.arena: 0 if on_device else arena_bytes,
            found.edits: edits_bytes(arena_bytes),
            found.gradients: gradients_bytes(arena_bytes),
            found.optimizer: optimizer_bytes(arena_bytes),
            found.continuation: continuation_bytes(),
        }
        if any(os.fstat(fd).st_size < size_bytes for fd, size_bytes in least.items()):
            raise UsageError("a descriptor is smaller than what it stands for")
        if "eventfd" not in os.readlink(f"/proc/self/fd/{found.wake}"):
            raise UsageError("the second descriptor is no eventfd")
        os.set_blocking(found.wake, False)
        return found

    def as_list(self) -> list[int]:
        """In handover order, those of the state last."""
        return [
            self.page,
            self.wake,
            self.arena,
            self.edits,
            self.gradients,
            self.optimizer,
            self.continuation,
            *(one.descriptor for one in self.state),
        ]

    def close(self) -> None:
        close_all(self.as_list())


def _duplicate(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)


def listen(path: Path) -> socket.socket:
    """A non-blocking listening socket at `path` (0600; its directory must be 0700 and ours).

    Replaces a stale socket file.

    Raises:
        UsageError: If another process listens there, or the directory is open to others.
    """
    status = path.parent.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UsageError(
            f"{path.parent}: must belong to user {os.geteuid()} with mode 0700 "
            f"(is user {status.st_uid}, mode {status.st_mode & 0o777:04o})"
        )
    server = _socket()
    try:
        if path.exists():
            with suppress(UnreachableError):
                connect(path, timeout_s=1.0).close()
                raise UsageError(f"{path}: another sidecar listens there; stop it first")
            path.unlink()
        with _short_address(path) as address:
            server.bind(address)
        # The 0700 directory covers the moment between bind and this.
        path.chmod(0o600)
        server.listen(64)
        server.setblocking(False)
        return server
    except BaseException:
        server.close()
        raise


def connect(path: Path, *, timeout_s: float = 5.0) -> socket.socket:
    """A connected socket whose peer is checked to run as our own user.

    Raises:
        UnreachableError: If nothing listens there.
        DeniedError: For another user's listener.
    """
    client = _socket()
    client.settimeout(timeout_s)
    try:
        with _short_address(path) as address:
            _connect(client, address, timeout_s)
        check_peer(client)
        return client
    except OSError as error:
        client.close()
        raise UnreachableError(f"{path}: no sidecar answers there ({error.strerror})") from error
    except BaseException:
        client.close()
        raise


def _connect(client: socket.socket, address: str, timeout_s: float) -> None:
    """Connect, retrying while the listener's backlog is full."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            client.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_FULL_PAUSE_S)


def check_peer(connection: socket.socket) -> int:
    """Check that the peer runs as our user (or root); return its pid. DeniedError: another user."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _gid = struct.unpack("3i", packed)
    if uid not in (os.geteuid(), 0):
        raise DeniedError(f"process {pid} (uid {uid}) is not allowed to connect to this sidecar")
    return int(pid)


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message. The descriptors stay open here."""
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise UsageError(f"a handover message of {len(data):,} bytes is over {MAX_MESSAGE_BYTES:,}")
    rights = array.array("i", descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    connection.sendmsg([data], ancillary)


def receive(connection: socket.socket) -> tuple[Message, list[int]]:
    """Receive the next message and its descriptors, which the caller then owns.

    Raises EOFError if the peer closed the socket, UsageError for a malformed message, and
    BlockingIOError or TimeoutError depending on the socket's mode.
    """
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(
        MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    try:
        if not data:
            raise EOFError("the peer closed the handover socket")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise UsageError("a handover message was too long")
        return _parse(data), list(descriptors)
    except BaseException:
        close_all(descriptors)
        raise


def _parse(data: bytes) -> Message:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError("a handover message is not JSON") from error
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise UsageError('a handover message must be an object with a string "op"')
    return message


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextmanager
def _short_address(path: Path) -> Iterator[str]:
    """An address that fits sockaddr_un: long paths go through their directory's descriptor."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
