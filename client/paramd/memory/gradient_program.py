"""One slot of the gradient memory: the wanted bytes, and the copied ones.

    room     shaped like the arena: the gradient of the piece at arena byte x lies at byte x
    program  written by the sidecar: spans of the arena whose gradients are wanted
    notes    written by the trainer: the update they are from, and facts that the bytes lack

The sidecar writes the program, then the slot's ARM word; the trainer reads them in the
pre-hook of that update, fills the room, writes the notes, then the slot's DONE word. ARM and DONE
hold the update in `in_time`'s order, since updates come again after a rollback.

A program's version is a number that never comes again within an incarnation: it is counted in
the control page (PROGRAMS), because this memory is given back while nobody reads gradients, and
reads as zeros then. Version 0 is no program. The notes repeat the version and the digest of the
spans that were served, which reveals a program changed a moment too late, and memory given back
while the trainer uses it. Room and tail must be reserved (descriptors.py) before the slot is armed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from xxhash import xxh3_64_intdigest

from paramd.layout.types import joined
from paramd.memory.control_page import Word, Words
from paramd.memory.descriptors import pages
from paramd.memory.handover import ROOM_EXTRA_BYTES, slot_bytes

ARM_WORDS = (Word.ARM_SLOT0, Word.ARM_SLOT1)
DONE_WORDS = (Word.SLOT_DONE0, Word.SLOT_DONE1)

MAX_SPANS = 16_384
"""Most spans in one program; a whole model is usually a single span."""

GROUP_AXES_BIT = 22
"""Lowest bit of the mesh axes in a Partial group's number; ranks take the bits below."""

_HEAD = 8
"""Words before the first span, and before the first note."""

_NOTES_BEGIN_BYTES = ROOM_EXTRA_BYTES // 2
MAX_NOTES = (ROOM_EXTRA_BYTES - _NOTES_BEGIN_BYTES) // 16 - _HEAD

# Words of the program's head.
_VERSION, _SPAN_COUNT = 0, 1
# Words of the notes' head; scale and clip factor are doubles.
_STEP, _SERVED_VERSION, _NOTE_COUNT, _SCALE, _CLIP, _ITERATION, _DIGEST = 0, 1, 2, 3, 4, 5, 6

Spans = Sequence[tuple[int, int]]
"""Half-open bytes of the arena; sorted, neither overlapping nor adjacent."""


class NoGradient(IntEnum):
    """Why a piece has no gradient; numbered as in paramd.v1.NoGradient."""

    NONE = 1
    OTHER_OPTIMIZER = 2
    PLACEMENT = 3
    UNSUPPORTED = 4
    FROZEN = 5
    CHANGED = 6


class NoFrame(IntEnum):
    """Why an update that was wanted has no gradient frame."""

    LATE = 0
    """Its slot was armed, or its program changed, after the update had begun."""
    SKIPPED = 1
    """A gradient scaler skipped it."""
    IN_BACKWARD = 2
    """The optimizer stepped within the backward, which frees gradients before others exist."""
    TOO_MANY = 3
    """More than `MAX_NOTES` pieces have something to be said of."""
    FAILED = 4
    """The trainer could not copy them; its log says why."""


def write_no_frame(page: Words, index: int, why: NoFrame) -> None:
    """Note why slot `index` gets no frame of an update; before its DONE word says so."""
    page[Word.SLOTS_EMPTY] = page[Word.SLOTS_EMPTY] & ~(0xFF << 8 * index) | why << 8 * index


def read_no_frame(page: Words, index: int) -> NoFrame:
    """Why slot `index` got no frame; valid once its DONE word says that there is none."""
    found = page[Word.SLOTS_EMPTY] >> 8 * index & 0xFF
    return NoFrame(found) if found in set(NoFrame) else NoFrame.LATE


@dataclass(frozen=True, slots=True)
class Note:
    """Facts about one piece that its bytes lack."""

    arena_begin: int
    none: int = 0
    """A `NoGradient`, or 0 when there is one."""
    partial_group: int = 0
    """Ranks of equal numbers must be summed: 1 + the first rank of them, and with it the mesh axes
    summed over, as bits from `GROUP_AXES_BIT` on; 0: no group."""


@dataclass(frozen=True, slots=True)
class Notes:
    """Notes on one captured frame on one rank."""

    step: int
    """Number of the update that consumes the gradients."""
    version: int
    """Version of the program served."""
    scale: float
    """Factor the gradients are still multiplied by."""
    clip_factor: float
    """Factor that clipping multiplied them by; 0 when unknown."""
    notes: tuple[Note, ...]
    iteration: int = -1
    """Backward passes before the update; equal on ranks in lock-step."""
    digest: int = 0
    """Digest of the spans served (`digest_of_spans`)."""
    history: int = 0
    """History of the update, as in `paramd.state.At`; not in memory, the DONE word has it."""


