"""A snapshot's memory by its descriptor: for programs on the sidecar's own host.

The sidecar sends the descriptor over its Unix socket. It uses that memory again only after
our `unmap`; if the connection ends without it, the sidecar forgets the memory and the
kernel keeps it for us. So what a program sees never changes, lease or no lease.

Copies are made with pread: the kernel copies as fast as memcpy, and mapping first would
cost as much again in page faults.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import weakref
from pathlib import Path

from paramd.errors import ParamdError, UnreachableError, error_of_grpc
from paramd.memory import handover
from paramd.mesh.asked import check_handover
from paramd.mesh.peers.control import PeerAddress
from paramd.state_files import host_id, kernel_of

# A sidecar answers within milliseconds; a stopped one must be noticed soon.
_ANSWER_S = 1.5


def is_same_host(peer: PeerAddress) -> bool:
    """Whether the peer's sidecar runs under our kernel and its socket is visible here.

    A container of the same host shares the kernel but perhaps not the path.
    """
    same_kernel = kernel_of(peer.host_id) == kernel_of(host_id())
    return bool(peer.socket_path) and same_kernel and os.path.exists(peer.socket_path)


class SharedSnapshot:
    """The memory of one pinned snapshot. Made by `open`, ended by `close`."""

    def __init__(
        self, connection: socket.socket, descriptor: int, size_bytes: int, snapshot_id: str
    ) -> None:
        self._connection = connection
        self._descriptor = descriptor
        self._snapshot_id = snapshot_id
        self._maps: list[weakref.ref[mmap.mmap]] = []
        self.size_bytes = size_bytes
        """Length of the snapshot."""

    @classmethod
    def open(cls, peer: PeerAddress, ticket: str, snapshot_id: str) -> SharedSnapshot:
        """Asks the sidecar for the memory. Blocks for a few seconds at most.

        Raises:
            UnreachableError: no sidecar of ours answers at the socket.
            DeniedError, NotFoundError: it refuses the ticket, or the lease ended.
        """
        connection = handover.connect(Path(peer.socket_path), timeout_s=_ANSWER_S)
        try:
            descriptor, size_bytes = _receive_memory(connection, peer.rank, ticket, snapshot_id)
            return cls(connection, descriptor, size_bytes, snapshot_id)
        except OSError as error:
            connection.close()
            if isinstance(error, ParamdError):
                raise
            raise UnreachableError(f"rank {peer.rank} did not hand over its snapshot") from error
        except BaseException:
            connection.close()
            raise

    def read_into(self, address: int, offset_bytes: int, size_bytes: int) -> None:
        """Copies bytes [offset_bytes, offset_bytes + size_bytes) to `address`.

        Several threads may call it at once; the interpreter is free meanwhile.

        Raises:
            UnreachableError: the memory is shorter than the sidecar said.
        """
        target = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
        done = 0
        while done < size_bytes:
            moved = os.preadv(self._descriptor, [target[done:]], offset_bytes + done)
            if moved == 0:
                raise UnreachableError("the snapshot's memory is shorter than its sidecar says")
            done += moved

    def map_private(self) -> mmap.mmap | None:
        """The memory, readable and writable; None when it is empty.

        Writing to it copies the page for this process: nobody else sees it. Tensors made
        on the map keep it alive, also after `close`.
        """
        if not self.size_bytes:
            return None
        if os.fstat(self._descriptor).st_size < self.size_bytes:
            # Touching what lies beyond the end would kill this process.
            raise UnreachableError("the snapshot's memory is shorter than its sidecar says")
        memory = mmap.mmap(
            self._descriptor,
            self.size_bytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        self._maps.append(weakref.ref(memory))
        return memory

    def close(self) -> None:
        """Lets go of the memory. Idempotent.

        Only when nobody here holds a map of it any more may the sidecar use it again, and
        is told so. Else it stays, for as long as somebody holds it.
        """
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        try:
            if all(memory() is None for memory in self._maps):
                message = {"op": "unmap", "snapshot_id": self._snapshot_id}
                handover.send(self._connection, message)
        except OSError:
            pass  # the sidecar has gone, and its part of the memory with it
        finally:
            self._connection.close()


def _receive_memory(
    connection: socket.socket, rank: int, ticket: str, snapshot_id: str
) -> tuple[int, int]:
    message = {"op": "map", "ticket": ticket, "rank": rank, "snapshot_id": snapshot_id}
    handover.send(connection, message)
    try:
        answer, descriptors = handover.receive(connection)
    except EOFError as error:
        raise UnreachableError(f"rank {rank}: its sidecar closed the socket") from error
    try:
        if answer["op"] == "mapped" and len(descriptors) == 1:
            check_handover(answer, ticket, rank)
            return descriptors.pop(), int(answer["size_bytes"])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    if answer["op"] == "error":
        raise error_of_grpc(str(answer.get("code")))(f"rank {rank}: {answer.get('message')}")
    raise UnreachableError(f"rank {rank}: its socket answered {answer['op']!r}")
