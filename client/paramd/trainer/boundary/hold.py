"""One rank's part at a boundary: act on agreed requests, and wait while training is paused.

    running --HOLD--> held --STEP k--> stepping --k boundaries later--> held
                       |                  |
                       +--RESUME, or one rank does not want to stay--> running

All ranks change state together: every transition comes from the same round (agreement.py) or the
same count of boundaries. A rank wants to stay while its sidecar renews HOLD_UNTIL_NS and the cap
is not reached; so whichever process dies, the hold ends everywhere when its lease runs out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING

from paramd.memory.control_page import (
    BUFFERS_REFUSED,
    ControlPage,
    Refusal,
    Stand,
    Word,
    Words,
    note_agreed,
    note_apart,
    note_failed,
    note_stand,
    write_text,
)
from paramd.memory.gate import TrainerGate
from paramd.trainer.boundary.agreement import (
    CAPTURE,
    EDIT,
    HOLD,
    NOTHING,
    RESUME,
    STEP,
    Agreement,
    AgreementLost,
    Request,
    Round,
    promise,
    refuse,
)
from paramd.trainer.home.moving import BufferChangedError
from paramd.wire import MAX_LEASE_S

if TYPE_CHECKING:
    from paramd.trainer.boundary.edits import Editor
    from paramd.trainer.home.mirrored import MirroredHome
    from paramd.trainer.home.owned import ParameterStorage

log = logging.getLogger("paramd")

AGREEMENT_WORKS, AGREEMENT_LOST = 1, 2

# Plain ints cost a fraction of enum lookups, and these are read on every step.
_HELD, _READY = int(Word.HELD), int(Word.READY)
_COPIED = (Word.BUFFERS_WANTED, Word.MOMENTS_WANTED, Word.EXTRA_WANTED)
"""Words that name requests for which the trainer copies something."""

ROUND_S = 0.005
"""Pause in seconds between rounds of paused ranks."""

MOST_MISSED = 64
"""Boundaries at which FSDP computes, one after another, before an edit is refused for it."""

PATIENCE_NS = 10_000_000_000
"""Longest wait of one update for a copy with optimizer state, once a stall budget was too short."""


class HoldState(IntEnum):
    """Values of the word HELD."""

    RUNNING = 0
    HELD = 1
    STEPPING = 2


def cap_s(collective_timeout_s: float | None) -> float:
    """Longest hold, with a margin below the collective timeout."""
    if collective_timeout_s is None:
        return MAX_LEASE_S
    return max(0.0, min(MAX_LEASE_S, collective_timeout_s - max(5.0, 0.1 * collective_timeout_s)))


class Hold:
    """One rank's hold state, kept in the page's words."""

    def __init__(self, words: Words, *, cap_s: float, clock_ns: Callable[[], int]) -> None:
        self._words = words
        self._cap_ns = round(cap_s * 1e9)
        self._clock_ns = clock_ns
        self._began_ns = 0

    @property
    def state(self) -> HoldState:
        return HoldState(self._words[Word.HELD])

    def stay(self) -> bool:
        """Whether this rank wants to stay paused; sent in every round."""
        words = self._words
        if words[Word.HELD] == HoldState.RUNNING:
            return False
        until_ns = min(words[Word.HOLD_UNTIL_NS], self._began_ns + self._cap_ns)
        return self._clock_ns() < until_ns

    def update(self, heard: Round) -> None:
        """Act on a round's outcome: first the lease, then the agreed request."""
        if self._words[Word.HELD] != HoldState.RUNNING and not heard.stay:
            self.end()
        if heard.agreed is not None:
            self._act(heard.agreed)

    def pass_boundary(self) -> None:
        """Count one boundary while stepping; the last one resumes the hold."""
        words = self._words
        if words[Word.HELD] == HoldState.STEPPING:
            words[Word.HOLD_STEPS_LEFT] -= 1
            if words[Word.HOLD_STEPS_LEFT] <= 0:
                words[Word.HOLD_STEPS_LEFT] = 0
                words[Word.HELD] = HoldState.HELD

    def end(self) -> None:
        self._words[Word.HOLD_STEPS_LEFT] = 0
        self._words[Word.HELD] = HoldState.RUNNING

    def _act(self, request: Request) -> None:
        words = self._words
        held = words[Word.HELD] != HoldState.RUNNING
        if request.action == HOLD:
            if not held:
                self._began_ns = self._clock_ns()
            words[Word.HOLD_STEPS_LEFT] = 0
            words[Word.HELD] = HoldState.HELD
        elif request.action == STEP and held and request.argument > 0:
            words[Word.HOLD_STEPS_LEFT] = request.argument
            words[Word.HELD] = HoldState.STEPPING
        elif request.action == RESUME:
            self.end()


