"""Boundary requests in the page's words: declared ready, agreed, done; or withdrawn.

The page holds one request at a time. It is written READY = 0, then TOKEN, ACTION and ARGUMENT,
then READY = n; numbers only rise (HIGHEST), so a number identifies a request to the trainer,
and a withdrawn one never returns. All methods but `fate_of` run on the copying thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paramd.memory.control_page import Past, Refusal, Word, Words, past_of
from paramd.memory.gate import CopySpan
from paramd.v1 import sidecar_pb2 as pb

CAPTURE = pb.BOUNDARY_ACTION_UNSPECIFIED
EDIT = pb.BOUNDARY_ACTION_EDIT
HOLD = pb.BOUNDARY_ACTION_HOLD
STEP = pb.BOUNDARY_ACTION_STEP
RESUME = pb.BOUNDARY_ACTION_RESUME

_PAST = {
    Past.DONE: pb.BOUNDARY_FATE_DONE,
    Past.FAILED: pb.BOUNDARY_FATE_TORN,
    Past.NEVER: pb.BOUNDARY_FATE_WITHDRAWN,
    Past.FORGOTTEN: pb.BOUNDARY_FATE_UNSPECIFIED,
}


_REFUSALS: Mapping[int, str] = {
    Refusal.FAULTY: "the trainer cannot carry it out; its log says why",
    Refusal.AWAY: "the parameters of this rank are not served (paramd status says why)",
    Refusal.GATHERED: (
        "the training's boundary lies within a forward of FSDP, on this rank or on others, which "
        "works on gathered parameters that an edit would not reach; if it is paused, let it pass a "
        "step (paramd step)"
    ),
    Refusal.NOT_HELD: "training is no longer paused; try again",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a boundary request ended on this rank."""

    step: int
    """The boundary's step; -1 if the request was not carried out."""
    reason: str
    """Why it was not; else empty."""
    edits: int = -1
    """Edits applied when it was done."""
    stop_ns: int = 0
    """How long an edit stopped the trainer."""
    missed: bool = False
    """It was agreed, but its bytes could not be copied."""
    refused: bool = False
    """A repeated request would fail again."""
    history: int = 0
    """Rollbacks before it was done."""
    proof: int = 0
    """Proof of the bytes copied, as in `memory.gate.State`; 0: of a mirror, or without bytes."""
    token: int = 0
    """Token of the request whose bytes were copied; 0: none were."""

    @property
    def captured(self) -> bool:
        return not self.reason


@dataclass(eq=False, slots=True)
class Boundary:
    """What this rank does at the boundary where request `number` is agreed."""

    number: int
    spans: Sequence[CopySpan]
    """Snapshots to fill."""
    with_buffers: bool
    done: Callable[[Outcome], None]
    """Called once, on the copying thread."""
    with_moments: bool = False
    """The trainer copies optimizer state for it, or waits longer for its copy."""
    state: Callable[[], Sequence[CopySpan] | None] | None = None
    """Finds the spans of optimizer state to copy along, right before; None: not recorded."""
    fill_extra: Callable[[], str] | None = None
    """Fills tables with the extra state that the trainer notes for it; why not, else empty."""
    token: int = 0
    action: int = CAPTURE
    argument: int = 0
    hold_until_ns: int = 0
    """End of the lease of a pause that begins."""
    deferred_step: int | None = field(default=None)


Capture = Callable[[Boundary, bool], Outcome | None]


