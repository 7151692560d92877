"""The gate: keeps copies and updates apart, and proves that it did.

Correctness rests on one word. `SEQ` is odd from the start of an update until training continues
after it (trainer/boundary/boundary.py); a copy that sees the same even `SEQ` before its first
and after its last byte holds one step. The gate's waiting adds politeness, never correctness:
the trainer waits a bounded time for a copy in progress, then continues whatever the sidecar
does. So a stopped, dead or slow sidecar costs at most one stall budget, once.

A state *rests* when its update is over but training has not continued. The script may still
change it (clamp it, swap in averaged weights), so SEQ stays odd; a copy of it is validated by
the word `REST` and marked as not settled.

Ordering: the trainer stores SEQ (odd) before its first parameter store, and SEQ (even) after
its last; the sidecar loads SEQ before and after its copy. x86-64 keeps both in order. Elsewhere
the interpreter's own atomics between those accesses order them in practice
(docs/step.md).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from paramd.memory.control_page import (
    NO_CHANGES,
    Changes,
    ControlPage,
    Page,
    Word,
    changes_of,
    in_time,
    label_of,
    settling_of,
)
from paramd.state import Settling

if TYPE_CHECKING:
    from paramd.memory.device_arena import TrainerDevice

COPY_CHUNK_BYTES = 4 << 20
"""Bytes copied between checks of SEQ: about half a millisecond of memory bandwidth."""

DEVICE_CHUNK_BYTES = 64 << 20
"""The same from a device, which is waited for after each."""

BEHIND_NS = 1_000_000_000
"""Longest wait of an update, while its device still does what was queued before it, for a copy."""

POLL_S = 50e-6
"""The trainer's poll interval while it waits for the sidecar's words."""


# Plain ints: an enum lookup costs more than reading the word.
_SEQ, _STEP, _EDITS, _ITERATION, _REWOUND = (
    int(Word.SEQ),
    int(Word.STEP),
    int(Word.EDITS),
    int(Word.ITERATION),
    int(Word.REWOUND),
)
_REST, _REST_STEP, _REST_NS = int(Word.REST), int(Word.REST_STEP), int(Word.REST_NS)
_REST_DIGEST, _REST_ITERATION = int(Word.REST_DIGEST), int(Word.REST_ITERATION)
_SETTLED_SEQ, _SETTLED_DIGEST = int(Word.SETTLED_SEQ), int(Word.SETTLED_DIGEST)
_ANNOUNCE, _SERVED = int(Word.ANNOUNCE), int(Word.SERVED)
_COPY_BEGUN, _COPY_ENDED = int(Word.COPY_BEGUN), int(Word.COPY_ENDED)


class State(NamedTuple):
    """Names a state of one incarnation's parameters, and the proof of its copy."""

    step: int
    edits: int
    iteration: int = 0
    """Backward passes before the last update: reveals ranks that skipped an update."""
    unsettled: bool = False
    """Copied from a resting state: training has not continued after its last update."""
    proof: int = 0
    """SEQ of a settled state, -REST of a resting one: equal proofs mean equal bytes."""
    label: str = ""
    """Label of the weights that replace the training's; empty: the training's own."""
    history: int = 0
    """Rollbacks before it, as in `paramd.state.StateName`."""
    changes: Changes = NO_CHANGES
    """What its trainer knows of changes outside of its update."""
    settling: Settling = Settling.UNKNOWN
    """How far it had come when it was copied."""


STALL_BUDGET_MS: Final = 5.0
"""Default of PARAMD_STALL_BUDGET_MS: longest wait of one update for a copy, in milliseconds."""


