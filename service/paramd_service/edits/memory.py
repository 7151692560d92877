"""The edits' memory: an index that survives the sidecar, and ranges reserved for edits.

    [0, HEAD_BYTES)       the index, which a respawned sidecar reads
    [HEAD_BYTES, pool)    populated from the start: small edits touch no fresh pages
    the rest              populated on demand; released after being idle for a while

A slot of the index is 16 words. It is written while its first word, the phase, is 0; a change is
written in an order in which every single store leaves it valid, the phase last.

All methods run on the event loop; pages are populated and released on the executor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial

from paramd.errors import ExhaustedError
from paramd.memory.descriptors import SparseMemory, pages
from paramd.memory.left import HEADROOM, Purpose, Room
from paramd_service.aio import post, uncancelled
from paramd_service.sidecar.ranges import Range, Ranges

HEAD_BYTES = 256 << 10


class EditMemory:
    """Allocates ranges of one attachment's edit memory."""

    def __init__(
        self,
        descriptor: int,
        *,
        pool_bytes: int,
        idle_s: float,
        executor: Executor,
        room: Room = HEADROOM,
    ) -> None:
        """`room` grants pages beyond the head."""
        self.sparse = SparseMemory(descriptor, room, Purpose.EDIT)
        self._free = Ranges((HEAD_BYTES, self.sparse.size_bytes))
        self._resident = Ranges()
        self._pool_end = min(HEAD_BYTES + pages(pool_bytes), self.sparse.size_bytes)
        self._idle_s = idle_s
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._work: set[asyncio.Future[None]] = set()
        self._giving: set[asyncio.Future[None]] = set()
        """Ranges whose pages are being released, and which are free again then."""
        self.on_hole: Callable[[], None] = lambda: None
        """Called before pages are released: existing page tables may become stale."""

    @property
    def buffer(self) -> memoryview:
        return self.sparse.buffer

    @property
    def free_bytes(self) -> int:
        return self._free.size

    @property
    def idle_bytes(self) -> int:
        """Bytes beyond the pool that have pages and are not reserved."""
        parts = self._resident.within(self._pool_end, self.sparse.size_bytes)
        return sum(high - low for part in parts for low, high in self._free.within(*part))

    async def start(self) -> None:
        """Populate the head. Raises ExhaustedError."""
        # Little, and without it there would be no edits until the next start.
        await self._populate(0, HEAD_BYTES, needed=True)

    async def warm_up(self) -> None:
        """Release unused pages that an earlier sidecar left, and populate the pool."""
        self._release_on_executor(Ranges((self._pool_end, self.sparse.size_bytes)))
        # Edits work without the pool, only slower.
        with suppress(ExhaustedError):
            for begin, end in self._resident.missing(0, self._pool_end):
                await self._populate(begin, end)

    def take(self, begin: int, end: int) -> None:
        """Mark a range that an earlier sidecar had reserved."""
        self._free.remove(begin, end)
        self._resident.add(begin, end)

    async def reserve(self, size_bytes: int) -> Range:
        """Reserve a range of whole pages, all populated; contents are arbitrary.

        Raises:
            ExhaustedError: If this memory has no room, or the machine has no pages left.
        """
        size_bytes = pages(max(size_bytes, 1))
        begin = self._free.first_fit(size_bytes)
        while begin is None and self._giving:
            await asyncio.wait(self._giving)
            begin = self._free.first_fit(size_bytes)
        if begin is None:
            raise ExhaustedError(
                f"no {size_bytes:,} contiguous bytes are free for an edit "
                f"({self._free.size:,} are free in all); make it smaller, or wait until others "
                "are applied or expire"
            )
        end = begin + size_bytes
        self._free.remove(begin, end)
        try:
            for low, high in self._resident.missing(begin, end):
                await self._populate(low, high)
        except BaseException:
            self.free(begin, end)
            raise
        return begin, end

    def free(self, begin: int, end: int) -> None:
        """Free a range. Its pages are released if they stay idle."""
        self._free.add(begin, end)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._idle_s, self._idle)

    def take_idle(self) -> list[Callable[[], object]]:
        """Take all idle pages away, those of the pool too: small edits then take fresh ones. Return
        what releases them, on any thread; their ranges are free again after that."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return self._parted(self._resident, HEAD_BYTES)

    async def close(self) -> None:
        """Unmap; the pages remain the trainer's."""
        if self._timer is not None:
            self._timer.cancel()
        if self._work or self._giving:
            await asyncio.wait(self._work | self._giving)
        self.sparse.close()

    async def _populate(self, begin: int, end: int, *, needed: bool = False) -> None:
        populate = partial(self.sparse.populate, begin, end, needed=needed)
        work = self._loop.run_in_executor(self._executor, populate)
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        # Awaited even when cancelled: a range being populated must not be reserved again.
        try:
            await uncancelled(work)
        except asyncio.CancelledError:
            if work.exception() is None:
                self._resident.add(begin, end)
            raise
        self._resident.add(begin, end)

    def _idle(self) -> None:
        self._timer = None
        self._release_on_executor(self._resident)

    def _release_on_executor(self, resident: Ranges) -> None:
        for release in self._parted(resident, self._pool_end):
            self._loop.run_in_executor(self._executor, release)

    def _parted(self, resident: Ranges, from_byte: int) -> list[Callable[[], object]]:
        """Take the idle pages from that byte on away; return what releases them."""
        parts = resident.within(from_byte, self.sparse.size_bytes)
        releases: list[Callable[[], object]] = []
        for begin, end in [idle for part in parts for idle in self._free.within(*part)]:
            # Not free during the hole punch, which would wipe the next owner's bytes.
            self._free.remove(begin, end)
            self._resident.remove(begin, end)
            self.on_hole()
            done = self._loop.create_future()
            self._giving.add(done)
            done.add_done_callback(partial(self._given, (begin, end)))
            releases.append(partial(self._release, (begin, end), done))
        return releases

    def _release(self, part: Range, done: asyncio.Future[None]) -> None:
        """Release the pages of a range. On any thread."""
        try:
            self.sparse.release(*part)
        except OSError as error:
            post(self._loop, done.set_exception, error)
        else:
            post(self._loop, done.set_result, None)

    def _given(self, part: Range, done: asyncio.Future[None]) -> None:
        self._giving.discard(done)
        # If punching the hole failed, the pages still exist.
        if not done.cancelled() and done.exception() is not None:
            self._resident.add(*part)
        self._free.add(*part)


