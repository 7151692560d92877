"""Marks: complete states of this rank that its user keeps by name, to return to.

A mark is a state like a standing snapshot (arena, optimizer memory, record and table, one after the
other), made on request while training is held, and kept until it is dropped or this sidecar ends;
like standing snapshots, marks outlive a trainer. Memory is allocated first, so that training is
held only for the copy. Everything that copies or computes runs on a thread; a lock guards the
names.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from paramd.errors import ConflictError, ExhaustedError, ExistsError, NotFoundError, UsageError
from paramd.memory.continuation import digest_of, read_pair
from paramd.memory.control_page import Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.gate import LateError
from paramd_service.resume.standing import Standing, label_of, spans_of
from paramd_service.sidecar.kept_states import Found, StandingLabel
from paramd_service.sidecar.owner import AttachedMemory, check_keeps_states
from paramd_service.sidecar.snapshots.store import Block, BlockMaker

MAX_MARKS = 64
MAX_NAME = 64
SPARE_BYTES = 1 << 20
"""Room beyond the present size: the record may grow until training is held."""


@dataclass(eq=False, slots=True)
class Mark:
    """A mark; without a label only its memory has been allocated."""

    name: str
    by: str
    block: Block
    label: StandingLabel | None = None
    made_s: float = 0.0


class Marks:
    """One rank's marks. Thread-safe."""

    def __init__(self, blocks: BlockMaker, standing: Standing, *, budget_bytes: int | None) -> None:
        """`budget_bytes`: most bytes of all marks; None: all memory of the machine."""
        self._blocks = blocks
        self._standing = standing
        self._budget_bytes = budget_bytes
        self._marks: dict[str, Mark] = {}
        self._ended: dict[str, str] = {}
        """Why marks that were not dropped are no more, by name."""
        self._lock = threading.Lock()

    def all(self) -> list[Mark]:
        """Marks, oldest first."""
        with self._lock:
            return list(self._marks.values())

    def reserve(self, name: str, by: str, attached: AttachedMemory) -> Mark:
        """Allocate memory for a mark. Slow.

        Raises:
            UsageError: No name.
            ExistsError: It is taken.
            ConflictError: Training keeps no states.
            ExhaustedError: Over the budget, or the machine does not have the memory.
        """
        check_name(name)
        check_keeps_states(attached.page)
        size = state_bytes(attached) + SPARE_BYTES
        self._check_room(name, size)
        block = self._blocks.make(size)
        with self._lock:
            if name in self._marks:
                self._blocks.dispose(block)
                raise ExistsError(_taken(name))
            mark = self._marks[name] = Mark(name, by, block)
            self._ended.pop(name, None)
        return mark

    def fill(self, name: str, attached: AttachedMemory, layout_digest: str) -> Mark:
        """Copy the state at which training is held. Slow.

        Raises:
            NotFoundError: `reserve` comes first.
            ExistsError: It is filled.
            ConflictError: Training is not held, or its record is not of this step.
        """
        with self._lock:
            mark = self._marks.get(name)
        if mark is None:
            raise NotFoundError(f"mark {name!r}: no memory was made for it")
        if mark.label is not None:
            raise ExistsError(_taken(name))
        label = copied(attached, mark.block, layout_digest)
        digest = digest_of(mark.block.buffer[: label.size_bytes])
        with self._lock:
            if self._marks.get(name) is not mark:
                raise NotFoundError(f"mark {name!r} was dropped while it was made")
            mark.label, mark.made_s = replace(label, digest=digest), time.time()
        return mark

    def drop(self, name: str) -> bool:
        """Delete a mark; False if there is none."""
        with self._lock:
            mark = self._marks.pop(name, None)
        if mark is not None:
            self._blocks.dispose(mark.block)
        return mark is not None

    def end(self, why: str) -> None:
        """Delete all marks; who asks for one is told why."""
        for mark in self.all():
            if self.drop(mark.name):
                with self._lock:
                    self._ended[mark.name] = why
                    while len(self._ended) > MAX_MARKS:
                        del self._ended[next(iter(self._ended))]

    @contextmanager
    def found(self, name: str, step: int, lineage: int, edits: int) -> Iterator[Found]:
        """A mark, or with an empty name a standing snapshot, that has these numbers.

        Raises:
            NotFoundError: When there is none.
        """
        wanted = (step, lineage, edits)
        with self._lock:
            mark = self._marks.get(name)
            candidates = [(mark.label, mark.block)] if mark is not None and mark.label else []
            with self._standing.steady():
                if not name:
                    candidates = list(self._standing.labels())
                for label, block in candidates:
                    if (label.step, label.lineage, label.edits) == wanted and label.digest:
                        # A new descriptor: the block may be dropped meanwhile.
                        descriptor = os.dup(block.descriptor)
                        break
                else:
                    if name in self._ended:
                        raise NotFoundError(f"mark {name!r}: {self._ended[name]}")
                    what = f"mark {name!r}" if name else f"standing snapshot of step {step}"
                    raise NotFoundError(
                        f"this rank has no {what} as it was listed; list them again"
                    )
        try:
            with (
                mmap.mmap(descriptor, label.size_bytes, prot=mmap.PROT_READ) as mapped,
                memoryview(mapped) as buffer,
            ):
                yield Found(label, buffer, descriptor)
        finally:
            os.close(descriptor)

    def read(
        self, name: str, layout_digest: str, spans: Sequence[tuple[int, int]], into: memoryview
    ) -> StandingLabel:
        """Copy half-open spans of a mark's arena to `into`, one after the other. Slow.

        A name of digits, which no mark has, is the standing snapshot of that step.

        Raises:
            ConflictError: There is no such mark, or it is of another layout.
            DataLossError: It is damaged.
        """
        with self._lock:
            mark = self._marks.get(name)
        label, name = mark.label if mark is not None else None, name[:MAX_NAME]
        if name.isdecimal():
            # Newest first: of a step that came again after a rollback, the one that counts.
            of_step = (one for one, _ in self._standing.labels() if one.step == int(name))
            label = next(of_step, None)
        if label is None and (why := self._ended.get(name)):
            raise ConflictError(f"mark {name!r}: {why}")
        if label is None:
            # Not NOT_FOUND, which clients take for a lease that has ended, and try again.
            raise ConflictError(
                f"restore point {name!r}: this rank keeps none of that name, or no longer; "
                "paramd marks lists them"
            )
        if label.layout_digest != layout_digest:
            raise ConflictError(
                f"mark {name!r} was made on another layout: the model, its sharding or the number "
                "of ranks has changed since"
            )
        kept = "" if mark is None else name
        with self.found(kept, label.step, label.lineage, label.edits) as found:
            filled = 0
            for begin, end in spans:
                found.read_into(into[filled : filled + end - begin], begin)
                filled += end - begin
            # After the copy: the next standing snapshot may have taken the place meanwhile.
            found.check()
        return label

    def close(self) -> None:
        """Free all memory."""
        for mark in self.all():
            self.drop(mark.name)

    def _check_room(self, name: str, size_bytes: int) -> None:
        marks = self.all()
        if any(mark.name == name for mark in marks):
            raise ExistsError(_taken(name))
        if len(marks) >= MAX_MARKS:
            raise ExhaustedError(
                f"{MAX_MARKS} restore points are kept; delete some (paramd unmark)"
            )
        used = sum(mark.block.size_bytes for mark in marks)
        if self._budget_bytes is not None and used + size_bytes > self._budget_bytes:
            raise ExhaustedError(
                f"a restore point of this rank takes {size_bytes:,} bytes and the others take "
                f"{used:,}; all together may take {self._budget_bytes:,} "
                "(PARAMD_MARKS_BUDGET_BYTES). Delete some first (paramd unmark)"
            )


