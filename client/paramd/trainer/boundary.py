"""What runs in the training loop: the begin and the end of every update.

Everything here is on the trainer's critical path: about 20 microseconds a step when
nothing is asked. Whatever fails here costs the service, never the training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from paramd.memory.control_page import ControlPage, Word
from paramd.memory.descriptors import wake
from paramd.memory.gate import TrainerGate
from paramd.trainer.agreement import Agreement, AgreementLost

log = logging.getLogger("paramd")

AGREEMENT_WORKS, AGREEMENT_LOST = 1, 2


# Owns the window for ever, so that no other owner opens or closes one.
_NOBODY = object()


def _nothing(_owner: object) -> None:
    """What happens before an update unless somebody wants gradients."""


class HomeLike(Protocol):
    """What the boundary needs of the parameters' home (see rehome.py)."""

    def check(self) -> list[str]:
        """Names of parameters that are no longer in the arena; cheap."""

    def take_back(self) -> list[str]:
        """Copies them into the arena again and returns their names."""

    def copy_buffers(self) -> None:
        """Copies buffers into the arena."""


class Boundary:
    """Opens and closes update windows; one owner at a time.

    An optimizer whose step raised leaves its window open: its parameters may mix two
    steps. The window closes with that owner's next good step.
    """

    def __init__(
        self,
        page: ControlPage,
        wake_descriptor: int,
        home: HomeLike,
        agreement: Agreement,
        *,
        stall_budget_ns: int,
    ) -> None:
        self._words = page.words
        self._wake_descriptor = wake_descriptor
        self._home = home
        self._gate = TrainerGate(page, stall_budget_ns=stall_budget_ns)
        self._agreement: Agreement | None = agreement
        self._agreed = page.words[Word.AGREED]
        self._want_seen = page.words[Word.WANT]
        self._owner: object | None = None
        self.before_update: Callable[[object], None] = _nothing
        """Called with the owner right before an update window opens; must not raise."""
        self._words[Word.AGREEMENT_STATE] = AGREEMENT_WORKS

    def begin(self, owner: object) -> None:
        """Opens an update window unless one is open already."""
        if self._owner is None:
            self._owner = owner
            # While SEQ is even: copies of parameters go on meanwhile.
            self.before_update(owner)
            self._gate.begin_update()

    def end(self, owner: object) -> None:
        """Closes the window that `owner` opened, and acts on what the boundary brings."""
        if self._owner is not owner:
            return
        self._owner = None
        try:
            at_home = self._parameters_at_home()
            if at_home:
                self._gate.end_update()
            self._act(at_home)
        except Exception:
            log.exception("paramd: a boundary failed; the service degrades, training goes on")

    def forget(self) -> None:
        """In a forked child: the words and the rounds are the parent's alone."""
        self._owner = _NOBODY
        self._agreement = None

    def close(self) -> None:
        """Ends a round under way; no boundary follows."""
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            try:
                agreement.finish()
            except AgreementLost as error:
                log.info("paramd: last agreement round: %s", error)

    def _parameters_at_home(self) -> bool:
        try:
            if self._home.check():
                names = self._home.take_back()
                log.info("paramd: took %d parameters back, first %s", len(names), names[:1])
        except Exception as error:
            # SEQ stays odd: what the arena holds is not what the training uses.
            log.error("paramd: parameters are served no more: %s", error)
            return False
        return True

    def _act(self, at_home: bool) -> None:
        words = self._words
        self._note_time(time.monotonic_ns())
        # A rank that serves nothing still takes part: the others must not wait for it.
        agreed = self._agree(words[Word.READY] if at_home else 0)
        announce = False
        if agreed > self._agreed:
            step = words[Word.STEP]
            if words[Word.BUFFERS_WANTED] > self._agreed:
                self._home.copy_buffers()
                words[Word.BUFFERS_STEP] = step
            self._agreed = agreed
            words[Word.AGREED_STEP] = step
            words[Word.AGREED] = agreed
            announce = True
        want = words[Word.WANT]
        if announce or want != self._want_seen:
            self._want_seen = want
            words[Word.ANNOUNCE] += 1
            wake(self._wake_descriptor)

    def _agree(self, ready: int) -> int:
        if self._agreement is None:
            return self._agreed
        words = self._words
        try:
            return self._agreement.boundary(ready, words[Word.STEP_TIME_NS])
        except AgreementLost as error:
            self._agreement = None
            words[Word.AGREEMENT_STATE] = AGREEMENT_LOST
            log.warning("paramd: the ranks no longer agree on boundaries: %s", error)
            return self._agreed

    def _note_time(self, now_ns: int) -> None:
        words = self._words
        last_ns, words[Word.BOUNDARY_NS] = words[Word.BOUNDARY_NS], now_ns
        if last_ns:
            smoothed, latest = words[Word.STEP_TIME_NS], now_ns - last_ns
            words[Word.STEP_TIME_NS] = latest if smoothed == 0 else (7 * smoothed + latest) // 8
