"""Standing snapshots: recent states of everything, kept for a restarted trainer.

The trainer requests one at a boundary (words STANDING and STANDING_STEP), which it announces, so
the bytes are copied while the next forward and backward run: arena, optimizer memory and
continuation record. SEQ proves each copy; one that the next update overtakes is dropped. There
are two buffers. The one with the newest snapshot that all ranks have (word STANDING_COMMON) is not
written while the other can be, so that one remains at any moment, whichever copies fail on
whichever ranks. With memory for only one, a trainer that dies while it is written leaves none.

How many there may be changes with the memory of the host (`allowed`): when it becomes short, one
is given up, then the other (`shrink`), and both come back when there is enough again.

`serve` runs on the copying thread; a separate thread allocates memory and computes digests. A lock
guards the labels of the buffers.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from paramd.errors import ExhaustedError
from paramd.memory.continuation import digest_of, digests_of, read_pair
from paramd.memory.control_page import Word, in_time
from paramd.memory.descriptors import SparseMemory
from paramd.memory.device_arena import STATE_BASE
from paramd.memory.device_driver import DeviceError
from paramd.memory.gate import CopyEnd, CopySpan, copy_at_one_step
from paramd_service.sidecar.kept_states import StandingLabel
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.owner import AttachedMemory
from paramd_service.sidecar.snapshots.store import Block, BlockMaker

BUFFERS = 2

SMALL_BYTES = 8 << 20
"""The copying thread allocates memory for states up to this size at once, in milliseconds. Larger
memory is allocated on another thread, and the snapshots requested meanwhile are missed."""

RETRY_S = 30.0
"""Seconds until memory for standing snapshots is asked for again after a refusal."""

MOST_HISTORIES = 16

_MEANING = (
    "no standing snapshots: a trainer that dies inside an update starts afresh",
    "one standing snapshot: a trainer that dies while it is written has none to go back to",
)


@dataclass(eq=False, slots=True)
class _Buffer:
    block: Block | None = None
    label: StandingLabel | None = None
    made: int = -1
    """Time of its state, in `in_time`'s order; -1: there is none."""
    held: bool = False
    """Whether this process is reading it: its memory must not change."""
    writing: bool = False
    """Whether the copying thread writes to it: its memory must stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """The state that a standing snapshot is made of."""

    label: StandingLabel
    made: int
    """Its time, in `in_time`'s order."""
    seq: int
    """SEQ that proves it."""
    rest: bytes
    """Record and table, which follow arena and optimizer memory."""