class PageRequests:
    """Requests that this rank is ready for and that have not ended."""

    def __init__(self, words: Words, capture: Capture, at_point: Callable[[str], None]) -> None:
        """`capture(boundary, announced)` fills snapshots and returns the outcome; None: not yet."""
        self._words = words
        self._capture = capture
        self._at_point = at_point
        self._armed: dict[int, Boundary] = {}

    def __bool__(self) -> bool:
        return bool(self._armed)

    def arm(self, boundary: Boundary) -> None:
        """Declare the rank ready for a request, replacing any other."""
        words, number = self._words, boundary.number
        if number <= words[Word.HIGHEST]:
            boundary.done(
                Outcome(-1, f"boundary {number} is past: {words[Word.HIGHEST]} was requested")
            )
            return
        self._armed[number] = boundary
        # READY brackets the other words: the trainer reads it before and after them, and so never
        # promises a mix of two requests.
        words[Word.READY] = 0
        words[Word.TOKEN] = boundary.token
        words[Word.ACTION] = boundary.action
        words[Word.ARGUMENT] = boundary.argument
        if boundary.action == HOLD:
            words[Word.HOLD_UNTIL_NS] = boundary.hold_until_ns
        if boundary.with_buffers:
            words[Word.BUFFERS_WANTED] = number
        if boundary.with_moments:
            words[Word.MOMENTS_WANTED] = number
        if boundary.fill_extra is not None:
            words[Word.EXTRA_WANTED] = number
        # Before READY: a sidecar respawned in between must not reuse the number.
        words[Word.HIGHEST] = number
        words[Word.READY] = number
        self._at_point("capture-ready")

    def take_back(self, number: int) -> None:
        """Keep the trainer from joining this request from now on."""
        words = self._words
        if words[Word.READY] == number:
            words[Word.READY] = 0
        words[Word.HIGHEST] = max(words[Word.HIGHEST], number)

    def withdraw(self, number: int, reason: str) -> None:
        """Take a request back and end it; see `fate_of`."""
        boundary = self._armed.pop(number, None)
        if boundary is not None:
            self.take_back(number)
            boundary.done(Outcome(-1, reason))

    def serve(self, announced: bool) -> None:
        """End requests that were carried out or can no longer be agreed."""
        for number in sorted(self._armed):
            boundary = self._armed[number]
            outcome = self._outcome(boundary, announced)
            if outcome is not None:
                del self._armed[number]
                boundary.done(outcome)

    def give_up(self, reason: str) -> None:
        """End all requests: the trainer has ended."""
        # Requests agreed before the end still count.
        self.serve(True)
        for number in list(self._armed):
            self.withdraw(number, reason)

    def _outcome(self, boundary: Boundary, announced: bool) -> Outcome | None:
        words, number = self._words, boundary.number
        promised, agreed = words[Word.PROMISED], words[Word.AGREED]
        if words[Word.REFUSED] == number:
            self.take_back(number)
            return Outcome(-1, _why_refused(words))
        if agreed == number:
            return self._done(boundary, announced)
        if boundary.action == EDIT and words[Word.EDIT_AGREED] == number:
            # Postponed, while others are agreed on: it is applied once FSDP computes no more.
            return self._edited(number)
        if apart := apart_reason(words):
            self.take_back(number)
            return Outcome(-1, apart)
        if agreed > number:
            # The trainer may have acted and moved on: too late to copy that boundary.
            edited = self._edited(number) if boundary.action == EDIT else None
            return edited or Outcome(-1, "a later request was already agreed")
        if number not in (words[Word.READY], promised):
            return Outcome(-1, "another request took its place")
        return None

    def _done(self, boundary: Boundary, announced: bool) -> Outcome | None:
        words = self._words
        if boundary.action == EDIT:
            return self._edited(boundary.number)
        if boundary.action == CAPTURE:
            return self._capture(boundary, announced)
        history = words[Word.REWOUND]
        return Outcome(words[Word.AGREED_STEP], "", edits=words[Word.EDITS], history=history)

    def _edited(self, number: int) -> Outcome | None:
        words = self._words
        if words[Word.EDIT_APPLIED] == number:
            step, edits, history = words[Word.EDIT_STEP], words[Word.EDITS], words[Word.REWOUND]
            return Outcome(step, "", edits=edits, stop_ns=words[Word.EDIT_NS], history=history)
        if words[Word.EDIT_FAILED] == number:
            return Outcome(-1, "the edit failed half way on this rank; its trainer's log says why")
        return None


def apart_reason(words: Words) -> str:
    """Why the ranks cannot agree although all respond; empty if they are in lock-step."""
    lowest, highest = words[Word.APART_LOW], words[Word.APART_HIGH]
    # Above: read between the trainer's two writes (`note_apart`).
    if lowest >= highest:
        return ""
    return (
        f"the ranks are not at the same step of training: this one is in iteration "
        f"{words[Word.ROUND_ITERATION]}, the ranks in {lowest} to {highest}. One rank skipped an "
        "update alone (its optimizer raised, or its gradient scaler skipped): restart the "
        "training from a checkpoint. Or it had fewer inputs (DDP.join): detach and attach again "
        "on all ranks"
    )


def _why_refused(words: Words) -> str:
    step = words[Word.REFUSED_STEP]
    if step < 0:
        return _REFUSALS.get(step, _REFUSALS[Refusal.FAULTY])
    return (
        f"if_step is {words[Word.REFUSED_IF_STEP]}, but the next boundary of all ranks is at step "
        f"{step} or later; pause training to edit at an exact step"
    )


def fate_of(words: Words, number: int, *, ended: bool) -> pb.BoundaryFate.ValueType:
    """The fate of a request that was taken back at least some milliseconds ago; UNSPECIFIED if so
    many were agreed since that the page no longer knows it. `ended`: the trainer's process has
    ended, so its words change no more."""
    # In this order: the trainer writes AGREED before it clears PROMISED. Reading AGREED first, a
    # request agreed in between would look withdrawn.
    promised = words[Word.PROMISED]
    agreed = words[Word.AGREED]
    if words[Word.EDIT_APPLIED] == number:
        return pb.BOUNDARY_FATE_DONE
    if words[Word.EDIT_FAILED] == number:
        return pb.BOUNDARY_FATE_TORN
    if words[Word.EDIT_AGREED] == number:
        # Read again: the trainer may have finished since.
        if words[Word.EDIT_APPLIED] == number:
            return pb.BOUNDARY_FATE_DONE
        return pb.BOUNDARY_FATE_TORN if ended else pb.BOUNDARY_FATE_AGREED
    if agreed == number:
        return pb.BOUNDARY_FATE_DONE
    if promised == number:
        return pb.BOUNDARY_FATE_IN_DOUBT
    if agreed < number:
        return pb.BOUNDARY_FATE_WITHDRAWN
    return _PAST[past_of(words, number)]