class TrainerGate:
    """The trainer's side. Called only on the thread that runs the optimizer."""

    def __init__(
        self,
        page: ControlPage,
        *,
        stall_budget_ns: int,
        mirrored: bool = False,
        order: Callable[[], None] | None = None,
        device: TrainerDevice | None = None,
    ) -> None:
        """`device`: what the training queues its work on, unless the arena is in host memory.
        `mirrored`: updates do not touch the arena, so they wait for no copy of it. `order`: called
        before a state is published: has the device's readers wait for the work that makes it
        (device_arena.py); None: the arena is in host memory.
        """
        self._order = order
        self._device = device
        self._mirrored = mirrored
        self._words = page.words
        self._stall_budget_ns = stall_budget_ns
        self._given_up: tuple[int, int, int] | None = None
        self.patience_ns = 0
        """Wait of the next update in nanoseconds, where that is more than the budget."""
        self._rests = 0

    def begin_update(self) -> None:
        """Wait, within the budget, for copies in progress, then make SEQ odd and end any rest."""
        words = self._words
        # Before any parameter store: from here on every copy at rest is void.
        words[_REST] = 0
        if not self._mirrored and (
            words[_COPY_BEGUN] != words[_COPY_ENDED] or words[_SERVED] < words[_ANNOUNCE]
        ):
            self._wait_for_copies()
        self.patience_ns = 0
        words[_SEQ] |= 1

    def rest(self, step: int, iteration: int, digest: int) -> None:
        """Publish a resting state: the update is over, but the script may still change more.

        `step`: the state's once it is settled; `iteration`: backward passes before the update;
        `digest`: of the samples as they are now (control_page.py).
        """
        words = self._words
        words[_REST] = 0
        if self._order is not None:
            self._order()
        words[_REST_STEP], words[_REST_ITERATION] = step, iteration
        words[_REST_DIGEST], words[_REST_NS] = digest, time.monotonic_ns()
        self._rests += 1
        # Last: a reader that sees this number sees the words above.
        words[_REST] = self._rests

    def settle(self, step: int, iteration: int, *, proven: bool) -> None:
        """Publish the step; make SEQ even again if the parameters are `proven` in place."""
        words = self._words
        words[_REST] = 0
        if self._order is not None:
            self._order()
        # Before SEQ: a reader that sees it even must find the step it belongs to.
        words[_STEP], words[_ITERATION] = step, iteration
        if proven and words[_SEQ] & 1:
            words[_SEQ] += 1

    def end_edit(self) -> None:
        """Publish one more edit of the same step and make SEQ even again."""
        if self._order is not None:
            self._order()
        words = self._words
        words[_EDITS] += 1
        words[_SEQ] += 1

    def begin_mirror(self) -> None:
        """Wait, within the budget, for copies in progress, then invalidate the mirror."""
        words = self._words
        if words[_COPY_BEGUN] != words[_COPY_ENDED]:
            self._wait_for_copies()
        # Before the first store to the arena: a copy still running will find itself overtaken.
        words[Word.MIRRORED_FOR] = 0

    def end_mirror(self, number: int) -> None:
        """Publish that the arena has what request `number` wants of the current state."""
        words = self._words
        words[Word.MIRRORED_STEP] = words[_STEP]
        words[Word.MIRRORED_EDITS] = words[_EDITS]
        words[Word.MIRRORED_ITERATION] = words[_ITERATION]
        # Last: it validates the arena's bytes and the words above.
        words[Word.MIRRORED_FOR] = number

    def note_stall(self, stall_ns: int) -> None:
        """Count a wait of the training for a reader."""
        words = self._words
        words[Word.STALL_COUNT] += 1
        words[Word.STALL_TOTAL_NS] += stall_ns
        words[Word.STALL_MAX_NS] = max(words[Word.STALL_MAX_NS], stall_ns)

    def _wait_for_copies(self) -> None:
        words = self._words
        begin_ns = now_ns = time.monotonic_ns()
        budget_ns, until_ns = max(self._stall_budget_ns, self.patience_ns), begin_ns + BEHIND_NS
        if self._device is not None:
            self._device.note_queued()
        while not self._copies_done():
            pending = (words[Word.COPY_BEGUN], words[Word.COPY_ENDED], words[Word.SERVED])
            if pending == self._given_up:
                return
            if self._device is not None and now_ns < until_ns and self._device.behind():
                # The device has work: no time is lost, and the copy may have to wait for it, too.
                begin_ns = now_ns
            if now_ns - begin_ns > budget_ns:
                # Never wait for the same unfinished copy twice: its sidecar may be dead.
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


