"""The course of each layer's gradient, and what is wrong with the present one. Pure.

A finding has to hold in two ways: the change is sharp against the layer's own recent course (or
goes on growing beyond all it has ever been), and it matters in the whole: the total norm jumps as
well, or the layer makes up most of it. One finding names the worst layer and lists the others.

Logarithms are compared: a norm that doubles is as far from its past at 1e-6 as at 1e6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from paramd_service.alerts.book import Finding, Severity
from paramd_service.alerts.config import Rule
from paramd_service.alerts.known import Known
from paramd_service.alerts.suspects import onset_of

KEPT = 40
"""Samples remembered of each layer and of the total."""
LEAST = 6
"""Samples needed before a change can be judged."""

JUMP = math.log(8.0)
"""Least factor between a norm and all of its recent course for a jump."""
SPREADS = 6.0
"""A jump is also this many times the spread of the recent course away from it."""
RECENT = 12
"""Samples that are the recent course."""
CONFIRMED = 3
"""Samples in a row that must show it: one bad batch passes by itself."""

GROWN = math.log(20.0)
"""Least factor over everything before its rise for a norm that grows slowly."""
RISING = 5
"""Samples of a rise that must have been the highest so far."""
HIGHER = math.log(2.0)
"""Factor over everything before for a norm that more samples follow at once: of a slow growth each
usual interval hides a large part, and an alert may come too late."""
HALVED = math.log(2.0)
"""How far below its highest a norm ends its rise."""
MATTERS = 0.5
"""Share of the squared total that makes a layer matter by itself."""
TOTAL_JUMP = math.log(4.0)
"""Factor by which the total must exceed its recent course beside a layer's jump."""

VANISHED = math.log(1e3)
"""Factor below its recent course at which a gradient vanishes, beyond what the others do."""
CONTRIBUTED = 1e-4
"""Least usual share of the squared total of a layer that can vanish."""
DEAD = 6
"""Samples in a row with a gradient of zeros before a layer counts as dead."""
ABSENT = 6
"""Samples in a row without a gradient, though one is wanted."""

MAX_LISTED = 5
"""Most layers listed beside the worst."""

