"""Operands by shared memory: windows of the sidecar's, for clients of its own host.

A window is filled here, checked and copied there, and filled again. The client never has the
memory that the trainer will read, so what was verified cannot change afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from paramd.errors import ConflictError, ParamdError, UnreachableError, error_of_grpc
from paramd.memory import handover
from paramd.mesh.asked import check_handover
from paramd.mesh.peers.control import PeerAddress

_ANSWER_S = 30.0


class Windows:
    """One edit's windows at one sidecar. Made by `open`, ended by `close`. Blocks."""

    def __init__(self, connection: socket.socket, answer: handover.Message, memory: int) -> None:
        self._connection = connection
        self._window_bytes = int(answer["window_bytes"])
        self._count = int(answer["window_count"])
        self.staged_bytes = int(answer["staged_bytes"])
        """Bytes staged already, from the first on."""
        self._map = mmap.mmap(memory, self._window_bytes * self._count)
        os.close(memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def open(cls, peer: PeerAddress, ticket: str, edit_id: str) -> Windows:
        """Asks for the windows of an edit whose manifest is staged.

        Raises:
            UnreachableError: no sidecar of ours answers at the socket.
            DeniedError, NotFoundError: it refuses.
        """
        connection = handover.connect(Path(peer.socket_path), timeout_s=_ANSWER_S)
        try:
            message = {"op": "stage", "ticket": ticket, "rank": peer.rank, "edit_id": edit_id}
            handover.send(connection, message)
            answer, descriptors = _answer(connection, "staging", peer.rank)
            try:
                check_handover(answer, ticket, peer.rank)
                if len(descriptors) != 1:
                    raise ConflictError(f"rank {peer.rank} handed over {len(descriptors)} windows")
                return cls(connection, answer, descriptors.pop())
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        except OSError as error:
            connection.close()
            if isinstance(error, ParamdError):
                raise
            raise UnreachableError(f"rank {peer.rank} did not hand over its windows") from error
        except BaseException:
            connection.close()
            raise

    def send(self, parts: Iterable[memoryview], told: Callable[[int], None]) -> None:
        """Sends all parts, in order; windows fill while others are being taken.

        Raises:
            UnreachableError: the sidecar has gone. UsageError and others: it refused.
        """
        at = self.staged_bytes
        index = filled = pending = 0
        try:
            for part in parts:
                done = 0
                memory = part if not part.readonly else bytearray(part)
                address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                while done < len(part):
                    if pending == self._count:
                        self._taken()
                        pending -= 1
                    room = min(self._window_bytes - filled, len(part) - done)
                    begin = index * self._window_bytes + filled
                    # Unlike a slice of the map, this lets other ranks' threads run.
                    ctypes.memmove(self._address + begin, address + done, room)
                    filled, done = filled + room, done + room
                    if filled == self._window_bytes:
                        self._full(index, at, filled, told)
                        at, filled = at + filled, 0
                        index, pending = (index + 1) % self._count, pending + 1
            if filled:
                self._full(index, at, filled, told)
                pending += 1
            for _ in range(pending):
                self._taken()
        except (OSError, EOFError) as error:
            if isinstance(error, ParamdError):
                raise
            raise UnreachableError("a sidecar went away while an edit was staged") from error

    def _full(self, index: int, offset: int, size: int, told: Callable[[int], None]) -> None:
        message = {"op": "window", "index": index, "offset_bytes": offset, "size_bytes": size}
        handover.send(self._connection, message)
        told(size)

    def _taken(self) -> None:
        _answer(self._connection, "taken", None)

    def close(self) -> None:
        """Lets go of the windows. Idempotent."""
        with suppress(BufferError):
            self._map.close()
        self._connection.close()


def _answer(
    connection: socket.socket, expected: str, rank: int | None
) -> tuple[handover.Message, list[int]]:
    message, descriptors = handover.receive(connection)
    if message["op"] == expected:
        return message, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    who = f"rank {rank}: " if rank is not None else ""
    if message["op"] == "error":
        raise error_of_grpc(str(message.get("code")))(f"{who}{message.get('message')}")
    raise ConflictError(f"{who}the sidecar answered {message['op']!r} instead of {expected!r}")
