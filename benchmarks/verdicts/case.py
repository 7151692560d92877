"""A case of the verdict's campaign: a training, and the first line that it must have or lack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.verdicts.training import Training
    from benchmarks.verdicts.watch import Job

VALUES = frozenset({"non-finite", "norm-jump", "gradient-jump", "logged-number"})
"""Rules that a training with wrong values may break first."""

LOST = frozenset({"stale-rank"})
STUCK = frozenset({"stuck", "stalled-rank"})
SLOW = frozenset({"slow-rank", "straggler"})
DRIFT = frozenset({"replica-drift"})
CLOCK = frozenset({"clock-jump"})
EXPORT = frozenset({"failed-export"})

WITHIN_S = 60.0
"""Seconds from the onset to the right first line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The first line that a sick training must have."""

    rules: frozenset[str] = frozenset()
    """Rules of the alert that the line is of; empty: any."""
    ranks: frozenset[int] = frozenset()
    """Ranks that the alert must name, and no other; empty: any."""
    layer: str = ""
    """A part of the tensor's name; empty: any."""
    says: tuple[str, ...] = ()
    """Words of which the line must contain one; empty: any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training of two ranks."""

    name: str
    what: str
    """What happens in it, in one sentence."""
    train: Callable[[Training], None]
    """Runs in each rank; never returns."""
    expected: Expected | None = None
    """None: the training is healthy, and no line may say otherwise."""
    pace_s: float = 0.1
    """Seconds of a usual step."""
    act: Callable[[Job], None] | None = None
    """What somebody outside does at the onset."""
    own_clock: bool = False
    """Whether rank 1 and what it starts have a clock of their own (`training.CLOCK_FILE`)."""
    simulated: str = ""
    """What is not the real thing, and what stands for it."""


@dataclass(slots=True)
class Cases:
    """Cases of one file, by name, in the order of the file."""

    found: dict[str, Case] = field(default_factory=dict)

    def add(
        self,
        what: str,
        *,
        expected: Expected | None = None,
        pace_s: float = 0.1,
        act: Callable[[Job], None] | None = None,
        own_clock: bool = False,
        simulated: str = "",
    ) -> Callable[[Callable[[Training], None]], Callable[[Training], None]]:
        """Make a case of a function, under its name with dashes."""

        def added(train: Callable[[Training], None]) -> Callable[[Training], None]:
            name = train.__name__.replace("_", "-")
            self.found[name] = Case(
                name=name, what=what, train=train, expected=expected, pace_s=pace_s, act=act,
                own_clock=own_clock, simulated=simulated,
            )  # fmt: skip
            return train

        return added
