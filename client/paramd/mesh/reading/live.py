"""Reads parameters straight from the arenas of this host: one copy, no snapshot.

Each sidecar passes read-only descriptors of its rank's arena and control page. The copy counts
only if every rank's page showed the same settled state before its first and after its last byte:
SEQ even and unchanged proves one rank's bytes (memory/gate.py), equal STEP, EDITS and ITERATION
make them one state of the job. Nothing is written to the page, so no update ever waits for such a
reader; a copy that an update overtakes is repeated after a boundary, then left to snapshots.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate

from paramd.errors import UnreachableError
from paramd.memory.arena import is_mirror
from paramd.memory.control_page import PAGE_BYTES, Word, is_stray, sample_digest
from paramd.memory.gate import State, is_changed, state_of, worth_starting
from paramd.state import StateName

CHUNK_BYTES = 4 << 20
"""Bytes copied between checks of SEQ, so that an overtaken copy ends early."""

ATTEMPTS = 3
"""Overtaken copies after which the read is left to snapshots, for which updates wait a little."""

MOMENT_S = 0.25
"""How long, in seconds, to wait for all ranks to show one state with time for the copy."""

REST_NS = 20_000_000
"""After this long at rest, in nanoseconds, a rank is assumed to wait for data or to evaluate:
snapshots can be made of a resting state, live reads cannot."""

_LOOK_S = 100e-6
_BYTES_PER_S = 4e9


class OvertakenError(Exception):
    """An update began before the copy ended."""


class LivePage:
    """A rank's control page, mapped read-only."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, PAGE_BYTES, prot=mmap.PROT_READ)
        self.words = memoryview(self._map).cast("q")

    def __getitem__(self, word: Word) -> int:
        return self.words[word]

    def settled(self) -> State | None:
        """The current state, if bytes of it can be had now."""
        seq = self[Word.SEQ]
        state = state_of(self)
        # The words of a state belong together only between two reads of one even SEQ.
        usable = seq == state.proof and not seq & 1 and self.holds(state)
        return state if usable and not self[Word.UNSERVED] and not is_mirror(self.words) else None

    def holds(self, state: State) -> bool:
        """Whether no update began since `state`, and no stray change was found in it."""
        # 0: nothing has settled yet, so SETTLED_SEQ, which is 0 then, vouches for nothing.
        return self[Word.SEQ] == state.proof > 0 and not is_stray(self.words, state.proof)

    def close(self) -> None:
        self.words.release()
        self._map.close()