class Standing:
    """One rank's standing snapshots. They outlive an attachment."""

    def __init__(
        self,
        blocks: BlockMaker,
        log: Log,
        *,
        budget_bytes: int | None,
        allowed: Callable[[int, int], int] = lambda _size, _held: BUFFERS,
        at_point: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`budget_bytes`: most bytes of all buffers; None: as many as `allowed` says, which gets
        the size of one and what all take now. `at_point` is called at the point "standing-copied"
        (fault injection)."""
        self._allowed = allowed
        self._blocks = blocks
        self._at_point = at_point
        # A separate thread: a digest takes long, and callers wait for the sidecar's others.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="paramd-standing")
        self._log = log
        self._budget_bytes = budget_bytes
        self._buffers = [_Buffer() for _ in range(BUFFERS)]
        self._lock = threading.RLock()
        self._making = False
        self._retry_ns = 0
        """When memory may be asked for again after a refusal (monotonic clock)."""
        self._told_count = BUFFERS
        """How many the log says there may be."""
        self._ended: tuple[AttachedMemory, Future[list[int]]] | None = None
        self._kept_step = 0
        self.on_digested: Callable[[], None] | None = None
        """Called on a thread when a snapshot is whole and has its digest."""
        self.wanted_bytes = 0
        """Memory of all buffers, once it is allocated."""
        self.reached = 0
        """Highest step that was made in these histories, if no trainer has attached since then and
        reported the steps to repeat; else 0."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the buffers take."""
        with self._lock:
            return sum(b.block.size_bytes for b in self._buffers if b.block is not None)

    def steady(self) -> AbstractContextManager[object]:
        """Within the block no buffer's memory is freed, so a descriptor can be duplicated."""
        return self._lock

    def labels(self) -> list[tuple[StandingLabel, Block]]:
        """The whole snapshots and their memory, newest first."""
        with self._lock:
            newest_first = sorted(self._buffers, key=lambda one: one.made, reverse=True)
            return [(b.label, b.block) for b in newest_first if b.label and b.block]

    def hold(self) -> tuple[StandingLabel, Block] | None:
        """The newest whole snapshot that has its digest; it does not change until `release`."""
        with self._lock:
            whole = [b for b in self._buffers if b.block and b.label and b.label.digest]
            newest = max(whole, key=lambda b: b.made, default=None)
            if newest is None or newest.label is None or newest.block is None:
                return None
            newest.held = True
            return newest.label, newest.block

    def release(self) -> None:
        """Release the snapshot that is held. Idempotent."""
        with self._lock:
            for buffer in self._buffers:
                buffer.held = False

    def shrink(self, count: int, attached: AttachedMemory | None, *, reason: str = "") -> None:
        """Keep the memory of at most `count` buffers, soon and on another thread: of the newest
        snapshot that all ranks have, if there is one. What is being sent or written stays. The log
        says that there are fewer now, with the reason."""
        if count < self._told_count:
            self._tell(count, reason)
        with self._lock:
            there = sum(b.block is not None for b in self._buffers)
        if there > count:
            common = attached.page[Word.STANDING_COMMON] if attached is not None else 0
            # On the thread of the digests, which read the memory.
            self._executor.submit(self._shrink, count, common)

    def _shrink(self, count: int, common: int) -> None:
        given = []
        with self._lock:
            while sum(b.block is not None for b in self._buffers) > count:
                there = [b for b in self._buffers if b.block is not None]
                made = [b.made if b.label is not None else -1 for b in there]
                least = there[expendable(made, common)]
                free = [b for b in there if not (b.held or b.writing)]
                if not free:
                    break
                chosen = least if least in free else free[0]
                assert chosen.block is not None
                given.append(chosen.block)
                chosen.block = chosen.label = None
        for block in given:
            self._blocks.dispose(block)

    def settle(self, attached: AttachedMemory, step: int) -> None:
        """Tell the trainer that this step's copy was sent, or will not be."""
        with self._lock:
            settled = attached.page[Word.COPY_SETTLED]
            attached.page[Word.COPY_SETTLED] = max(settled, step)

    def rebase(self, lineage: int, new_lineage: int, step: int, *, reached: int) -> None:
        """Keep the snapshots that `new_lineage` continues: those of `lineage` up to `step`, no
        others. `reached` is the step of the previous trainer."""
        self.reached = max(self.reached, reached) if lineage else 0
        with self._lock:
            for buffer in self._buffers:
                label = buffer.label
                if label is not None:
                    buffer.label = rebased(label, lineage, new_lineage, step)
                    # A new page counts rollbacks from 0.
                    buffer.made = label.step

    def trainer_ended(self, attached: AttachedMemory) -> None:
        """Begin to digest the memory that a trainer left, so that a restarted trainer finds damage.
        Not on a device, where this would take as long as the restart.
        """
        if attached.device is not None:
            return
        parts = (
            attached.host_bytes,
            SparseMemory(attached.shared.optimizer).buffer[: attached.page[Word.OPTIMIZER_BYTES]],
        )
        self._ended = attached, self._executor.submit(digests_of, parts)

    def left_digests(self, attached: AttachedMemory) -> list[int]:
        """Digests of this trainer's memory: arena, then state; none while they are unknown."""
        ended = self._ended
        known = ended is not None and ended[0] is attached and ended[1].done()
        return ended[1].result() if ended is not None and known else []

    def digested(self) -> Future[None]:
        """Done when all digests requested so far are known."""
        return self._executor.submit(lambda: None)

    def serving(
        self, attached: AttachedMemory, layout_digest: Callable[[], str]
    ) -> Callable[[], None]:
        """The function that the copying thread calls at each wake, while `attached` lives."""
        memory = SparseMemory(attached.shared.optimizer)
        continuation = SparseMemory(attached.shared.continuation)
        seen = attached.page[Word.STANDING]
        # An earlier sidecar's unfinished snapshot will not be sent.
        self.settle(attached, attached.page[Word.STANDING_STEP])

        def serve() -> None:
            nonlocal seen
            asked = attached.page[Word.STANDING]
            if asked != seen:
                seen = asked
                made_step = attached.page[Word.STANDING_STEP]
                if not self._make(attached, memory, continuation, layout_digest()):
                    self.settle(attached, made_step)

        return serve

    def close(self) -> None:
        """Free all memory."""
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
    ) -> bool:
        """Make the standing snapshot that the trainer requests; return whether it was made."""
        page = attached.page
        step, seq = page[Word.STANDING_STEP], page[Word.SEQ]
        kept = read_pair(continuation.buffer)
        if seq & 1 or page[Word.STEP] != step or kept is None:
            return self._missed(step, "training was past its boundary")
        record, table = kept
        label = label_of(attached, step, record, table, layout_digest)
        # What all ranks have elsewhere stays until they have a newer one (docs/resume.md).
        self._kept_step = page[Word.COPIES_STEP] or self._kept_step
        made = in_time(step, rewound=page[Word.REWOUND])
        buffer = self._room(label.size_bytes, page[Word.STANDING_COMMON])
        if buffer is None or buffer.block is None:
            return self._missed(step, self._why_no_room())
        spans = spans_of(attached, optimizer, label, buffer.block.address)
        wanted = _Wanted(label=label, made=made, seq=seq, rest=record + table)
        try:
            failure = self._fill(buffer, buffer.block, wanted, attached, spans)
        except DeviceError as error:
            failure = str(error)
        finally:
            with self._lock:
                buffer.writing = False
        if failure:
            return self._missed(step, failure)
        page[Word.STANDING_MADE] = made
        self._executor.submit(self._digest, buffer, label)
        return True

    def _fill(
        self,
        buffer: _Buffer,
        block: Block,
        wanted: _Wanted,
        attached: AttachedMemory,
        spans: Sequence[CopySpan],
    ) -> str:
        """Copy the state into a buffer; return why it could not be copied, empty if it was. Raises
        DeviceError."""
        begin_ns = time.monotonic_ns()
        end, state = copy_at_one_step(attached.page, spans, move=attached.move)
        attached.page[Word.STANDING_NS] = time.monotonic_ns() - begin_ns
        if end is not CopyEnd.DONE or state.proof != wanted.seq:
            return "the next update began before it was copied"
        rest_address = block.address + wanted.label.size_bytes - len(wanted.rest)
        ctypes.memmove(rest_address, wanted.rest, len(wanted.rest))
        self._at_point("standing-copied")
        with self._lock:
            buffer.label, buffer.made = wanted.label, wanted.made
        return ""

    def _why_no_room(self) -> str:
        """Why there is no buffer to write to."""
        if any(buffer.held for buffer in self._buffers):
            return "the one before is still sent to another host"
        if self._making:
            return "its memory is being made"
        return "there is no memory for it; it is tried again"

    def _room(self, size_bytes: int, common: int) -> _Buffer | None:
        """The buffer to write next, emptied; None until its memory is allocated."""
        self.wanted_bytes = max(self.wanted_bytes, BUFFERS * size_bytes)
        if size_bytes <= SMALL_BYTES and not self._making and self._wants_more(size_bytes):
            self._making = True
            self._grow(size_bytes)
        with self._lock:
            chosen = self._expendable(size_bytes, common)
            # The last whole snapshot is only given up if no other memory is available.
            if not self._making and self._wants_more(size_bytes):
                self._making = True
                self._executor.submit(self._grow, size_bytes)
            if chosen is None or (chosen.label is not None and self._making):
                return None
            chosen.label, chosen.writing = None, True
            return chosen

    def _wants_more(self, size_bytes: int) -> bool:
        calm = time.monotonic_ns() >= self._retry_ns
        return calm and bool(self._unfit(size_bytes)) and self._more_possible(size_bytes)

    def _expendable(self, size_bytes: int, common: int) -> _Buffer | None:
        """The buffer to write next, of those with memory for it; the lock is held."""
        there = [b for b in self._buffers if b.block is not None and _fits(b.block, size_bytes)]
        elsewhere = self._kept_step
        kept = [b for b in there if elsewhere and b.label and b.label.step == elsewhere]
        free = [b for b in there if not b.held and (b not in kept or len(there) == 1)]
        if not free:
            return None
        return free[expendable([b.made if b.label is not None else -1 for b in free], common)]

    def _more_possible(self, size_bytes: int) -> bool:
        count = BUFFERS - len(self._unfit(size_bytes))
        budget = self._budget_bytes
        if budget is not None and (count + 1) * size_bytes > budget:
            return False
        # Somewhat larger, as `_grow` makes them.
        return count < self._allowed(_with_spare(size_bytes), self.held_bytes)

    def _grow(self, size_bytes: int) -> None:
        """Allocate memory for all buffers, somewhat larger than needed now."""
        try:
            while self._unfit(size_bytes) and self._more_possible(size_bytes):
                block = self._blocks.make(_with_spare(size_bytes))
                with self._lock:
                    # An empty one first, so that whole ones stay as long as possible.
                    free = [b for b in self._unfit(size_bytes) if not b.held]
                    taken = min(free, key=lambda b: b.label is not None, default=None)
                    if taken is not None:
                        old, taken.block, taken.label = taken.block, block, None
                if taken is None:
                    # All are being sent: the next snapshot tries again.
                    self._blocks.dispose(block)
                    return
                if old is not None:
                    self._blocks.dispose(old)
            if BUFFERS - len(self._unfit(size_bytes)) > self._told_count:
                self._tell(BUFFERS - len(self._unfit(size_bytes)), "")
        except ExhaustedError as error:
            self._tell(BUFFERS - len(self._unfit(size_bytes)), str(error))
            # The present buffers must do until then.
            self._retry_ns = time.monotonic_ns() + int(RETRY_S * 1e9)
        finally:
            self._making = False

    def _tell(self, count: int, reason: str) -> None:
        more, self._told_count = count > self._told_count, count
        if more:
            self._log("standing-again", buffers=count)
        else:
            meaning = _MEANING[min(count, len(_MEANING) - 1)]
            self._log("standing-exhausted", buffers=count, meaning=meaning, reason=reason)

    def _unfit(self, size_bytes: int) -> list[_Buffer]:
        return [b for b in self._buffers if b.block is None or not _fits(b.block, size_bytes)]

    def _digest(self, buffer: _Buffer, label: StandingLabel) -> None:
        block = buffer.block
        if block is None or buffer.label is not label:
            return
        digest = digest_of(block.buffer[: label.size_bytes])
        with self._lock:
            if buffer.label is not label:
                return
            buffer.label = replace(label, digest=digest)
        if self.on_digested is not None:
            self.on_digested()

    def _missed(self, step: int, reason: str) -> bool:
        self._log("standing-missed", wanted_step=step, reason=reason)
        return False


