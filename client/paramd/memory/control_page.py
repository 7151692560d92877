"""The control page: words shared by a trainer and its sidecar.

One page of shared memory, aligned 8-byte words, **one writer per word**. A reader
never waits for a writer. Times are CLOCK_MONOTONIC nanoseconds, which both
processes of one host share.

The truth about a copy is `SEQ` alone: it is odd from the begin of an update to its
end, so bytes copied between two reads of the same even value belong to `STEP`. All
other words only make such copies likely (see gate.py).
"""

from __future__ import annotations

import mmap
from enum import IntEnum

PAGE_BYTES = 4096
MAGIC = 0x7061_7261_6D64_0001


class Word(IntEnum):
    """Index of each word; the comment says who writes it and what it holds."""

    MAGIC = 0  # sidecar: layout version of this page

    # Trainer's words.
    EPOCH = 8
    STEP = 9  # finished updates
    SEQ = 10  # odd inside an update
    ANNOUNCE = 11  # counts announced boundaries; each is followed by a wake
    AGREED = 12  # highest boundary request agreed by all trainers
    AGREED_STEP = 13  # step of that boundary
    BUFFERS_STEP = 14  # step at which buffers were last copied into the arena
    BOUNDARY_NS = 15  # time of the last boundary
    STEP_TIME_NS = 16  # smoothed time between boundaries
    STALL_COUNT = 17
    STALL_TOTAL_NS = 18
    STALL_MAX_NS = 19
    AGREEMENT_STATE = 20  # 1 works, 2 gave up
    TRAINER_PID = 21
    TRAINER_START = 22  # start time from /proc, so that a reused pid is told apart

    # Sidecar's words.
    SIDECAR_PID = 64
    WANT = 65  # counts requests for the next boundary of this rank alone
    READY = 66  # highest boundary request this rank is ready for
    BUFFERS_WANTED = 67  # highest boundary request that needs buffers
    SERVED = 68  # last ANNOUNCE handled
    COPY_BEGUN = 69  # counts copies begun
    COPY_ENDED = 70  # counts copies ended, whether good or given up


class ControlPage:
    """A view of the words in a mapped descriptor; neither side owns it alone."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self.words = memoryview(self._map).cast("q")

    def __getitem__(self, word: Word) -> int:
        return self.words[word]

    def __setitem__(self, word: Word, value: int) -> None:
        self.words[word] = value

    def close(self) -> None:
        """Unmaps the page. Words must not be used afterwards."""
        self.words.release()
        self._map.close()
