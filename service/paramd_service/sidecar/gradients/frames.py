"""What is requested of one update's gradients, and by whom; see slots.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from paramd.memory.control_page import Word
from paramd.memory.gradient_program import Notes, united
from paramd_service.sidecar.gradients.memory import SlotMemory

LOSSLESS_S = 0.9
"""How long a reader that wants every frame counts as present after it was last heard."""

Spans = tuple[tuple[int, int], ...]
Work = Callable[[SlotMemory, int], Any]
"""Takes what it needs from a slot's room, on the gradient thread."""


class State(Enum):
    """State of a frame; see slots.py."""

    QUEUED = "waits for a slot"
    RESERVING = "its memory is made"
    ARMED = "waits for its update"
    SERVING = "is taken from its slot"


@dataclass(eq=False, slots=True)
class Want:
    """One request."""

    spans: Spans
    work: Work
    done: asyncio.Future[tuple[Any, Notes]]

    def refuse(self, error: Exception) -> None:
        """Fail the request, unless it is done already."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # mark as retrieved, even when nobody waits any more


@dataclass(eq=False, slots=True)
class Frame:
    """All requests of one update."""

    step: int
    state: State = State.QUEUED
    wants: list[Want] = field(default_factory=list)
    slot: int = -1
    programs: dict[int, Spans] = field(default_factory=dict)
    """Spans by version: the trainer reports which one it served."""

    def spans(self) -> Spans:
        """All spans that are wanted."""
        return united([span for want in self.wants for span in want.spans])

    def program(self) -> Spans:
        """The spans of the latest program."""
        return self.programs[max(self.programs)] if self.programs else ()


class LosslessReaders:
    """Tells the trainer which updates the readers that want every frame must not miss."""

    def __init__(self, words: memoryview[int]) -> None:
        """`words`: the control page's."""
        self._words = words
        self._until_s: dict[int, float] = {}

    def heard(self, every: int) -> None:
        """Note a reader of all multiples of `every`; 0: one that may miss some."""
        if every <= 0:
            return
        now_s = time.monotonic()
        self._until_s[every] = now_s + LOSSLESS_S
        self._until_s = {n: until_s for n, until_s in self._until_s.items() if until_s > now_s}
        self._words[Word.LOSSLESS_UNTIL_NS] = int(max(self._until_s.values()) * 1e9)
        # Readers of other multiples are not waited for: nobody asks for most of those steps.
        self._words[Word.LOSSLESS_EVERY] = min(self._until_s)