def label_of(
    attached: AttachedMemory, step: int, record: bytes, table: bytes, layout_digest: str
) -> StandingLabel:
    """Label of the present state, by the page; the caller proves with SEQ that it stayed so."""
    page = attached.page
    return StandingLabel(
        lineage=page[Word.LINEAGE],
        step=step,
        edits=page[Word.EDITS] + page[Word.EDITS_BEFORE],
        arena_bytes=attached.request.arena_bytes,
        optimizer_bytes=page[Word.OPTIMIZER_BYTES] + page[Word.STATE_BYTES],
        record_bytes=len(record),
        table_bytes=len(table),
        world_size=attached.request.world_size,
        layout_digest=layout_digest,
        device_bytes=page[Word.STATE_BYTES],
        incarnation=page[Word.INCARNATION],
        history=page[Word.REWOUND],
        edits_here=page[Word.EDITS],
    )


def spans_of(
    attached: AttachedMemory, optimizer: SparseMemory, label: StandingLabel, target: int
) -> list[CopySpan]:
    """The spans of the present state's bytes, to be copied to `target` one after the other."""
    on_host = label.optimizer_bytes - label.device_bytes
    sources = [
        (attached.arena.address, label.arena_bytes),
        (optimizer.address, on_host),
        (STATE_BASE, label.device_bytes),
    ]
    spans = []
    for source, size_bytes in sources:
        if size_bytes:
            spans.append(CopySpan(source, target, size_bytes))
        target += size_bytes
    return spans


def rebased(
    label: StandingLabel, lineage: int, new_lineage: int, step: int
) -> StandingLabel | None:
    """A snapshot in `new_lineage`, which continues `lineage` at `step`; None: not part of it."""
    histories = (label.lineage, *label.before)
    if lineage not in histories or label.step > step:
        return None
    if new_lineage == label.lineage:
        return label
    return replace(label, lineage=new_lineage, before=histories[: MOST_HISTORIES - 1])


def expendable(made: Sequence[int], common: int) -> int:
    """Which of the snapshots to overwrite: not the newest that all ranks have, if there is another.
    `made`: their times, in `in_time`'s order, -1 for an empty one; every rank has made one of the
    time `common` or later."""
    order = sorted(range(len(made)), key=lambda at: made[at])
    # If the newest is later than `common`, the older one may be all that the ranks share.
    needed = made[order[0]] >= 0 and made[order[-1]] > common
    return order[-1] if needed else order[0]


def _with_spare(size_bytes: int) -> int:
    """Size of a buffer for such a state: the record's size changes from step to step."""
    return size_bytes + size_bytes // 64 + (64 << 10)


def _fits(block: Block, size_bytes: int) -> bool:
    return block.size_bytes >= size_bytes
