"""What a respawned sidecar must know about edits: slots in the head of their memory.

A slot is 16 words. It is written while its first word, the phase, is 0; a change is written in
an order in which every single store leaves it true, the phase last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from paramd.errors import ExhaustedError
from paramd_service.sidecar.edits.memory import HEAD_BYTES

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
        self._write(number, slot)
        return number

    def change(self, number: int, slot: Slot) -> None:
        """Rewrite a slot; a crash in between leaves one that a successor can trust."""
        self._write(number, slot)

    def clear(self, number: int) -> None:
        """Free a slot."""
        self._words[number * _WORDS] = 0
        self._free.append(number)

    def close(self) -> None:
        self._words.release()

    def _write(self, number: int, slot: Slot) -> None:
        begin = number * _WORDS
        for at, name in enumerate(_NAMES[1:], begin + 1):
            self._words[at] = getattr(slot, name)
        self._words[begin] = slot.phase


def id_words(edit_id: str) -> dict[str, int]:
    """`id_high` and `id_low` of 32 hexadecimal digits."""
    raw = bytes.fromhex(edit_id)
    high, low = (int.from_bytes(half, "big", signed=True) for half in (raw[:8], raw[8:]))
    return {"id_high": high, "id_low": low}


def id_text(slot: Slot) -> str:
    """The inverse of `id_words`."""
    return b"".join(
        half.to_bytes(8, "big", signed=True) for half in (slot.id_high, slot.id_low)
    ).hex()


__all__ = ["SLOT_COUNT", "EditIndex", "Slot", "id_text", "id_words", "replace"]
