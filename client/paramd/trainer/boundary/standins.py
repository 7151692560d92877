"""Blocks in which other weights temporarily replace the training's: averaged, merged, evaluated.

    enter    SEQ odd, as when an update begins, before anything changes. The page's text is the
             label, and the state rests with a digest that no samples have: only readers that
             accept changed values get them, with the label
    leave    the label is removed, and the state rests with its digest from before the block:
             parameters not brought back count as changed. Training that continues settles the
             state, unless its step was settled before with other values: one step never has two

If the block raised and the samples differ, the values are of unknown origin: the label stays until
training continues.

No boundary takes place in a block, except before an update inside; then this rank promises
nothing. So every rank has one boundary for each update, whether it enters a block or not.

All methods are called with the boundary's lock held.
"""

from __future__ import annotations

from collections.abc import Callable

from paramd.memory.control_page import STANDS_IN, ControlPage, Word
from paramd.memory.gate import TrainerGate

CHANGED = -1
"""A digest that no samples have."""


class StandIns:
    """The open blocks, and the state before them that their end needs."""

    def __init__(
        self,
        page: ControlPage,
        gate: TrainerGate,
        digest: Callable[[], int],
        say: Callable[..., None],
    ) -> None:
        """`digest`: of the samples as they are now, constant where the arena is a mirror; `say`
        publishes why the parameters are not served.
        """
        self._words = page.words
        self._gate = gate
        self._digest = digest
        self._say = say
        self._labels: list[str] = []
        self._step = 0
        self._before = CHANGED
        self._why = ""
        self._readable = self._settled = False
        self.void = ""
        """Why the present step is not served again; empty when it may be."""

    @property
    def open(self) -> bool:
        return bool(self._labels)

    def enter(self, label: str, step: int, iteration: int, *, why: str) -> None:
        """Begin a block; `why` is the page's present text."""
        words = self._words
        # First: whatever fails below, no boundary settles what the block holds.
        self._labels.append(label)
        if len(self._labels) == 1:
            even = words[Word.SEQ] & ~1
            # The first state of all has no digest of a settled one.
            self._settled = 0 < even == words[Word.SETTLED_SEQ] and words[Word.STEP] == step
            self._readable = bool(words[Word.REST]) or not words[Word.SEQ] & 1
            resting = words[Word.REST_DIGEST] if words[Word.REST] else CHANGED
            self._before = words[Word.SETTLED_DIGEST] if self._settled else resting
            # The label of an earlier block is no reason.
            self._why = why if words[Word.UNSERVED] != STANDS_IN else ""
            self._step = step
            self._gate.begin_update()
        self._tell(step, iteration)

    def leave(self, label: str, step: int, iteration: int, *, failed: bool) -> None:
        """End a block; `failed`: it raised."""
        self._labels.remove(label)
        if self._labels:
            self._tell(step, iteration)
            return
        if step != self._step:
            # An update inside changed what was to be brought back.
            self._before, self._settled = CHANGED, False
        same = self._digest() == self._before
        if self._settled and not same:
            self.void = (
                f"step {step} was served before other weights stood in ({label!r}), and its "
                "values are no longer the same; the next step is served again"
            )
        if failed and not same:
            return
        self._words[Word.REST] = 0
        self._say(self._why)
        if self._readable:
            self._gate.rest(step, iteration, self._before)

    def _tell(self, step: int, iteration: int) -> None:
        # While nothing rests: a copy with one label never gets another.
        self._words[Word.REST] = 0
        self._say(", ".join(self._labels), unserved=STANDS_IN)
        if self._readable:
            self._gate.rest(step, iteration, CHANGED)