def check_name(name: str) -> None:
    """Raise UsageError unless `name` can be a mark's."""
    bad = not 0 < len(name) <= MAX_NAME or not name.isprintable() or "/" in name
    if bad or name.startswith(".") or name != name.strip() or name.isdigit():
        raise UsageError(
            f"mark: {name[:MAX_NAME]!r}; expected 1 to {MAX_NAME} printable characters, not "
            "only digits, without '/' and without a dot or a space at the beginning"
        )


def state_bytes(attached: AttachedMemory) -> int:
    """Size of the present state of everything, with the record of the last boundary."""
    page = attached.page
    state = attached.request.arena_bytes + page[Word.OPTIMIZER_BYTES] + page[Word.STATE_BYTES]
    return state + beside_bytes(attached)


def beside_bytes(attached: AttachedMemory) -> int:
    """Size of the newest record and its table."""
    kept = kept_pair(attached)
    return len(kept[0]) + len(kept[1]) if kept is not None else 0


def kept_pair(attached: AttachedMemory) -> tuple[bytes, bytes] | None:
    """The newest record and its table."""
    with closing(SparseMemory(attached.shared.continuation)) as continuation:
        return read_pair(continuation.buffer)


def copied(attached: AttachedMemory, block: Block, layout_digest: str) -> StandingLabel:
    """Copy the state at which training is held. Raises ConflictError, ExhaustedError."""
    page = attached.page
    seq, step = page[Word.SEQ], page[Word.STEP]
    if not page[Word.HELD] or seq & 1:
        raise ConflictError("training is not paused at a boundary")
    kept = kept_pair(attached)
    if kept is None or page[Word.RECORD_STEP] != step:
        raise ConflictError(
            f"what belongs to step {step} was not kept (PARAMD_KEEP_EVERY, or "
            "attachment.end_iteration() is missing); let training pass a step and try again"
        )
    record, table = kept
    label = label_of(attached, step, record, table, layout_digest)
    if label.size_bytes > block.size_bytes:
        raise ExhaustedError("the state has grown since memory was made for it; try again")
    with closing(SparseMemory(attached.shared.optimizer)) as optimizer:
        try:
            attached.copy(spans_of(attached, optimizer, label, block.address))
        except LateError:
            raise ConflictError("the device has not finished the last update; try again") from None
    rest = record + table
    ctypes.memmove(block.address + label.size_bytes - len(rest), rest, len(rest))
    # SEQ is odd whenever anything of this changes, and never takes an even value twice.
    if page[Word.SEQ] != seq:
        raise ConflictError("training continued while the restore point was made; try again")
    return label


def _taken(name: str) -> str:
    return (
        f"restore point {name!r} exists already; choose another name, or delete it (paramd unmark)"
    )