def worth_starting(*, now_ns: int, boundary_ns: int, step_time_ns: int, copy_ns: int) -> bool:
    """Whether a copy begun now will probably end before the next update begins.

    If the next boundary is overdue, the rank is paused, hung or evaluating: copy.
    """
    if boundary_ns == 0 or step_time_ns == 0:
        return True
    age_ns = now_ns - boundary_ns
    return age_ns + copy_ns < 0.9 * step_time_ns or age_ns > 2 * step_time_ns


class CopyEnd(Enum):
    DONE = "done"
    UPDATING = "the rank is inside an update"
    OVERTAKEN = "an update began before the copy ended"
    CHANGED = "parameters were changed after the last update, and training has not gone on"


class LateError(Exception):
    """A device has not finished the update in time: the copy counts as overtaken."""


@dataclass(frozen=True, slots=True)
class CopySpan:
    """Bytes to copy: addresses in this process, and a length."""

    source: int
    target: int
    size_bytes: int

    def copy(self) -> None:
        ctypes.memmove(self.target, self.source, self.size_bytes)


Move = Callable[[Sequence[CopySpan]], object]
"""Copies memory on a device, DEVICE_CHUNK_BYTES at most. May raise LateError."""


def batches(
    spans: Sequence[CopySpan], chunk_bytes: int, most_bytes: int
) -> Iterator[list[CopySpan]]:
    """The spans in order: cut into chunks, grouped up to `most_bytes`."""
    batch: list[CopySpan] = []
    size_bytes = 0
    for span in spans:
        for begin in range(0, span.size_bytes, chunk_bytes):
            size = min(chunk_bytes, span.size_bytes - begin)
            if batch and size_bytes + size > most_bytes:
                yield batch
                batch, size_bytes = [], 0
            batch.append(CopySpan(span.source + begin, span.target + begin, size))
            size_bytes += size
    if batch:
        yield batch


def state_of(page: Page) -> State:
    """The current state; consistent only if SEQ is the same even value before and after."""
    words = page.words
    proof, history = words[_SEQ], words[_REWOUND]
    return State(words[_STEP], words[_EDITS], words[_ITERATION], proof=proof, history=history)


def resting_state(page: ControlPage) -> State | None:
    """The resting state, or None; consistent only if REST is the same afterwards."""
    words = page.words
    rest = words[_REST]
    if not rest:
        return None
    iteration, label = words[_REST_ITERATION], label_of(page)
    return State(words[_REST_STEP], words[_EDITS], iteration, True, -rest, label, words[_REWOUND])


def is_changed(page: Page, state: State, digest: int) -> bool:
    """Whether `digest`, of the samples now, shows a settled state changed without an update.

    Never before the trainer has published the state's own digest, microseconds after it settled.
    """
    words = page.words
    return words[_SETTLED_SEQ] == state.proof and words[_SETTLED_DIGEST] != digest


def copy_at_rest(
    page: ControlPage,
    spans: Sequence[CopySpan],
    digest: Callable[[], int],
    *,
    changed_too: bool = False,
    at_point: Callable[[str], None] = lambda _: None,
    move: Move | None = None,
) -> tuple[CopyEnd, State]:
    """As `copy_at_one_step`, of a resting state. `digest`: computes the digest of the arena's
    samples now. It reveals weights swapped in or merged after the update, but may miss a few
    changed elements. `changed_too`: accept changes made since the update, but still none during the
    copy."""
    state = resting_state(page)
    if state is None:
        return CopyEnd.UPDATING, state_of(page)
    before = digest()
    if before != page.words[_REST_DIGEST] and not changed_too:
        return CopyEnd.CHANGED, state
    end, copied = _copy_while(page, spans, (Word.REST, -state.proof), _REST_WORDS, at_point, move)
    state = state._replace(changes=copied.changes)
    if end is CopyEnd.DONE and digest() != before:
        return CopyEnd.CHANGED, state
    as_published = before == page.words[_REST_DIGEST]
    return end, state._replace(settling=copied.settling if as_published else Settling.CHANGING)


