"""Lends memory to sidecars of this host, which copy an edit's data from it.

Data in lent memory is only named; other data is copied into a ring of windows, each filled again
once the sidecar has taken its content.
"""

from __future__ import annotations

import ctypes
import select
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from paramd.errors import ConflictError, ParamdError, UnreachableError, error_of_grpc
from paramd.memory import handover
from paramd.memory.descriptors import LentMemory, close_all
from paramd.memory.left import check_client
from paramd.mesh.peers.control import PeerAddress
from paramd.mesh.peers.grpc import check_handover

MAX_LENT: Final = 7
"""Memories of one loan besides its ring; the sidecar takes 8 in all."""

_MAX_KEPT: Final = 2
"""Memories kept for another use: a block of writing often begins while the tensors of the one
before it still exist."""

_ANSWER_S: Final = 30.0

_WINDOW_BYTES: Final = 2 << 20
_WINDOW_COUNT: Final = 4
"""Also the number of messages that may be unanswered."""

_MESSAGE_BYTES: Final = 16 << 20
_MESSAGE_SPANS: Final = 1000
"""Limits of one message, below those of the sidecar."""


class Loan:
    """A connection to one sidecar, and the memories lent over it. Methods block."""

    def __init__(self, peer: PeerAddress) -> None:
        """Raises UnreachableError: nothing listens at the peer's socket."""
        self.peer = peer
        self.memories: list[LentMemory] = []
        self._connection = handover.connect(Path(peer.socket_path), timeout_s=_ANSWER_S)
        self._ring = -1
        self._ticket = ""

    def lend(self, memory: LentMemory, ticket: str) -> int:
        """Lend one more memory; returns its number. Raises: as `stage`."""
        message = {"op": "lend", "ticket": ticket, "rank": self.peer.rank}
        handover.send(self._connection, message, [memory.descriptor])
        check_handover(self._answer("lent"), ticket, self.peer.rank)
        self.memories.append(memory)
        return len(self.memories) - 1

    def stage(self, ticket: str, edit_id: str) -> int:
        """Begin with an edit whose manifest is staged; return the number of staged bytes.

        Raises:
            OSError, EOFError: If the sidecar went away.
            DeniedError: If it refused the ticket.
            NotFoundError: If it does not have the edit.
        """
        message = {"op": "stage", "ticket": ticket, "rank": self.peer.rank, "edit_id": edit_id}
        handover.send(self._connection, message)
        answer = self._answer("staging")
        check_handover(answer, ticket, self.peer.rank)
        self._ticket = ticket
        return int(answer["staged_bytes"])

    def take(self, offset_bytes: int, spans: Sequence[Sequence[int]]) -> None:
        """Have spans taken, each [memory, begin, size]; `taken` waits for it."""
        handover.send(
            self._connection, {"op": "take", "offset_bytes": offset_bytes, "spans": spans}
        )

    def taken(self) -> None:
        """Wait for the answer to the first `take` that has none."""
        self._answer("taken")

    def ring(self) -> int:
        """Number of the ring, lent on first use. Call while no message is unanswered."""
        if self._ring < 0:
            self._ring = self.lend(LentMemory(_WINDOW_BYTES * _WINDOW_COUNT), self._ticket)
        return self._ring

    @property
    def has_ring(self) -> bool:
        """Whether `ring` needs no message any more."""
        return self._ring >= 0

    @property
    def lent(self) -> list[LentMemory]:
        """The memories without the ring."""
        return [one for number, one in enumerate(self.memories) if number != self._ring]

    def is_open(self) -> bool:
        """Whether the sidecar has neither closed the connection nor sent anything."""
        return not select.select([self._connection], [], [], 0)[0]

    def close(self) -> None:
        self._connection.close()
        self.memories = []

    def _answer(self, expected: str) -> handover.Message:
        message, descriptors = handover.receive(self._connection)
        close_all(descriptors)
        if message["op"] == expected:
            return message
        who = f"rank {self.peer.rank}: "
        if message["op"] == "error":
            raise error_of_grpc(str(message.get("code")))(f"{who}{message.get('message')}")
        raise ConflictError(f"{who}the sidecar sent {message['op']!r} instead of {expected!r}")


