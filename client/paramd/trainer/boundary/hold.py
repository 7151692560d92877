"""Holds: training waits inside a boundary until all ranks agree to continue.

    running --HOLD--> held --STEP k--> stepping --k boundaries later--> held
                       |                  |
                       +--RESUME, or one rank does not want to stay--> running

All ranks change state together: every transition comes from the same round or the same count
of boundaries. A rank wants to stay while its sidecar renews HOLD_UNTIL_NS and the cap is not
reached; so whichever process dies, the hold ends everywhere when its lease runs out.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from paramd.memory.control_page import Word, Words
from paramd.trainer.boundary.agreement import HOLD, RESUME, STEP, Request, Round
from paramd.wire import MAX_LEASE_S

ROUND_S = 0.005
"""Pause between rounds of held ranks."""


class HoldState(IntEnum):
    """Values of the word HELD."""

    RUNNING = 0
    HELD = 1
    STEPPING = 2


def cap_s(collective_timeout_s: float | None) -> float:
    """Longest hold, with a margin below the collective timeout."""
    if collective_timeout_s is None:
        return MAX_LEASE_S
    margin_s = max(5.0, 0.1 * collective_timeout_s)
    return max(0.0, min(MAX_LEASE_S, collective_timeout_s - margin_s))


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
        """Whether this rank wants to stay held; sent in every round."""
        words = self._words
        if words[Word.HELD] == HoldState.RUNNING:
            return False
        until_ns = min(words[Word.HOLD_UNTIL_NS], self._began_ns + self._cap_ns)
        return self._clock_ns() < until_ns

    def hear(self, heard: Round) -> None:
        """Act on a round's outcome: first the lease, then the agreed request."""
        words = self._words
        if words[Word.HELD] != HoldState.RUNNING and not heard.stay:
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
        """Let training continue."""
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