_WORDS = 16
_SLOT_BYTES = 8 * _WORDS
SLOT_COUNT = HEAD_BYTES // _SLOT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One edit; positions are byte offsets into the edits' memory."""

    phase: int
    """A paramd.v1.EditPhase: STAGED, READY or APPLIED."""
    id_high: int
    id_low: int
    """The edit's id: two halves of 64 bits, as signed words."""
    meta_begin: int
    meta_end: int
    """Manifest and digests."""
    body_begin: int = 0
    body_end: int = 0
    """Program, data and pre-images; empty if they are not kept."""
    program_begin: int = 0
    boundary: int = 0
    token: int = 0
    step: int = -1
    edits: int = -1
    stop_ns: int = 0
    order: int = 0
    """Rises with every edit staged or applied."""
    refusal: int = 0
    """Why it cannot be undone; an `UndoRefusal`."""


_NAMES = [field.name for field in fields(Slot)]


class EditIndex:
    """The slots of one memory of edits."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:HEAD_BYTES].cast("q")
        self._free = [n for n in range(SLOT_COUNT - 1, -1, -1) if not self._words[n * _WORDS]]

    def slots(self) -> Iterator[tuple[int, Slot]]:
        """Slots in use, with their numbers."""
        for number in range(SLOT_COUNT):
            begin = number * _WORDS
            if self._words[begin]:
                words = self._words[begin : begin + len(_NAMES)].tolist()
                yield number, Slot(**dict(zip(_NAMES, words, strict=True)))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def add(self, slot: Slot) -> int:
        """Write a slot and return its number. Raises ExhaustedError."""
        if not self._free:
            raise ExhaustedError(f"{SLOT_COUNT:,} edits are known here; drop some first")
        number = self._free.pop()
        self.change(number, slot)
        return number

    def change(self, number: int, slot: Slot) -> None:
        """Rewrite a slot; a crash in between leaves one that a respawned sidecar can trust."""
        begin = number * _WORDS
        for at, name in enumerate(_NAMES[1:], begin + 1):
            self._words[at] = getattr(slot, name)
        # Last: a new slot counts once its phase is not 0.
        self._words[begin] = slot.phase

    def clear(self, number: int) -> None:
        """Free a slot."""
        self._words[number * _WORDS] = 0
        self._free.append(number)

    def close(self) -> None:
        self._words.release()


def id_words(edit_id: str) -> dict[str, int]:
    """`id_high` and `id_low` of 32 hexadecimal digits."""
    raw = bytes.fromhex(edit_id)
    high, low = (int.from_bytes(half, "big", signed=True) for half in (raw[:8], raw[8:]))
    return {"id_high": high, "id_low": low}