class Slot:
    """One of the slots in the whole gradient memory, as both processes see it."""

    def __init__(self, memory: memoryview, arena_bytes: int, index: int) -> None:
        self.arm_word, self.done_word = ARM_WORDS[index], DONE_WORDS[index]
        self.begin_bytes = index * slot_bytes(arena_bytes)
        """First byte of the room within the memory."""
        self.tail_begin_bytes = self.begin_bytes + pages(arena_bytes)
        self.end_bytes = self.begin_bytes + slot_bytes(arena_bytes)
        tail = memory[self.tail_begin_bytes : self.end_bytes]
        self._program = tail[:_NOTES_BEGIN_BYTES].cast("q")
        notes = tail[_NOTES_BEGIN_BYTES:]
        self._notes, self._doubles = notes.cast("q"), notes.cast("d")

    def write_program(self, spans: Spans, page: Words) -> int:
        """Write up to `MAX_SPANS` spans; return the version, which the control `page` counts."""
        words = self._program
        # 0: the one before is over, and this one is not whole yet.
        words[_VERSION] = 0
        version = page[Word.PROGRAMS] + 1
        # Before the program has it: a sidecar respawned in between must not use the number again.
        page[Word.PROGRAMS] = version
        words[_SPAN_COUNT] = len(spans)
        at = _HEAD
        for begin, end in spans:
            words[at], words[at + 1] = begin, end
            at += 2
        words[_VERSION] = version
        return version

    def version(self) -> int:
        """Version of the current program; 0 while there is none, or it is being written."""
        return self._program[_VERSION]

    def read_program(self) -> tuple[int, list[tuple[int, int]]] | None:
        """Version and spans; None while it is being written, or if it is not a program."""
        words = self._program
        version, count = words[_VERSION], words[_SPAN_COUNT]
        if version <= 0 or not 0 <= count <= MAX_SPANS:
            return None
        flat = words[_HEAD : _HEAD + 2 * count].tolist()
        if words[_VERSION] != version:
            return None
        return version, list(zip(flat[::2], flat[1::2], strict=True))

    def write_notes(self, found: Notes) -> None:
        """Write the notes. At most `MAX_NOTES`."""
        words, doubles = self._notes, self._doubles
        words[_STEP], words[_SERVED_VERSION] = found.step, found.version
        words[_NOTE_COUNT], words[_ITERATION] = len(found.notes), found.iteration
        doubles[_SCALE], doubles[_CLIP] = found.scale, found.clip_factor
        words[_DIGEST] = found.digest
        at = _HEAD
        for note in found.notes:
            words[at], words[at + 1] = note.arena_begin, note.none << 32 | note.partial_group
            at += 2

    def read_notes(self) -> Notes:
        """Read the trainer's notes; valid once the DONE word says so."""
        words, doubles = self._notes, self._doubles
        flat = words[_HEAD : _HEAD + 2 * min(max(words[_NOTE_COUNT], 0), MAX_NOTES)].tolist()
        return Notes(
            step=words[_STEP],
            version=words[_SERVED_VERSION],
            scale=doubles[_SCALE],
            clip_factor=doubles[_CLIP],
            iteration=words[_ITERATION],
            digest=words[_DIGEST],
            notes=tuple(
                Note(begin, packed >> 32, packed & 0xFFFF_FFFF)
                for begin, packed in zip(flat[::2], flat[1::2], strict=True)
            ),
        )

    def close(self) -> None:
        self._program.release()
        self._notes.release()
        self._doubles.release()


def digest_of_spans(spans: Spans) -> int:
    """XXH3 of spans, without its sign bit: compares requested and served spans."""
    flat = [edge for span in spans for edge in span]
    return xxh3_64_intdigest(struct.pack(f"={len(flat)}q", *flat)) >> 1


def united(spans: Spans) -> tuple[tuple[int, int], ...]:
    """The bytes of all spans, sorted, neither overlapping nor adjacent."""
    return tuple(joined(spans, 0))


def covers(spans: Spans, wanted: Spans) -> bool:
    """Whether every byte of `wanted` lies in `spans`; both as returned by `united`."""
    at = 0
    for begin, end in wanted:
        while at < len(spans) and spans[at][1] < end:
            at += 1
        if at == len(spans) or spans[at][0] > begin:
            return False
    return True