class Lender:
    """Lends memories repeatedly, as fresh pages cost more than copying into them.

    Their loans are kept, because a sidecar that maps one again takes a fault for every page.
    """

    def __init__(self) -> None:
        self._memories: list[tuple[LentMemory, weakref.ref[Any]]] = []
        """Each with the buffer it was last lent as, which lives as long as it is used."""
        self._loans: dict[int, Loan] = {}
        self._lock = threading.Lock()

    def lend(self, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
        """A buffer in lent memory, lent again once unused; ExhaustedError without memory."""
        with self._lock:
            memory = self._unused(size_bytes)
            if memory is None:
                check_client(size_bytes)
                memory = LentMemory(size_bytes)
            buffer = (ctypes.c_char * size_bytes).from_buffer(memory)
            self._memories.append((memory, weakref.ref(buffer)))
            return buffer

    def _unused(self, size_bytes: int) -> LentMemory | None:
        """Take out a memory that is large enough; forget those beyond the limit."""
        for number, (memory, user) in enumerate(self._memories):
            if user() is None and len(memory) >= size_bytes:
                del self._memories[number]
                return memory
        for memory, _ in self._memories[: 1 - _MAX_KEPT]:
            for rank, loan in list(self._loans.items()):
                if memory in loan.memories:
                    self._loans.pop(rank).close()
        # A memory in use lives on with its tensors.
        self._memories = self._memories[1 - _MAX_KEPT :]
        return None

    @contextmanager
    def loan(
        self, peer: PeerAddress, ticket: str, memories: Sequence[LentMemory]
    ) -> Iterator[Loan]:
        """A loan of these memories (of the first few) to one sidecar, for one edit.

        Raises:
            UnreachableError: If the right sidecar does not respond at the socket, or went away.
            DeniedError: If it refused the ticket.
            ExhaustedError: Without memory for a ring.
        """
        loan: Loan | None = None
        kept = False
        try:
            loan = self._kept(peer)
            loan = loan if loan is not None else Loan(peer)
            for memory in memories[:MAX_LENT]:
                if memory not in loan.memories and len(loan.memories) < MAX_LENT:
                    loan.lend(memory, ticket)
            yield loan
            kept = self._keep(loan)
        except (OSError, EOFError) as error:
            if isinstance(error, ParamdError):
                raise
            raise UnreachableError(
                f"rank {peer.rank}: its sidecar went away while an edit was staged"
            ) from error
        finally:
            if loan is not None and not kept:
                loan.close()

    def close(self) -> None:
        """End all loans, and release the memories, which live as long as their tensors."""
        with self._lock:
            for loan in self._loans.values():
                loan.close()
            self._loans, self._memories = {}, []

    def _kept(self, peer: PeerAddress) -> Loan | None:
        with self._lock:
            loan = self._loans.pop(peer.rank, None)
        if loan is None:
            return None
        if loan.peer == peer and loan.is_open():
            return loan
        loan.close()
        return None

    def _keep(self, loan: Loan) -> bool:
        """Keep a loan of our memories alone: it would keep others from being freed."""
        with self._lock:
            ours = [memory for memory, _ in self._memories]
            lent = loan.lent
            if not lent or loan.peer.rank in self._loans or any(one not in ours for one in lent):
                return False
            self._loans[loan.peer.rank] = loan
            return True


class Sender:
    """Has an edit's data taken from lent memory, in order."""

    def __init__(self, loan: Loan, offset_bytes: int, told: Callable[[int], None]) -> None:
        """The data continue from `offset_bytes`; `told` gets numbers of bytes as they are sent."""
        self._loan = loan
        self._offset_bytes = offset_bytes
        self._told = told
        self._spans: list[list[int]] = []
        self._size_bytes = 0
        self._copied_bytes = 0
        self._message_count = 0
        self._pending = 0

    def send(self, parts: Iterable[memoryview]) -> None:
        """Have all parts taken. Their content must not change before this returns.

        Raises:
            OSError, EOFError: If the sidecar went away.
            ParamdError: If it refused the data.
        """
        for part in parts:
            memory = part if not part.readonly else bytearray(part)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            for number, lent in enumerate(self._loan.memories):
                begin = lent.begin_of(address, len(part))
                if begin is not None:
                    self._name(number, begin, len(part))
                    break
            else:
                self._copy(address, len(part))
        self._flush()
        self._wait(below=1)

    def _copy(self, address: int, size_bytes: int) -> None:
        done = 0
        while done < size_bytes:
            # Each message has its own window, free once the one before it there was taken.
            self._wait(below=_WINDOW_COUNT if self._loan.has_ring else 1)
            ring = self._loan.ring()
            begin = self._message_count % _WINDOW_COUNT * _WINDOW_BYTES + self._copied_bytes
            room = min(_WINDOW_BYTES - self._copied_bytes, size_bytes - done)
            # Unlike slice assignment, this releases the GIL for other ranks' threads.
            ctypes.memmove(self._loan.memories[ring].address + begin, address + done, room)
            done, self._copied_bytes = done + room, self._copied_bytes + room
            self._name(ring, begin, room)
            if self._copied_bytes == _WINDOW_BYTES:
                self._flush()

    def _name(self, number: int, begin: int, size_bytes: int) -> None:
        last = self._spans[-1] if self._spans else [-1, 0, 0]
        if last[0] == number and last[1] + last[2] == begin:
            last[2] += size_bytes
        else:
            self._spans.append([number, begin, size_bytes])
        self._size_bytes += size_bytes
        if self._size_bytes >= _MESSAGE_BYTES or len(self._spans) == _MESSAGE_SPANS:
            self._flush()

    def _flush(self) -> None:
        if not self._spans:
            return
        self._wait(below=_WINDOW_COUNT)
        self._loan.take(self._offset_bytes, self._spans)
        self._told(self._size_bytes)
        self._offset_bytes += self._size_bytes
        self._spans, self._size_bytes, self._copied_bytes = [], 0, 0
        self._message_count, self._pending = self._message_count + 1, self._pending + 1

    def _wait(self, *, below: int) -> None:
        """Wait until fewer messages than `below` are unanswered."""
        while self._pending >= below:
            self._loan.taken()
            self._pending -= 1
