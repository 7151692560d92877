"""The gate: what keeps a copy and an update from overlapping, and proves it did.

Correctness rests on one word. `SEQ` is odd from the begin of an update until the training goes
on after it (trainer/boundary/boundary.py); a copy that sees the same even `SEQ` before its
first and after its last byte holds one step. The gate adds politeness, never correctness: the
trainer waits a bounded time for a copy under way, and then goes on whatever the sidecar
does. So a sidecar that is stopped, dead or slow costs at most one stall budget, once.

A state whose update is over and after which training has not gone on *rests*. Nobody can
prove that the script will not change it yet (clamp it, swap averaged weights in), so SEQ
stays odd; a copy of it is proven by the word `REST` and marked as not settled.

Ordering: the trainer stores SEQ (odd) before its first parameter store, and SEQ (even)
after its last; the sidecar loads SEQ before and after its copy. Stores and loads keep
their order on x86-64. Elsewhere the interpreter's own atomics between those accesses
order them in practice; docs/assumptions.md says so.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from paramd.memory.control_page import ControlPage, Word

COPY_CHUNK_BYTES = 4 << 20
"""Bytes copied between two looks at SEQ: about half a millisecond of memory bandwidth."""

POLL_S = 50e-6
"""The trainer's sleep between two looks at the sidecar's words while it waits."""


# Plain numbers: looking up a member of an enumeration costs more than reading its word.
_SEQ, _STEP, _EDITS, _ITERATION = (
    int(Word.SEQ),
    int(Word.STEP),
    int(Word.EDITS),
    int(Word.ITERATION),
)
_REST, _REST_STEP, _REST_NS = int(Word.REST), int(Word.REST_STEP), int(Word.REST_NS)
_REST_DIGEST, _REST_ITERATION = int(Word.REST_DIGEST), int(Word.REST_ITERATION)
_ANNOUNCE, _SERVED = int(Word.ANNOUNCE), int(Word.SERVED)
_COPY_BEGUN, _COPY_ENDED = int(Word.COPY_BEGUN), int(Word.COPY_ENDED)


class State(NamedTuple):
    """What the parameters of one epoch are: updates finished, edits applied."""

    step: int
    edits: int
    iteration: int = 0
    """Backward passes before the last update: tells ranks that skipped an update apart."""
    unsettled: bool = False
    """Copied from a state that rests: training has not gone on after its last update."""
    proof: int = 0
    """SEQ of a settled state, -REST of one that rests: equal proofs mean equal bytes."""


STALL_BUDGET_MS: Final = 5.0
"""Longest wait of one update for a copy, in milliseconds, unless PARAMD_STALL_BUDGET_MS says so."""


class TrainerGate:
    """The trainer's side. One thread calls it: the one that runs the optimizer."""

    def __init__(self, page: ControlPage, *, stall_budget_ns: int, mirrored: bool = False) -> None:
        """`mirrored`: updates do not touch the arena, so they wait for no copy of it."""
        self._mirrored = mirrored
        self._words = page.words
        self._stall_budget_ns = stall_budget_ns
        self._given_up: tuple[int, int, int] | None = None
        self._rests = 0

    def begin_update(self) -> None:
        """Waits, within the budget, for copies under way; then SEQ is odd and nothing rests."""
        words = self._words
        words[_REST] = 0
        if not self._mirrored and (
            words[_COPY_BEGUN] != words[_COPY_ENDED] or words[_SERVED] < words[_ANNOUNCE]
        ):
            self._wait_for_copies()
        words[_SEQ] |= 1

    def rest(self, step: int, iteration: int, digest: int) -> None:
        """The update is over; nobody knows yet whether the script changes more.

        Args:
            step: what the state will be, once it is settled.
            iteration: backward passes before the update.
            digest: of the samples as they are now (see rest.py).
        """
        words = self._words
        words[_REST] = 0
        words[_REST_STEP], words[_REST_ITERATION] = step, iteration
        words[_REST_DIGEST], words[_REST_NS] = digest, time.monotonic_ns()
        self._rests += 1
        # The last store: whoever sees this number sees the words above.
        words[_REST] = self._rests

    def settle(self, step: int, iteration: int, *, proven: bool) -> None:
        """Publishes the step; SEQ is even again when the parameters were found `proven`."""
        words = self._words
        words[_REST] = 0
        words[_STEP], words[_ITERATION] = step, iteration
        if proven and words[_SEQ] & 1:
            words[_SEQ] += 1

    def end_edit(self) -> None:
        """Publishes one more edit of the same step, with SEQ even again."""
        words = self._words
        words[_EDITS] += 1
        words[_SEQ] += 1

    def begin_mirror(self) -> None:
        """Waits, within the budget, for copies under way; then the mirrored arena is nobody's."""
        words = self._words
        if words[_COPY_BEGUN] != words[_COPY_ENDED]:
            self._wait_for_copies()
        words[Word.MIRRORED_FOR] = 0

    def end_mirror(self, number: int) -> None:
        """The arena has what request `number` wants of the present state."""
        words = self._words
        words[Word.MIRRORED_STEP] = words[_STEP]
        words[Word.MIRRORED_EDITS] = words[_EDITS]
        words[Word.MIRRORED_ITERATION] = words[_ITERATION]
        words[Word.MIRRORED_FOR] = number

    def note_stall(self, stall_ns: int) -> None:
        """Counts a wait of the training for a reader."""
        words = self._words
        words[Word.STALL_COUNT] += 1
        words[Word.STALL_TOTAL_NS] += stall_ns
        words[Word.STALL_MAX_NS] = max(words[Word.STALL_MAX_NS], stall_ns)

    def _wait_for_copies(self) -> None:
        words = self._words
        begin_ns = now_ns = time.monotonic_ns()
        while not self._copies_done():
            pending = (words[Word.COPY_BEGUN], words[Word.COPY_ENDED], words[Word.SERVED])
            if pending == self._given_up:
                return
            if now_ns - begin_ns > self._stall_budget_ns:
                # The same unfinished copy is not waited for twice: its sidecar may be dead.
                self._given_up = pending
                break
            time.sleep(POLL_S)
            now_ns = time.monotonic_ns()
        self.note_stall(now_ns - begin_ns)

    def _copies_done(self) -> bool:
        words = self._words
        return (
            words[Word.COPY_BEGUN] == words[Word.COPY_ENDED]
            and words[Word.SERVED] >= words[Word.ANNOUNCE]
        )