EXPLODES = "gradients explode"
VANISHES = "gradients vanish"
STOPPED = "gradients are missing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """The gradient of one layer in one update, with the loss scale and the clipping undone."""

    fqn: str
    norm: float
    """Of all elements; NaN when none is finite."""
    absent: bool = False
    """It has no gradient although it requires one."""


@dataclass(slots=True)
class Course:
    """The last logarithms of one norm; zeros are counted apart."""

    logs: Known = field(default_factory=lambda: Known(KEPT))
    """Logarithms of samples in which nothing was wrong."""
    highest: float = -math.inf
    """Highest logarithm that was ever usual."""
    zeros: int = 0
    """Zeros in a row, up to the last sample."""
    absent: int = 0
    """Samples in a row without a gradient."""
    ever_zero: bool = False
    ever_absent: bool = False
    odd: int = 0
    """Samples in a row that were far above, or far below (negative)."""
    odd_step: int = -1
    """Step of the first in the last row of samples that were odd, zero, absent or rising."""
    rising: int = 0
    """Samples of the present rise that were the highest so far."""
    rise_from: float = 0.0
    """Highest logarithm before the rise."""

    @property
    def is_warm(self) -> bool:
        return len(self.logs) >= LEAST

    def expected(self) -> tuple[float, float, float, float]:
        """(lowest and highest logarithm that the recent course leads one to expect, its median,
        its spread). The trend is carried on for one sample: what has grown steadily may grow on."""
        recent = self.logs.values[-RECENT:]
        middle = median(recent)
        slope = _slope(recent)
        rest = [value - slope * place for place, value in enumerate(recent)]
        spread = 1.4826 * median(abs(one - median(rest)) for one in rest)
        ahead = slope * len(recent) + median(rest)
        return min(*recent, ahead), max(*recent, ahead), middle, spread

    def take(self, value: float, step: int) -> None:
        """Add a sample in which nothing was wrong."""
        self.logs.add(step, value)
        self.highest = max(self.highest, value)

    def rewind(self, step: int) -> None:
        """Drop what came after a step that training has returned to: gradients of an earlier time
        may be far from it."""
        self.logs.rewind(step)
        self.highest = max(self.logs.values, default=-math.inf)
        self.zeros = self.absent = self.odd = self.rising = 0

    def usual(self) -> float:
        """Median of the recent course; -inf before the first sample."""
        return median(self.logs.values[-RECENT:]) if self.logs else -math.inf


def _slope(values: Sequence[float]) -> float:
    """Theil and Sen's slope: the median of all pairs', which outliers do not move."""
    return median(
        (values[b] - values[a]) / (b - a)
        for a in range(len(values))
        for b in range(a + 1, len(values))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """A finding about one layer."""

    kind: str
    fqn: str
    weight: float
    """How much it matters: the worst has the most."""
    why: str


class Courses:
    """The courses of all layers of one training and of their total."""

    def __init__(self) -> None:
        self._of: dict[str, Course] = {}
        self._total = Course()
        self._last: dict[str, float] = {}
        """Squares of each layer's last norm, by name."""
        self._since: dict[str, int] = {}
        """The step at which each kind of trouble was first seen."""
        self._step = -1
        self.suspicious = False
        """Whether the last sample was odd, and more of them should follow at once."""

    @property
    def warm_count(self) -> int:
        """Samples of the total so far, up to `LEAST`."""
        return min(len(self._total.logs), LEAST)

    def has_gradient(self, fqn: str) -> bool:
        """Whether the last sample of a layer had a gradient other than zeros."""
        course = self._of.get(fqn)
        return course is not None and not course.absent and self._last.get(fqn, 0.0) > 0

    def total(self) -> float:
        """Norm of the gradients of all layers, each as it was sampled last."""
        return math.sqrt(sum(self._last.values()))

    def keep_only(self, fqns: Iterable[str]) -> None:
        """Drop layers that a new layout no longer has."""
        kept = set(fqns)
        self._of = {fqn: one for fqn, one in self._of.items() if fqn in kept}
        self._last = {fqn: one for fqn, one in self._last.items() if fqn in kept}

    def forget(self, fqns: Iterable[str]) -> None:
        """Drop layers that are frozen on purpose: one that trains again begins anew, and so does
        the total, which is less without them."""
        for fqn in fqns:
            if self._of.pop(fqn, None) is not None:
                self._total = Course()
            self._last.pop(fqn, None)

    def take(self, sampled: Sequence[Sampled], step: int) -> list[Finding]:
        """Judge the gradients of one update, which then become part of the course unless they are
        wrong. Returns at most one finding of each kind."""
        self.suspicious = False
        if step < self._step:
            self._rewind(step)
        self._step = step
        known = [one for one in sampled if self._course(one.fqn).is_warm]
        squares = {
            one.fqn: one.norm**2 for one in sampled if not one.absent and math.isfinite(one.norm)
        }
        self._last.update(squares)
        # Layers that have just begun to train, as after unfreezing, are not compared.
        total = math.log(sum(squares.get(one.fqn, 0.0) for one in known) or 1e-300) / 2
        whole = math.log(sum(self._last.values()) or 1e-300) / 2
        jumped, far = self._total_moved(total if known else whole)
        told: list[Told] = []
        for one in sampled:
            told += self._judged(one, step, squares, sum(squares.values()), jumped, far)
        told += self._whole(whole)
        if any(one.kind == EXPLODES for one in told):
            # Where the total is clipped, all others shrink as one explodes.
            told = [one for one in told if one.kind != VANISHES]
        if not any(one.kind == EXPLODES for one in told) and not jumped and not self._total.odd:
            self._total.take(whole, step)
        return self._findings(told, step)

    def _rewind(self, step: int) -> None:
        for course in (self._total, *self._of.values()):
            course.rewind(step)
        self._since = {kind: since for kind, since in self._since.items() if since <= step}

    def _course(self, fqn: str) -> Course:
        return self._of.setdefault(fqn, Course())

    def _total_moved(self, total: float) -> tuple[bool, float]:
        """Whether the total is sharply above its recent course, and how far it is from it."""
        if not self._total.is_warm:
            return False, 0.0
        _, high, _, spread = self._total.expected()
        return total - high > max(TOTAL_JUMP, SPREADS * spread), total - self._total.usual()

    def _judged(
        self,
        one: Sampled,
        step: int,
        squares: Mapping[str, float],
        total_square: float,
        total_jumped: bool,
        total_far: float,
    ) -> list[Told]:
        course = self._course(one.fqn)
        if one.absent:
            return self._absent(one, course)
        # One that now and then has none, as an expert without a token, is never dead.
        course.ever_absent |= course.absent > 0
        course.absent = 0
        if not math.isfinite(one.norm):
            return []
        share = squares[one.fqn] / total_square if total_square > 0 else 0.0
        if one.norm == 0:
            return self._dead(one, course, total_square)
        course.ever_zero |= course.zeros > 0
        course.zeros = 0
        value = math.log(one.norm)
        if not course.is_warm:
            course.take(value, step)
            return []
        low, high, middle, spread = course.expected()
        above = value - high > max(JUMP, SPREADS * spread) and (total_jumped or share > MATTERS)
        # All gradients shrink as training converges: one vanishes if it shrinks beyond the others.
        below = low - value + min(total_far, 0.0) > max(VANISHED, SPREADS * spread)
        if above or (below and self._contributed(course)):
            course.odd = max(course.odd, 0) + 1 if above else min(course.odd, 0) - 1
            course.odd_step = step if abs(course.odd) == 1 else course.odd_step
            self.suspicious = True
            if abs(course.odd) < CONFIRMED:
                return []
            ratio = math.exp(value - middle)
            if above:
                why = f"is {ratio:.3g} times its usual norm"
                return [Told(kind=EXPLODES, fqn=one.fqn, weight=squares[one.fqn], why=why)]
            why = f"is {ratio:.1g} of its usual norm"
            return [Told(kind=VANISHES, fqn=one.fqn, weight=middle, why=why)]
        course.odd = 0
        higher = value - course.highest > HIGHER and (total_far > HIGHER or share > MATTERS)
        grown = self._grows(course, value)
        course.take(value, step)
        # Until it is known whether the rise goes on, or was one bad batch.
        rises = course.rising > 0 and value - course.rise_from > HIGHER and share > MATTERS
        self.suspicious |= higher or rises
        if grown > 0 and (total_far > TOTAL_JUMP or share > MATTERS):
            self.suspicious = True
            why = f"has grown to {math.exp(grown):.3g} times what it was, and grows on"
            return [Told(kind=EXPLODES, fqn=one.fqn, weight=squares[one.fqn], why=why)]
        return []

    def _contributed(self, course: Course) -> bool:
        return 2 * (course.usual() - self._total.usual()) > math.log(CONTRIBUTED)

    def _grows(self, course: Course, value: float) -> float:
        """By which logarithm a norm has grown in a rise that goes on; 0 while it is none."""
        if value > course.highest:
            if course.rising == 0:
                course.rise_from, course.odd_step = course.highest, self._step
            course.rising += 1
        elif value < course.highest - HALVED:
            course.rising = 0
        grown = value - course.rise_from
        return grown if course.rising >= RISING and grown > GROWN else 0.0

    def _absent(self, one: Sampled, course: Course) -> list[Told]:
        course.absent += 1
        course.odd_step = self._step if course.absent == 1 else course.odd_step
        if not course.is_warm or course.ever_absent:
            course.ever_absent = True
            return []
        self.suspicious = course.absent <= ABSENT
        if course.absent < ABSENT:
            return []
        why = "has no gradient any more, though it requires one: it no longer trains"
        return [Told(kind=STOPPED, fqn=one.fqn, weight=course.usual(), why=why)]

    def _dead(self, one: Sampled, course: Course, total_square: float) -> list[Told]:
        course.zeros += 1
        course.odd_step = self._step if course.zeros == 1 else course.odd_step
        if not course.is_warm or course.ever_zero:
            # Experts without a token and rows without a sample have such updates.
            course.ever_zero = True
            return []
        self.suspicious = course.zeros <= DEAD
        if course.zeros < DEAD:
            return []
        rest = "" if total_square > 0 else ", as are all others"
        why = f"is all zeros{rest}: nothing reaches it, as behind dead ReLUs"
        return [Told(kind=VANISHES, fqn=one.fqn, weight=course.usual(), why=why)]

    def _whole(self, whole: float) -> list[Told]:
        """The total of all layers that vanishes, which no layer does beyond the others."""
        total = self._total
        if not total.is_warm:
            return []
        low, _, middle, spread = total.expected()
        if low - whole <= max(VANISHED, SPREADS * spread):
            total.odd = 0
            return []
        total.odd -= 1
        total.odd_step = self._step if total.odd == -1 else total.odd_step
        self.suspicious = True
        if -total.odd < CONFIRMED:
            return []
        why = f"is {math.exp(whole - middle):.1g} of its usual norm"
        return [Told(kind=VANISHES, fqn="", weight=math.inf, why=why)]

    def _findings(self, told: Sequence[Told], step: int) -> list[Finding]:
        found: list[Finding] = []
        for kind in (EXPLODES, VANISHES, STOPPED):
            some = sorted((one for one in told if one.kind == kind), key=lambda one: -one.weight)
            if not some:
                self._since.pop(kind, None)
                continue
            since = self._since.setdefault(kind, step)
            course = self._course(some[0].fqn) if some[0].fqn else self._total
            found.append(_finding(kind, some, since, onset_of(course.logs.steps, course.odd_step)))
        return found


def _finding(kind: str, some: Sequence[Told], step: int, onset: tuple[int, int]) -> Finding:
    worst = some[0]
    whose = worst.fqn if worst.fqn else "the whole model"
    # "It has no gradient" is said of the tensor.
    subject = whose if kind == STOPPED else f"the gradient of {whose}"
    others = [one.fqn for one in some[1:] if one.fqn]
    return Finding(
        rule=Rule.GRADIENT_JUMP,
        subject=kind,
        severity=Severity.WARNING,
        reason=f"{subject} {worst.why}, since step {step}{listing(others)}",
        fqn=worst.fqn,
        step=step,
        others=tuple(others),
        onset=onset,
    )


def listing(others: Sequence[str]) -> str:
    """What else it concerns: "; also a, b and 3 more"."""
    if not others:
        return ""
    shown, more = others[:MAX_LISTED], len(others) - MAX_LISTED
    return f"; also {', '.join(shown)}{f' and {more:,} more' if more > 0 else ''}"
