"""What the control page holds besides words: the trainer's text, and its samples.

Samples are places in the arena, one aligned 8-byte word each, chosen once by the trainer.
Their digest costs microseconds and differs when all parameters change, as with averaged, merged
or perturbed weights. It proves nothing about a few elements.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

TEXT_WORD, TEXT_WORDS = 192, 128
TEXT_BYTES = 8 * (TEXT_WORDS - 1)
"""Most bytes of UTF-8 in the text."""

COUNT_WORD = 320
FIRST_SAMPLE_WORD = 321
MAX_SAMPLES = 128


class Page(Protocol):
    """The words of a control page, as a view of 64-bit integers."""

    @property
    def words(self) -> memoryview: ...


def write_text(page: Page, text: str) -> None:
    """Publish a text to the sidecar, cut to `TEXT_BYTES`; an empty one clears it.

    The length is 0 while the text changes, so a reader sees no text rather than a mixture.
    """
    words = page.words
    encoded = text.encode()[:TEXT_BYTES].decode(errors="ignore").encode()
    words[TEXT_WORD] = 0
    begin = 8 * (TEXT_WORD + 1)
    words.cast("B")[begin : begin + len(encoded)] = encoded
    words[TEXT_WORD] = len(encoded)


def read_text(page: Page) -> str:
    """The trainer's text; empty when there is none or it is being changed."""
    words = page.words
    size = words[TEXT_WORD]
    if not 0 < size <= TEXT_BYTES:
        return ""
    begin = 8 * (TEXT_WORD + 1)
    text = bytes(words.cast("B")[begin : begin + size])
    return text.decode(errors="replace") if words[TEXT_WORD] == size else ""


def write_samples(page: Page, indices: Sequence[int]) -> None:
    """Publish which words of the arena to sample; at most `MAX_SAMPLES`, once per epoch."""
    words = page.words
    for place, index in enumerate(indices, start=FIRST_SAMPLE_WORD):
        words[place] = index
    words[COUNT_WORD] = len(indices)


def sample_digest(page: Page, arena: memoryview) -> int:
    """The digest of the samples in `arena` as they are now.

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
    """The digest of gathered samples, in the order of their places."""
    return zlib.crc32(samples)