class CopyEnd(Enum):
    """How a copy ended."""

    DONE = "done"
    UPDATING = "the rank is inside an update"
    OVERTAKEN = "an update began before the copy ended"
    CHANGED = "parameters were changed after the last update, and training has not gone on"


@dataclass(frozen=True, slots=True)
class CopySpan:
    """Bytes to copy: addresses in this process, and a length."""

    source: int
    target: int
    size_bytes: int


def state_of(page: ControlPage) -> State:
    """The present state; of one moment only when SEQ is the same even value before and after."""
    words = page.words
    return State(words[_STEP], words[_EDITS], words[_ITERATION], proof=words[_SEQ])


def resting_state(page: ControlPage) -> State | None:
    """The state that rests, or None; of one moment only when REST is the same afterwards."""
    words = page.words
    rest = words[_REST]
    if not rest:
        return None
    return State(words[_REST_STEP], words[_EDITS], words[_REST_ITERATION], True, -rest)


def copy_at_rest(
    page: ControlPage,
    spans: Sequence[CopySpan],
    digest: Callable[[], int],
    *,
    changed_too: bool = False,
    at_point: Callable[[str], None] = lambda _: None,
) -> tuple[CopyEnd, State]:
    """As `copy_at_one_step`, of a state that rests.

    Args:
        digest: of the samples as they are in the arena now. It tells weights that were swapped
            in or merged after the update; a few changed elements it may miss.
        changed_too: copy also what was changed since; refused is still what changes meanwhile.
    """
    state = resting_state(page)
    if state is None:
        return CopyEnd.UPDATING, state_of(page)
    before = digest()
    if before != page.words[_REST_DIGEST] and not changed_too:
        return CopyEnd.CHANGED, state
    end, _ = _copy_while(page, spans, (Word.REST, -state.proof), _STATE_WORDS, at_point)
    if end is CopyEnd.DONE and digest() != before:
        return CopyEnd.CHANGED, state
    return end, state


def copy_at_one_step(
    page: ControlPage,
    spans: Sequence[CopySpan],
    *,
    at_point: Callable[[str], None] = lambda _: None,
) -> tuple[CopyEnd, State]:
    """The sidecar's side: copies all spans of one state, or says why not.

    Runs on the sidecar's one copying thread; releases the GIL while bytes move. The
    targets must be pre-faulted, for the trainer may be waiting. `at_point` is called at
    the named points "copy-begun", "copy-chunk" and "copy-moved" (fault injection).

    Returns the end and the state the bytes belong to (meaningful only for DONE).
    """
    seq = page.words[Word.SEQ]
    if seq & 1:
        return CopyEnd.UPDATING, state_of(page)
    return _copy_while(page, spans, (Word.SEQ, seq), _STATE_WORDS, at_point)


def copy_of_request(
    page: ControlPage,
    spans: Sequence[CopySpan],
    number: int,
    *,
    at_point: Callable[[str], None] = lambda _: None,
) -> tuple[CopyEnd, State]:
    """As `copy_at_one_step`, from a mirrored arena: what was copied there for a request."""
    if page.words[Word.MIRRORED_FOR] != number:
        return CopyEnd.UPDATING, state_of(page)
    state = (Word.MIRRORED_STEP, Word.MIRRORED_EDITS, Word.MIRRORED_ITERATION)
    return _copy_while(page, spans, (Word.MIRRORED_FOR, number), state, at_point)


_STATE_WORDS = (Word.STEP, Word.EDITS, Word.ITERATION)


def _copy_while(
    page: ControlPage,
    spans: Sequence[CopySpan],
    good: tuple[Word, int],
    state_words: tuple[Word, Word, Word],
    at_point: Callable[[str], None],
) -> tuple[CopyEnd, State]:
    """Copies as long as a word has its value; the state is what three other words say then."""
    words, (proof, value) = page.words, good
    words[Word.COPY_BEGUN] += 1
    try:
        at_point("copy-begun")
        step, edits, iteration = (words[word] for word in state_words)
        state = State(step, edits, iteration, proof=value)
        for span in spans:
            for begin in range(0, span.size_bytes, COPY_CHUNK_BYTES):
                if words[proof] != value:
                    return CopyEnd.OVERTAKEN, state
                size = min(COPY_CHUNK_BYTES, span.size_bytes - begin)
                ctypes.memmove(span.target + begin, span.source + begin, size)
                at_point("copy-chunk")
        at_point("copy-moved")
        if words[proof] != value:
            return CopyEnd.OVERTAKEN, state
        return CopyEnd.DONE, state
    finally:
        words[Word.COPY_ENDED] = words[Word.COPY_BEGUN]
