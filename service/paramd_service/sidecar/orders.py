"""The control plane's orders that this rank has taken: each is obeyed once.

An order's number rises from one to the next, and from a control plane to its successor. Orders that
overtake each other are told from those that are played again as long as no more than `KEPT` came in
between. The highest number stands in the control page, which outlives this process: its successor
refuses whatever this one may have taken.
"""

from __future__ import annotations

from paramd.errors import UnreachableError
from paramd.memory.control_page import ControlPage, Word
from paramd.security.tickets import GENERATION_STEP, ORDER_BITS

KEPT = 1024


def fenced(generation: int, by: int) -> str:
    """Why a control plane of a lower generation than one before it is not obeyed."""
    return (
        f"a control plane of generation {by} has taken over; generation {generation} is no longer "
        "accepted. Generations follow the clock: if it is the later one, its host's clock is "
        f"{(by - generation) / 1000:.0f} s behind; set that, or start it with the state directory "
        "(PARAMD_STATE_DIR) of the one before"
    )


class ReplayedError(UnreachableError):
    """An order that this rank has taken already, or that may be one of those."""


class Orders:
    """Not thread-safe."""

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self._floor = page[Word.ORDERED]
        self._taken: set[int] = set()

    def take(self, number: int) -> None:
        """Raise ReplayedError if it was taken before, or comes too late to tell."""
        of, by = number >> ORDER_BITS, self._floor >> ORDER_BITS
        if by - of >= GENERATION_STEP:  # less may be one that has given 2^20 orders
            raise ReplayedError(fenced(of, by))
        if number <= self._floor or number in self._taken:
            raise ReplayedError(
                "the control plane's order was taken already, or is too old to tell; each is good "
                "once, so order it again"
            )
        self._taken.add(number)
        self._page[Word.ORDERED] = max(self._page[Word.ORDERED], number)
        if len(self._taken) > KEPT:
            self._floor = min(self._taken)
            self._taken.remove(self._floor)
