"""What happens at a boundary because all ranks agreed on it, or because this rank is held.

Rounds are the trainers' own (agreement.py); this is what comes of them on one rank: the
words that tell the sidecar, the edit or the copies that were asked for, and the waiting of
a held rank, which goes on with rounds until one of them lets it go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from paramd.memory.agreed import note_agreed, note_failed
from paramd.memory.control_page import ControlPage, Word
from paramd.memory.gate import TrainerGate
from paramd.trainer.boundary.agreement import (
    CAPTURE,
    EDIT,
    NOTHING,
    RESUME,
    Agreement,
    AgreementLost,
    Request,
    Round,
    promise,
)
from paramd.trainer.boundary.hold import ROUND_S, Hold, Holding

log = logging.getLogger("paramd")

AGREEMENT_WORKS, AGREEMENT_LOST = 1, 2

# Plain numbers cost a fraction of enumerations, and these are looked at in every step.
_HELD, _READY = int(Word.HELD), int(Word.READY)


class EditorLike(Protocol):
    """What applies edits (see trainer/edits/)."""

    failed: bool

    def accept(self, request: Request, *, now: bool) -> bool:
        """Whether this rank can apply it; `now`: at this very boundary, if all can."""

    def apply(self, request: Request, gate: TrainerGate) -> None:
        """Applies it."""


class MirrorLike(Protocol):
    """What copies parameters into the arena (see mirror.py)."""

    def refresh_for(self, request: Request, gate: TrainerGate) -> None:
        """Copies what an agreed capture wants, buffers too."""


class Acting:
    """One rank's part in what all ranks do together. One thread uses it: the training's."""

    def __init__(
        self,
        page: ControlPage,
        agreement: Agreement,
        gate: TrainerGate,
        *,
        hold: Hold,
        editor: EditorLike,
        copy_buffers: Callable[[], None],
        mirror_moments: Callable[[], None],
        answer: Callable[[bool], None],
        mirror: MirrorLike | None = None,
        gathered: Callable[[], bool] = lambda: False,
    ) -> None:
        """`answer(announce)` wakes the sidecar when told to, or when it wants to be woken.

        `mirror` copies the parameters when they are not in the arena themselves. `gathered`
        tells whether a forward has copies of the shards at work.
        """
        self._words = page.words
        self._agreement: Agreement | None = agreement
        self._gate = gate
        self._hold = hold
        self._editor = editor
        self._copy_buffers = copy_buffers
        self._mirror_moments = mirror_moments
        self._mirror = mirror
        self._gathered = gathered
        self._answer = answer
        self._agreed = page.words[Word.AGREED]
        self._agreed_count = 0
        self._iteration = 0
        self._words[Word.AGREEMENT_STATE] = AGREEMENT_WORKS

    def at_boundary(self, at_home: bool, iteration: int = 0) -> None:
        """One boundary: ends a round, does what it brought, waits while held, begins the next.

        Args:
            at_home: the parameters are in the arena. A rank of which they are not still takes
                part, with nothing: the others must not wait for it.
            iteration: backward passes that this rank has seen, equal on all in lock-step.
        """
        self._iteration = iteration
        agreement, words = self._agreement, self._words
        if agreement is None or (
            not words[_HELD] and agreement.passes(wanted=words[_READY] > self._agreed)
        ):
            self._answer(False)
            return
        try:
            self._rounds(agreement, at_home)
        except AgreementLost as error:
            self._agreement = None
            self._hold.end()
            self._words[Word.AGREEMENT_STATE] = AGREEMENT_LOST
            log.warning("paramd: the ranks no longer agree on boundaries: %s", error)
            self._answer(False)

    def forget(self) -> None:
        """In a forked child: the words and the rounds are the parent's alone."""
        self._agreement = None

    def close(self) -> None:
        """Ends a round under way; no boundary follows."""
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            try:
                agreement.finish()
            except AgreementLost as error:
                log.info("paramd: last agreement round: %s", error)

    def _rounds(self, agreement: Agreement, at_home: bool) -> None:
        words = self._words
        if words[_HELD]:
            self._hold.pass_boundary()
        heard = agreement.collect()
        if agreement.alone:
            heard = self._exchange(agreement, at_home)
        announce = heard is not None and self._hear(heard, at_home)
        self._answer(announce)
        if words[_HELD]:
            self._wait(agreement, at_home)
        if agreement.due and not agreement.alone:
            request = self._request(at_home, now=False)
            words[Word.ROUNDS_LAUNCHED] += 1
            agreement.launch(
                request,
                pending=words[Word.READY] > self._agreed,
                stay=self._hold.stay(),
                step_time_ns=words[Word.STEP_TIME_NS],
                iteration=self._iteration,
                expected=words[Word.EXPECTED_NS] > time.monotonic_ns(),
            )

    def _wait(self, agreement: Agreement, at_home: bool) -> None:
        """The hold: rounds, and all that is agreed in them, until one of them ends it."""
        words = self._words
        try:
            while words[Word.HELD] == Holding.HELD:
                time.sleep(ROUND_S)
                self._answer(self._hear(self._exchange(agreement, at_home), at_home))
        except BaseException:
            self._hold.end()
            raise
        # The time spent here is no step's.
        words[Word.BOUNDARY_NS] = time.monotonic_ns()

    def _exchange(self, agreement: Agreement, at_home: bool) -> Round:
        request = self._request(at_home, now=True)
        self._words[Word.ROUNDS_LAUNCHED] += 1
        return agreement.exchange(
            request,
            pending=self._words[Word.READY] > self._agreed,
            stay=self._hold.stay(),
            iteration=self._iteration,
        )

    def _request(self, at_home: bool, *, now: bool) -> Request:
        """What this rank promises; `now`: the round ends at this boundary, else at the next."""
        if not at_home:
            return NOTHING
        try:
            return promise(self._words, self._agreed, lambda one: self._accept(one, now))
        except Exception:
            log.exception("paramd: a boundary request could not be looked at")
            return NOTHING

    def _accept(self, request: Request, now: bool) -> bool:
        if request.action == EDIT:
            # What FSDP has gathered already is not the shards' any more: the next boundary will do.
            return not self._gathered() and self._editor.accept(request, now=now)
        return CAPTURE <= request.action <= RESUME

    def _hear(self, heard: Round, at_home: bool) -> bool:
        """Says what a round told, does it, and returns whether to announce it."""
        words, request = self._words, heard.agreed
        wanted_above = self._agreed
        if request is not None:
            self._agreed = request.number
            if request.action == EDIT:
                words[Word.EDIT_AGREED] = request.number
            self._agreed_count += 1
            note_agreed(words, self._agreed_count, request.number)
            words[Word.AGREED_TOKEN] = request.token
            words[Word.AGREED_STEP] = words[Word.STEP]
            words[Word.AGREED] = request.number
        # After AGREED: a sidecar that finds nothing promised looks there for what became of it.
        words[Word.ROUND_ITERATION] = heard.iteration
        words[Word.APART_LOW], words[Word.APART_HIGH] = heard.iterations
        words[Word.PROMISED] = 0
        words[Word.ROUNDS_COLLECTED] += 1
        self._hold.hear(heard)
        if request is None:
            return False
        try:
            self._do(request, wanted_above, at_home)
        except Exception:
            # The others must not wait for this rank's next round.
            log.exception("paramd: boundary request %d failed on this rank", request.number)
        if words[Word.EDIT_FAILED] == request.number:
            note_failed(words, self._agreed_count, request.number)
        return True

    def _do(self, request: Request, wanted_above: int, at_home: bool) -> None:
        words = self._words
        if request.action == EDIT:
            if at_home:
                self._editor.apply(request, self._gate)
            else:
                words[Word.EDIT_FAILED] = request.number
        if self._mirror is None and words[Word.BUFFERS_WANTED] > wanted_above:
            self._copy_buffers()
            words[Word.BUFFERS_STEP] = words[Word.STEP]
        if words[Word.MOMENTS_WANTED] > wanted_above:
            words[Word.MOMENTS_STEP] = -1
            self._mirror_moments()
            words[Word.MOMENTS_STEP] = words[Word.STEP]
        if self._mirror is not None and request.action == CAPTURE and at_home:
            # The last of all: what it writes says that the request can be filled.
            self._mirror.refresh_for(request, self._gate)
