"""Standing snapshots: recent states of everything, kept for a successor of the trainer.

The trainer asks for one at a boundary (words STANDING and STANDING_STEP), which it announces, so
the bytes are copied while the next forward and backward run: arena, optimizer memory and
continuation record. SEQ proves each copy; one that the next update overtakes is dropped. There
are two buffers, written in turn, so that a whole one is left at any moment; with memory for only
one, a trainer that dies while it is written leaves none.

`serve` runs on the copying thread; memory is made and digests are computed on a thread of
their own. A lock guards what is told of the buffers.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from xxhash import xxh3_64

from paramd.errors import ExhaustedError
from paramd.memory.continuation import read_pair
from paramd.memory.control_page import Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.gate import CopyEnd, CopySpan, copy_at_one_step
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.owner import AttachedMemory
from paramd_service.sidecar.snapshots.store import Block, BlockMaker

BUFFERS = 2
DIGEST_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingLabel:
    """What a buffer holds: arena, optimizer memory, record and table, one after the other."""

    lineage: int
    """History that the state belongs to (word LINEAGE)."""
    step: int
    edits: int
    """Edits applied in this history."""
    arena_bytes: int
    optimizer_bytes: int
    record_bytes: int
    table_bytes: int
    world_size: int
    layout_digest: str
    digest: int = 0
    """XXH3 of the bytes; 0 while it is being computed."""

    @property
    def size_bytes(self) -> int:
        return self.arena_bytes + self.optimizer_bytes + self.record_bytes + self.table_bytes


@dataclass(eq=False, slots=True)
class _Buffer:
    block: Block | None = None
    label: StandingLabel | None = None


class Standing:
    """One rank's standing snapshots. They outlive an attachment."""

    def __init__(self, blocks: BlockMaker, log: Log, *, budget_bytes: int | None) -> None:
        """`budget_bytes`: most bytes of all buffers; None: what the machine has."""
        self._blocks = blocks
        # Its own thread: a digest takes long, and callers wait for the sidecar's others.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="paramd-standing")
        self._log = log
        self._budget_bytes = budget_bytes
        self._buffers = [_Buffer() for _ in range(BUFFERS)]
        self._lock = threading.Lock()
        self._making = False
        self._ended: tuple[AttachedMemory, int] | None = None
        self.missed_count = 0
        """Snapshots that were asked for and not made."""

    def labels(self) -> list[tuple[StandingLabel, Block]]:
        """The whole snapshots and their memory, newest first."""
        with self._lock:
            found = [(b.label, b.block) for b in self._buffers if b.label and b.block]
        return sorted(found, key=lambda one: one[0].step, reverse=True)

    def rebase(self, lineage: int, new_lineage: int, step: int) -> None:
        """Keep what `new_lineage` continues: snapshots of `lineage` up to `step`, no others."""
        with self._lock:
            for buffer in self._buffers:
                label = buffer.label
                if label is not None and (label.lineage != lineage or label.step > step):
                    buffer.label = None
                elif label is not None:
                    buffer.label = replace(label, lineage=new_lineage)

    def trainer_ended(self, attached: AttachedMemory) -> None:
        """Begin to digest the memory that a trainer left, so that its successor finds damage."""
        parts = (
            attached.arena.buffer,
            SparseMemory(attached.shared.optimizer).buffer[: attached.page[Word.OPTIMIZER_BYTES]],
        )

        def note() -> None:
            self._ended = attached, digest_of(*parts)

        self._executor.submit(note)

    def end_digest(self, attached: AttachedMemory) -> int:
        """The digest of what this trainer left: arena, then state; 0 while it is not known."""
        ended = self._ended
        return ended[1] if ended is not None and ended[0] is attached else 0

    def serving(
        self, attached: AttachedMemory, layout_digest: Callable[[], str]
    ) -> Callable[[], None]:
        """What the copying thread has to call at each wake, while `attached` lives."""
        memory = SparseMemory(attached.shared.optimizer)
        continuation = SparseMemory(attached.shared.continuation)
        seen = attached.page[Word.STANDING]

        def serve() -> None:
            nonlocal seen
            asked = attached.page[Word.STANDING]
            if asked != seen:
                seen = asked
                self._make(attached, memory, continuation, layout_digest())

        return serve

    def close(self) -> None:
        """Give all memory back."""
        self._executor.shutdown(cancel_futures=True)
        with self._lock:
            for buffer in self._buffers:
                if buffer.block is not None:
                    self._blocks.dispose(buffer.block)
                buffer.block = buffer.label = None

    def _make(
        self,
        attached: AttachedMemory,
        optimizer: SparseMemory,
        continuation: SparseMemory,
        layout_digest: str,
    ) -> None:
        page = attached.page
        step, seq = page[Word.STANDING_STEP], page[Word.SEQ]
        kept = read_pair(continuation.buffer)
        if seq & 1 or page[Word.STEP] != step or kept is None:
            self._missed(step, "training was past its boundary")
            return
        record, table = kept
        label = StandingLabel(
            lineage=page[Word.LINEAGE],
            step=step,
            edits=page[Word.EDITS] + page[Word.EDITS_BEFORE],
            arena_bytes=attached.request.arena_bytes,
            optimizer_bytes=page[Word.OPTIMIZER_BYTES],
            record_bytes=len(record),
            table_bytes=len(table),
            world_size=attached.request.world_size,
            layout_digest=layout_digest,
        )
        buffer = self._room(label.size_bytes, label.lineage)
        if buffer is None or buffer.block is None:
            self._missed(step, "its memory is being made")
            return
        target = buffer.block.address
        spans = [
            CopySpan(attached.arena.address, target, label.arena_bytes),
            CopySpan(optimizer.address, target + label.arena_bytes, label.optimizer_bytes),
        ]
        begin_ns = time.monotonic_ns()
        end, state = copy_at_one_step(page, spans)
        page[Word.STANDING_NS] = time.monotonic_ns() - begin_ns
        if end is not CopyEnd.DONE or state.proof != seq:
            self._missed(step, "the next update began before it was copied")
            return
        rest = record + table
        ctypes.memmove(target + label.size_bytes - len(rest), rest, len(rest))
        with self._lock:
            buffer.label = label
        page[Word.STANDING_MADE] = step
        self._executor.submit(self._digest, buffer, label)

    def _room(self, size_bytes: int, lineage: int) -> _Buffer | None:
        """The buffer to write next, emptied; None until there is memory for it.

        Of another history than `lineage`, which a rollback has left, the oldest goes first.
        """
        with self._lock:
            oldest = min(
                (b for b in self._buffers if b.block is not None and _fits(b.block, size_bytes)),
                key=lambda b: (
                    (b.label.lineage == lineage, b.label.step)
                    if b.label is not None
                    else (False, -1)
                ),
                default=None,
            )
            # The last whole one is only given up if no other memory is to be had.
            wanted = self._unfit(size_bytes) and self._more_possible(size_bytes)
            if wanted and not self._making:
                self._making = True
                self._executor.submit(self._grow, size_bytes)
            if oldest is None or (oldest.label is not None and self._making):
                return None
            oldest.label = None
            return oldest

    def _more_possible(self, size_bytes: int) -> bool:
        count = sum(b.block is not None and _fits(b.block, size_bytes) for b in self._buffers)
        budget = self._budget_bytes
        return budget is None or (count + 1) * size_bytes <= budget

    def _grow(self, size_bytes: int) -> None:
        """Make memory for all buffers, somewhat larger than needed now."""
        try:
            while self._unfit(size_bytes) and self._more_possible(size_bytes):
                block = self._blocks.make(size_bytes + size_bytes // 64 + (64 << 10))
                with self._lock:
                    # An empty one first: what is whole stays as long as possible.
                    taken = min(self._unfit(size_bytes), key=lambda b: b.label is not None)
                    old, taken.block, taken.label = taken.block, block, None
                if old is not None:
                    self._blocks.dispose(old)
        except ExhaustedError as error:
            count = BUFFERS - len(self._unfit(size_bytes))
            self._log("standing-exhausted", buffers=count, reason=str(error))
            # Never tried again: what there is has to do.
            self._budget_bytes = count * size_bytes
        finally:
            self._making = False

    def _unfit(self, size_bytes: int) -> list[_Buffer]:
        return [b for b in self._buffers if b.block is None or not _fits(b.block, size_bytes)]

    def _digest(self, buffer: _Buffer, label: StandingLabel) -> None:
        block = buffer.block
        if block is None or buffer.label is not label:
            return
        digest = digest_of(block.buffer[: label.size_bytes])
        with self._lock:
            if buffer.label is label:
                buffer.label = replace(label, digest=digest)

    def _missed(self, step: int, reason: str) -> None:
        self.missed_count += 1
        self._log("standing-missed", wanted_step=step, reason=reason)


def digest_of(*parts: memoryview) -> int:
    """The XXH3 of bytes, computed piece by piece; never 0."""
    summed = xxh3_64()
    for memory in parts:
        for begin in range(0, memory.nbytes, DIGEST_CHUNK_BYTES):
            summed.update(memory[begin : begin + DIGEST_CHUNK_BYTES])
    return summed.intdigest() or 1


def _fits(block: Block, size_bytes: int) -> bool:
    return block.size_bytes >= size_bytes