class LiveRank:
    """Spans of one rank's arena, by offsets of their concatenation. Owns both descriptors."""

    def __init__(
        self, rank: int, page: int, arena: int, arena_bytes: int, spans: Sequence[tuple[int, int]]
    ) -> None:
        """Raises UnreachableError: the memory is shorter than the sidecar said."""
        with ExitStack() as stack:
            stack.callback(os.close, arena)
            stack.callback(os.close, page)
            if os.fstat(page).st_size < PAGE_BYTES or os.fstat(arena).st_size < arena_bytes:
                raise UnreachableError(f"rank {rank}: its memory is shorter than its sidecar says")
            self.page = LivePage(page)
            stack.callback(self.page.close)
            self._map = mmap.mmap(arena, arena_bytes, prot=mmap.PROT_READ)
            stack.pop_all()
        os.close(page)
        self.rank = rank
        self.size_bytes = sum(end - begin for begin, end in spans)
        self.state = State(-1, -1)
        """Set by `agree`; every read checks it."""
        self._arena = arena
        self._memory = memoryview(self._map)
        self._begins = [begin for begin, _ in spans]
        self._ends = list(accumulate(end - begin for begin, end in spans))

    def read_into(self, address: int, offset_bytes: int, size_bytes: int) -> None:
        """Copy bytes to `address`, thread-safe, without the GIL. OvertakenError: outdated state."""
        target = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
        done = 0
        while done < size_bytes:
            if not self.page.holds(self.state):
                raise OvertakenError
            at = offset_bytes + done
            span = bisect_right(self._ends, at)
            left = min(self._ends[span] - at, size_bytes - done, CHUNK_BYTES)
            before = self._ends[span - 1] if span else 0
            # pread is as fast as memcpy; reading the mapping would fault its pages in.
            moved = os.preadv(
                self._arena, [target[done : done + left]], self._begins[span] + at - before
            )
            if moved == 0:
                raise UnreachableError(f"rank {self.rank}: its memory has become shorter")
            done += moved

    def bytes_of(self, named: StateName, spans: Sequence[tuple[int, int]]) -> bytes | None:
        """The bytes of some spans of its arena, if they are of that state still."""
        state = self.settled()
        if state is None or named != StateName(
            self.page[Word.INCARNATION], state.history, state.step, state.edits
        ):
            return None
        found = b"".join(os.pread(self._arena, end - begin, begin) for begin, end in spans)
        return found if self.holds(state) else None

    def settled(self) -> State | None:
        """The current state, if bytes of it can be had now, by its samples too."""
        state = self.page.settled()
        return state if state is not None and self.holds(state) else None

    def holds(self, state: State) -> bool:
        """Whether the arena still holds `state`, as far as the page and the samples show."""
        # While training is paused its thread waits, so nothing changes before the digest is
        # published.
        told = self.page[Word.SETTLED_SEQ] == state.proof or self.page[Word.HELD] == 1
        if not told or not self.page.holds(state):
            return False
        changed = is_changed(self.page, state, sample_digest(self.page, self._memory))
        return not changed and self.page.holds(state)

    def close(self) -> None:
        self.page.close()
        self._memory.release()
        self._map.close()
        os.close(self._arena)


def read_live(
    ranks: Mapping[int, LiveRank], incarnation: int, copy: Callable[[], None]
) -> StateName | None:
    """Run `copy`, which reads from `ranks`, until it was of one state. Blocks.

    Returns None if no attempt succeeded: the copied bytes are then undefined.
    """
    deadline_s = time.monotonic() + MOMENT_S
    for _ in range(ATTEMPTS):
        state = agree(ranks, incarnation, deadline_s)
        if state is None:
            return None
        try:
            copy()
        except OvertakenError:
            continue
        if all(rank.holds(rank.state) for rank in ranks.values()):
            return state
    return None


def agree(ranks: Mapping[int, LiveRank], incarnation: int, deadline_s: float) -> StateName | None:
    """Wait until all ranks show one settled state with time for the copy, and note it in each.

    Returns None if there was none until `deadline_s`, or there never can be.
    """
    copy_ns = int(1e9 * sum(rank.size_bytes for rank in ranks.values()) / _BYTES_PER_S)
    while True:
        states = [rank.settled() for rank in ranks.values()]
        if any(rank.page[Word.INCARNATION] != incarnation for rank in ranks.values()):
            return None
        if any(is_mirror(rank.page.words) for rank in ranks.values()):
            return None
        found = [state for state in states if state is not None]
        alike = {(state.step, state.edits, state.history, state.iteration) for state in found}
        # Ranks in lock-step differ for microseconds; others never agree, and pins report that.
        if len(found) == len(ranks) and len(alike) == 1 and _has_time(ranks, copy_ns):
            for rank, state in zip(ranks.values(), found, strict=True):
                rank.state = state
            ((step, edits, history, _),) = alike
            return StateName(incarnation, history, step, edits)
        if time.monotonic() > deadline_s or any(map(_rests, ranks.values())):
            return None
        time.sleep(_LOOK_S)


def _rests(rank: LiveRank) -> bool:
    page = rank.page
    return page[Word.REST] != 0 and time.monotonic_ns() - page[Word.REST_NS] > REST_NS


def _has_time(ranks: Mapping[int, LiveRank], copy_ns: int) -> bool:
    now_ns = time.monotonic_ns()
    return all(
        worth_starting(
            now_ns=now_ns,
            boundary_ns=rank.page[Word.BOUNDARY_NS],
            step_time_ns=rank.page[Word.STEP_TIME_NS],
            copy_ns=copy_ns,
        )
        for rank in ranks.values()
    )
