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
from paramd.trainer.acting import Acting, EditorLike, MirrorLike
from paramd.trainer.agreement import Agreement
from paramd.trainer.holding import Hold

log = logging.getLogger("paramd")

# Plain numbers cost a fraction of enumerations, and these are looked at in every step.
_WANT, _ARM_STEP, _STEP = int(Word.WANT), int(Word.ARM_STEP), int(Word.STEP)
_BOUNDARY_NS, _STEP_TIME_NS = int(Word.BOUNDARY_NS), int(Word.STEP_TIME_NS)

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
        editor: EditorLike,
        copy_buffers: Callable[[], None],
        mirror_moments: Callable[[], None],
        hold_cap_s: float,
        stall_budget_ns: int,
        mirror: MirrorLike | None = None,
    ) -> None:
        self._words = page.words
        self._wake_descriptor = wake_descriptor
        self._home = home
        self._editor = editor
        self._gate = TrainerGate(page, stall_budget_ns=stall_budget_ns, mirrored=mirror is not None)
        self._acting = Acting(
            page,
            agreement,
            self._gate,
            hold=Hold(page.words, cap_s=hold_cap_s, clock_ns=time.monotonic_ns),
            editor=editor,
            copy_buffers=copy_buffers,
            mirror_moments=mirror_moments,
            answer=self._answer,
            mirror=mirror,
        )
        self._want_seen = page.words[Word.WANT]
        self._armed_seen = 0
        self._owner: object | None = None
        self.before_update: Callable[[object], None] = _nothing
        """Called with the owner right before an update window opens; must not raise."""

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
            self._note_time(time.monotonic_ns())
            self._acting.at_boundary(at_home)
        except Exception:
            log.exception("paramd: a boundary failed; the service degrades, training goes on")

    def forget(self) -> None:
        """In a forked child: the words and the rounds are the parent's alone."""
        self._owner = _NOBODY
        self._acting.forget()

    def close(self) -> None:
        """Ends a round under way; no boundary follows."""
        self._acting.close()

    def _parameters_at_home(self) -> bool:
        if self._editor.failed:
            # SEQ stays odd: the parameters mix two states.
            return False
        try:
            if self._home.check():
                names = self._home.take_back()
                log.info("paramd: took %d parameters back, first %s", len(names), names[:1])
        except Exception as error:
            # SEQ stays odd: what the arena holds is not what the training uses.
            log.error("paramd: parameters are served no more: %s", error)
            return False
        return True

    def _answer(self, announce: bool) -> None:
        """Wakes the sidecar for what was agreed, or when it asked for this boundary."""
        words = self._words
        want, armed = words[_WANT], words[_ARM_STEP]
        if armed and armed != self._armed_seen and armed == words[_STEP]:
            self._armed_seen = armed
            announce = True
        if announce or want != self._want_seen:
            self._want_seen = want
            words[Word.ANNOUNCE] += 1
            wake(self._wake_descriptor)

    def _note_time(self, now_ns: int) -> None:
        words = self._words
        last_ns, words[_BOUNDARY_NS] = words[_BOUNDARY_NS], now_ns
        if last_ns:
            smoothed, latest = words[_STEP_TIME_NS], now_ns - last_ns
            words[_STEP_TIME_NS] = latest if smoothed == 0 else (7 * smoothed + latest) // 8
