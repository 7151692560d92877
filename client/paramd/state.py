"""The name of a state: all that must be equal for bytes to be of one moment of one training.

Lookups, comparisons and stores of states use the whole name. A bare step is no name: after a
rollback steps come again with other values, an edit changes parameters within a step, and an
incarnation counts edits from 0.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paramd.v1 import common_pb2


class At(NamedTuple):
    """A step to come, by name; or, for gradients, an update."""

    history: int
    """As in `StateName`, of the present incarnation."""
    step: int


class StateName(NamedTuple):
    """Names one state of one training. Ordered as the training made them, within a job."""

    incarnation: int
    """Rises with every attach."""
    history: int
    """Rollbacks in this incarnation so far, undone ones too: steps come again after each."""
    step: int
    """Finished updates; for gradients, the update that consumes them. -1: none."""
    edits: int
    """Edits applied in this incarnation; -1 for gradients, which edits do not change."""
    label: str = ""
    """Label of weights that replaced the training's; empty: the training's own."""

    @classmethod
    def of(cls, header: common_pb2.Header) -> StateName:
        """The state that an answer is about."""
        return cls(header.incarnation, header.history, header.step, header.edits, header.label)

    def __str__(self) -> str:
        said = f"step {self.step}"
        if self.edits > 0:
            said += f" with {self.edits} edits"
        if self.history > 0:
            said += f" after {self.history} rollbacks"
        if self.label:
            said += f" ({self.label!r} weights)"
        return said


class Settling(IntEnum):
    """How far a state of one update has come. Numbers as in `paramd.v1.Settling`.

    A script may change parameters after an update, until training continues. So the same step has
    two states wherever it does, and ranks come to the second one at different times.
    """

    UNKNOWN = 0
    """Settled, and not known how; or of no training."""
    LEFT = 1
    """As the update left it; the script may change it yet."""
    KEPT = 2
    """Settled, as the update left it."""
    CHANGED = 3
    """Settled, after changes of the script's."""
    CHANGING = 4
    """Not settled; the script has changed it and may go on."""