def copy_at_one_step(
    page: ControlPage,
    spans: Sequence[CopySpan],
    *,
    at_point: Callable[[str], None] = lambda _: None,
    move: Move | None = None,
) -> tuple[CopyEnd, State]:
    """The sidecar's side: copy all spans of one state; return how the copy ended, and its state.

    Runs on the sidecar's one copying thread; releases the GIL while bytes move. Targets must
    be pre-faulted, since the trainer may be waiting. `at_point` is called at the points
    "copy-begun", "copy-chunk" and "copy-moved" (fault injection); `move` copies bytes on a device.
    The state means something only for DONE.
    """
    seq = page.words[Word.SEQ]
    if seq & 1:
        return CopyEnd.UPDATING, state_of(page)
    return _copy_while(page, spans, (Word.SEQ, seq), _STATE_WORDS, at_point, move)


def copy_of_request(
    page: ControlPage,
    spans: Sequence[CopySpan],
    number: int,
    *,
    at_point: Callable[[str], None] = lambda _: None,
) -> tuple[CopyEnd, State]:
    """As `copy_at_one_step`, from a mirrored arena refreshed for request `number`."""
    if page.words[Word.MIRRORED_FOR] != number:
        return CopyEnd.UPDATING, state_of(page)
    state = (Word.MIRRORED_STEP, Word.MIRRORED_EDITS, Word.MIRRORED_ITERATION)
    return _copy_while(page, spans, (Word.MIRRORED_FOR, number), state, at_point, None)


_STATE_WORDS = (Word.STEP, Word.EDITS, Word.ITERATION)
_REST_WORDS = (Word.REST_STEP, Word.EDITS, Word.REST_ITERATION)


def _copy_while(
    page: ControlPage,
    spans: Sequence[CopySpan],
    good: tuple[Word, int],
    state_words: tuple[Word, Word, Word],
    at_point: Callable[[str], None],
    move: Move | None,
) -> tuple[CopyEnd, State]:
    """Copy for as long as the proof word keeps its value; the state words name the state."""
    words, (proof, value) = page.words, good
    words[Word.COPY_BEGUN] += 1
    try:
        at_point("copy-begun")
        # These change only while the proof word has another value: the last check covers them.
        step, edits, iteration = (words[word] for word in state_words)
        history = words[_REWOUND]
        changes = changes_of(words, in_time(step, rewound=history))
        state = State(step, edits, iteration, proof=value, history=history, changes=changes)
        chunk_bytes = COPY_CHUNK_BYTES if move is None else DEVICE_CHUNK_BYTES
        for batch in batches(spans, chunk_bytes, 0 if move is None else chunk_bytes):
            if words[proof] != value:
                return CopyEnd.OVERTAKEN, state
            if move is None:
                batch[0].copy()
            else:
                move(batch)
            at_point("copy-chunk")
        at_point("copy-moved")
        # As late as the proof covers it: a state's settling is published right after its SEQ.
        moment = in_time(step, rewound=history)
        settling = settling_of(words, moment, rests=proof is Word.REST)
        if words[proof] != value:
            return CopyEnd.OVERTAKEN, state
        return CopyEnd.DONE, state._replace(settling=settling)
    except LateError:
        return CopyEnd.OVERTAKEN, state
    finally:
        # Even on failure, or the next update would wait for this copy until its budget is spent.
        words[Word.COPY_ENDED] = words[Word.COPY_BEGUN]
