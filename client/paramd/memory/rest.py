"""What the control page holds beside words: the trainer's text, and its samples.

Samples are places of the arena, each one aligned word of eight bytes, chosen once by the
trainer. A digest of them costs microseconds and differs when all parameters were changed,
as averaged, merged or perturbed weights are. It proves nothing of a few elements.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

TEXT_WORD, TEXT_WORDS = 192, 128
TEXT_BYTES = 8 * (TEXT_WORDS - 1)
"""Bytes of UTF-8 that the text may have."""

COUNT_WORD = 320
FIRST_SAMPLE_WORD = 321
MAX_SAMPLES = 128


class Page(Protocol):
    """The words of a control page, as a view of 64-bit integers."""

    @property
    def words(self) -> memoryview: ...


def write_text(page: Page, text: str) -> None:
    """Says something to the sidecar, cut to `TEXT_BYTES`; the empty text says nothing.

    The length is 0 while the text changes, so a reader sees no text rather than two.
    """
    words = page.words
    encoded = text.encode()[:TEXT_BYTES].decode(errors="ignore").encode()
    words[TEXT_WORD] = 0
    begin = 8 * (TEXT_WORD + 1)
    words.cast("B")[begin : begin + len(encoded)] = encoded
    words[TEXT_WORD] = len(encoded)


def read_text(page: Page) -> str:
    """What the trainer says; empty when it says nothing, or changes it at this moment."""
    words = page.words
    size = words[TEXT_WORD]
    if not 0 < size <= TEXT_BYTES:
        return ""
    begin = 8 * (TEXT_WORD + 1)
    text = bytes(words.cast("B")[begin : begin + size])
    return text.decode(errors="replace") if words[TEXT_WORD] == size else ""


def write_samples(page: Page, indices: Sequence[int]) -> None:
    """Chooses the words of the arena to sample; at most `MAX_SAMPLES`, once an epoch."""
    words = page.words
    for place, index in enumerate(indices, start=FIRST_SAMPLE_WORD):
        words[place] = index
    words[COUNT_WORD] = len(indices)


def sample_digest(page: Page, arena: memoryview) -> int:
    """The digest of the samples as they lie in `arena` now.

    Args:
        arena: bytes of the whole arena.
    """
    words = page.words
    count = min(max(words[COUNT_WORD], 0), MAX_SAMPLES)
    found = b"".join(
        arena[8 * index : 8 * index + 8]
        for index in words[FIRST_SAMPLE_WORD : FIRST_SAMPLE_WORD + count]
    )
    return digest_of(found)


def digest_of(samples: bytes) -> int:
    """The digest of samples that were gathered, in the order of their places."""
    return zlib.crc32(samples)