class BoundaryHandler:
    """One rank's part in acting at boundaries. Training thread only."""

    def __init__(
        self,
        page: ControlPage,
        agreement: Agreement,
        gate: TrainerGate,
        *,
        home: ParameterStorage,
        hold: Hold,
        editor: Editor,
        copy_state: Callable[[Request], None],
        note_extra: Callable[[int], None] = lambda _: None,
        answer: Callable[[bool], None],
        mirror: MirroredHome | None = None,
        after_edit: Callable[[], None] = lambda: None,
    ) -> None:
        """`answer` wakes the sidecar if `announce`, or if it asked to be woken; `copy_state` copies
        what a request wants of optimizer state outside the arena; `note_extra` notes the model's
        extra state for the request of that number; `mirror` copies the parameters when they are not
        in the arena; `after_edit`, after an edit on every rank, applied there or not, may be
        collective.
        """
        self._page = page
        self._words = page.words
        self._refused = ""
        self._agreement: Agreement | None = agreement
        self._gate = gate
        self._hold = hold
        self._editor = editor
        self._home = home
        self._copy_state = copy_state
        self._note_extra = note_extra
        self._mirror = mirror
        self._after_edit = after_edit
        self._answer = answer
        self.buffers_fit = True
        """Whether the buffers now are those of the step of this boundary."""
        self._agreed = page.words[Word.AGREED]
        self._agreed_count = 0
        self._iteration = 0
        self._missing = self._missed = 0
        """An edit that boundaries within FSDP's computation could not take, and their number."""
        self._postponed: tuple[Request, int] | None = None
        """An edit that was agreed on at such a boundary, and how many requests were until then."""
        self._within: bool | None = None
        """Whether FSDP computes at this boundary; None: nobody looked."""
        self._differs = False
        """FSDP computes at boundaries of some ranks and not of others: no edit reaches all."""
        self.stays: Callable[[], bool] | None = None
        """Whether to stay at this boundary; None: do not."""
        self._words[Word.AGREEMENT_STATE] = AGREEMENT_WORKS

    def at_boundary(self, at_home: bool, iteration: int = 0) -> None:
        """One boundary: collect a round, act on it, wait while paused, launch the next. `at_home`:
        the parameters are in the arena. Otherwise this rank takes part but promises nothing, since
        the others must not wait for it. `iteration`: backward passes this rank has seen; equal on
        all ranks in lock-step."""
        self._iteration = iteration
        agreement, words = self._agreement, self._words
        if agreement is None and self._postponed is not None and not self._home.computes():
            self._make_up_for_it(at_home)
        stays = self.stays is not None or words[_HELD]
        if agreement is None or (
            not stays and agreement.passes(wanted=words[_READY] > self._agreed)
        ):
            self._answer(False)
            return
        try:
            self._rounds(agreement, at_home)
        except AgreementLost as error:
            # PROMISED stays: the others may have acted, so this rank's part stays in doubt.
            self._agreement = None
            self._hold.end()
            self._words[Word.AGREEMENT_STATE] = AGREEMENT_LOST
            log.warning("paramd: the ranks no longer agree on boundaries: %s", error)
            self._answer(False)

    def forget(self) -> None:
        """Go inert in a forked child: words and rounds belong to the parent."""
        self._agreement = self._postponed = None

    def leave(self) -> None:
        """Process exit, at a boundary: no forward follows, so nothing is gathered again."""
        if self._postponed is not None and not self._home.computes():
            (request, count), self._postponed = self._postponed, None
            self._carry_out(request, count, lambda: self._editor.apply(request, self._gate))

    def close(self) -> None:
        """Finish the round in flight; no boundary follows.

        An edit that is still postponed is reported as failed. To apply it, all ranks would have to
        gather parameters again, and a rank may detach alone, after an exception.
        """
        agreement, self._agreement = self._agreement, None
        if self._postponed is not None:
            (request, count), self._postponed = self._postponed, None
            log.error(
                "paramd: edit %d is not applied on this rank, which detached before a boundary "
                "outside of FSDP's computation",
                request.number,
            )
            self._words[Word.EDIT_FAILED] = request.number
            note_failed(self._words, count, request.number)
        if agreement is not None:
            try:
                agreement.finish()
            except AgreementLost as error:
                log.info("paramd: last agreement round: %s", error)

    def _rounds(self, agreement: Agreement, at_home: bool) -> None:
        words = self._words
        self._within = None
        if words[_HELD]:
            self._hold.pass_boundary()
        begin_ns = time.monotonic_ns()
        heard = agreement.collect()
        if heard is not None:
            note_stand(self._page, Stand.ROUND, time.monotonic_ns() - begin_ns)
        if agreement.alone:
            heard = self._exchange(agreement, at_home)
        self._answer(heard is not None and self._hear(heard, at_home))
        if self.stays is not None:
            self._stay(agreement, at_home)
        if words[_HELD]:
            self._wait(agreement, at_home)
        if agreement.due and not agreement.alone:
            request = self._request(at_home, now=False)
            now_ns = time.monotonic_ns()
            words[Word.ROUNDS_LAUNCHED] += 1
            agreement.launch(
                request,
                pending=self._pending,
                stay=self._hold.stay(),
                step_time_ns=words[Word.STEP_TIME_NS],
                iteration=self._iteration,
                expected=words[Word.EXPECTED_NS] > now_ns,
                quiet=words[Word.CLIENTS_UNTIL_NS] < now_ns,
                within=self._within,
                postponed=self._postponed_number,
            )

    def _stay(self, agreement: Agreement, at_home: bool) -> None:
        """Run rounds and act on them until one rank does not want to stay; with a pause, until
        that ends, too."""
        words, begin_ns = self._words, time.monotonic_ns()
        try:
            while True:
                time.sleep(ROUND_S)
                heard = self._exchange(agreement, at_home)
                self._answer(self._hear(heard, at_home))
                if not heard.stay:
                    break
        finally:
            # A round after the last one that was heard must not ask others to stay.
            self.stays = None
        # It must not count as step time.
        words[Word.BOUNDARY_NS] = time.monotonic_ns()
        note_stand(self._page, Stand.PAUSE, words[Word.BOUNDARY_NS] - begin_ns)

    def _wants_to_stay(self) -> bool:
        return self._hold.stay() or (self.stays is not None and self.stays())

    def _wait(self, agreement: Agreement, at_home: bool) -> None:
        """Stay paused: run rounds and act on them until one ends the hold."""
        words, begin_ns = self._words, time.monotonic_ns()
        try:
            while words[Word.HELD] == HoldState.HELD:
                time.sleep(ROUND_S)
                self._answer(self._hear(self._exchange(agreement, at_home), at_home))
        except BaseException:
            self._hold.end()
            raise
        # The pause must not count as step time.
        words[Word.BOUNDARY_NS] = time.monotonic_ns()
        note_stand(self._page, Stand.PAUSE, words[Word.BOUNDARY_NS] - begin_ns)

    def _exchange(self, agreement: Agreement, at_home: bool) -> Round:
        request = self._request(at_home, now=True)
        self._words[Word.ROUNDS_LAUNCHED] += 1
        return agreement.exchange(
            request,
            pending=self._pending,
            stay=self._wants_to_stay(),
            iteration=self._iteration,
            within=self._within,
            postponed=self._postponed_number,
        )

    @property
    def _postponed_number(self) -> int:
        return self._postponed[0].number if self._postponed is not None else 0

    @property
    def _pending(self) -> bool:
        """Whether to have a round at each boundary: for a request, or to learn of the others
        whether they have postponed the edit, too."""
        return self._words[Word.READY] > self._agreed or self._postponed is not None

    def _request(self, at_home: bool, *, now: bool) -> Request:
        """This rank's promise; `now`: the round ends at this boundary, else at the next.

        A request that this rank cannot promise is refused, or the others would wait for it.
        """
        number = self._words[_READY]
        if not at_home:
            if self._editor.failed or self._waits():
                self._refuse(number, Refusal.AWAY)
            return NOTHING
        try:
            return promise(self._words, self._agreed, lambda one: self._accept(one, now))
        except Exception:
            log.exception("paramd: boundary request %d could not be examined", number)
            self._refuse(number, Refusal.FAULTY)
            return NOTHING

    def _accept(self, request: Request, now: bool) -> bool:
        if request.action == EDIT:
            if self._postponed is not None:
                # One at a time, in the order of their numbers.
                return False
            if self._differs:
                self._refuse(request.number, Refusal.GATHERED)
                return False
            # FSDP works on gathered parameters: an edit of the shards would not reach them. Wait.
            if self._computes():
                self._missed = self._missed + 1 if request.number == self._missing else 1
                self._missing = request.number
                if self._waits() or self._missed >= MOST_MISSED:
                    self._refuse(request.number, Refusal.GATHERED)
                return False
            return self._editor.accept(request, now=now)
        if not CAPTURE <= request.action <= RESUME:
            self._refuse(request.number, Refusal.FAULTY)
            return False
        return True

    def _computes(self) -> bool:
        """Whether FSDP computes at this boundary; the next round says so to the other ranks."""
        self._within = self._home.computes()
        return self._within

    def _waits(self) -> bool:
        """Whether training is paused at this boundary, where nothing changes until it continues."""
        return self._words[_HELD] == HoldState.HELD

    def _refuse(self, number: int, why: Refusal) -> None:
        if number > self._agreed and self._words[Word.REFUSED] != number:
            log.warning("paramd: boundary request %d is refused: %s", number, why.name)
            refuse(self._words, number, why)

    def _hear(self, heard: Round, at_home: bool) -> bool:
        """Publish a round's outcome and act on it; return whether to announce it."""
        words, request = self._words, heard.agreed
        if heard.differs and not self._differs:
            self._differs = True
            log.warning(
                "paramd: FSDP computes at boundaries of some ranks and not of others, as between "
                "stages of a pipeline; edits, which all ranks apply at one boundary, are refused"
            )
        if self._postponed is not None:
            self._settle(heard, at_home)
        if request is not None:
            self._agreed = request.number
            # Of every request: a later one may have replaced BUFFERS_WANTED since the promise.
            words[Word.BUFFERS_FOR] = 0
            if self._mirror is not None or self._wants(Word.BUFFERS_WANTED, request):
                # The last copy may be of the same step, but this request needs its own.
                words[Word.BUFFERS_STEP] = -1
            if request.action == EDIT:
                # Before any change: a death between this and EDIT_APPLIED shows as torn.
                words[Word.EDIT_AGREED] = request.number
            self._agreed_count += 1
            note_agreed(words, self._agreed_count, request.number)
            words[Word.AGREED_TOKEN] = request.token
            words[Word.AGREED_STEP] = words[Word.STEP]
            # Last: a reader of AGREED finds the history, token and step already written.
            words[Word.AGREED] = request.number
        # PROMISED after AGREED: a sidecar that finds no promise left reads its fate in AGREED.
        words[Word.ROUND_ITERATION] = heard.iteration
        note_apart(words, heard.iterations)
        words[Word.PROMISED] = 0
        words[Word.ROUNDS_COLLECTED] += 1
        self._hold.update(heard)
        if request is None:
            return False
        if request.action == EDIT and self._computes():
            # It was promised at the boundary before. A forward that has begun would compute partly
            # with the old values: all ranks, which are in the same forward, wait for its end. The
            # next round shows whether all are.
            self._postponed = request, self._agreed_count
        else:
            self._carry_out(request, self._agreed_count, lambda: self._do(request, at_home))
        return True

    def _settle(self, heard: Round, at_home: bool) -> None:
        """By a round since an edit was postponed: apply it where all ranks do, or give it up."""
        assert self._postponed is not None
        request, count = self._postponed
        if heard.postponed != request.number:
            # Others have applied it, at a boundary that is over: here it would be of another step.
            self._postponed = None
            log.error(
                "paramd: edit %d is not applied on this rank: FSDP computed at the boundary at "
                "which other ranks applied it",
                request.number,
            )
            self._carry_out(request, count, self._fail)
            self._answer(True)
            return
        if not self._computes():
            self._make_up_for_it(at_home)

    def _fail(self) -> None:
        """Report an edit that the other ranks have applied as failed on this one."""
        self._words[Word.EDIT_FAILED] = self._words[Word.EDIT_AGREED]
        self._after_edit()

    def _make_up_for_it(self, at_home: bool) -> None:
        """Apply the edit that was postponed, at the first boundary outside of FSDP's computation.

        Its step is this boundary's. Also once the ranks no longer agree: they did on this.
        """
        assert self._postponed is not None
        (request, count), self._postponed = self._postponed, None
        self._carry_out(request, count, lambda: self._do(request, at_home))
        self._answer(True)

    def _carry_out(self, request: Request, count: int, do: Callable[[], None]) -> None:
        """Act on an agreed request, the one of this `count`, and note its time. Never raises."""
        words, begin_ns = self._words, time.monotonic_ns()
        try:
            do()
        except Exception:
            # Swallowed: the other ranks wait for this one in the next round.
            log.exception("paramd: boundary request %d failed on this rank", request.number)
        copies = self._mirror is not None or any(self._wants(word, request) for word in _COPIED)
        if request.action == EDIT or (request.action == CAPTURE and copies):
            why = Stand.EDIT if request.action == EDIT else Stand.STATE
            note_stand(self._page, why, time.monotonic_ns() - begin_ns)
        if words[Word.EDIT_FAILED] == request.number:
            note_failed(words, count, request.number)

    def _wants(self, word: Word, request: Request) -> bool:
        """Whether this request needs it; the word may still name one that was withdrawn."""
        return self._words[word] == request.number

    def _do(self, request: Request, at_home: bool) -> None:
        words = self._words
        if request.action == EDIT:
            try:
                if at_home:
                    self._editor.apply(request, self._gate)
                else:
                    # Parameters left the arena after the promise; the other ranks still apply it.
                    words[Word.EDIT_FAILED] = request.number
            finally:
                # On all ranks, applied here or not.
                self._home.gather_again()
                self._after_edit()
        if self._mirror is None and self._wants(Word.BUFFERS_WANTED, request):
            self._copy_buffers(request)
        if self._wants(Word.EXTRA_WANTED, request):
            self._note_extra(request.number)
        if self._wants(Word.MOMENTS_WANTED, request):
            if self._mirror is not None:
                # Before the first store: MIRRORED_FOR vouches for the state's copies, too.
                self._gate.begin_mirror()
            self._copy_state(request)
            self._gate.patience_ns = PATIENCE_NS
        fit = self.buffers_fit or not self._wants(Word.BUFFERS_WANTED, request)
        if self._mirror is not None and request.action == CAPTURE and at_home and fit:
            # Last: its final store (MIRRORED_FOR) lets the sidecar fill the request.
            with self._refusing_buffers():
                self._mirror.refresh_for(request, self._gate)

    def _copy_buffers(self, request: Request) -> None:
        """Copy the buffers for a request, unless a forward since the update may have changed them:
        they would be of the next step. The request is then missed, and made again."""
        if not self.buffers_fit:
            return
        words = self._words
        with self._refusing_buffers():
            self._home.copy_buffers()
            words[Word.BUFFERS_STEP] = words[Word.STEP]
            # Last: it vouches for the bytes and for the step.
            words[Word.BUFFERS_FOR] = request.number

    @contextmanager
    def _refusing_buffers(self) -> Iterator[None]:
        """Report to the sidecar, and once to the log, buffers whose shape has changed."""
        try:
            yield
        except BufferChangedError as error:
            why = str(error)
            if why != self._refused:
                log.warning("paramd: %s", why)
            self._refused = why
            write_text(self._page, why)
            # Last: a reader of it must find the text.
            self._words[Word.BUFFERS_STEP] = BUFFERS_REFUSED
