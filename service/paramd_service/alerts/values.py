"""What is wrong with sampled parameters: not finite, a norm that jumped, values that stand still.

Rounds take a part of a large model each, so what one round has found is remembered until a later
one has looked at the same tensor again. One finding of each kind names the worst tensor and lists
the others. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from paramd_service.alerts.book import Finding, Severity
from paramd_service.alerts.config import AlertConfig, Rule
from paramd_service.alerts.courses import listing
from paramd_service.alerts.known import Known
from paramd_service.alerts.suspects import FEW, onset_of

if TYPE_CHECKING:
    from paramd_service.alerts.sampling import TensorInput

STILL = 4
"""Rounds in which a norm must be the same, to the last bit, before values count as frozen."""
MOVED = 3
"""Rounds in which it must have changed before."""
STEP_RATIO = 4.0
"""Least factor from the nearest of the last norms for a jump, which a steady growth does not
have."""
LAST = 3
"""Norms that are the last ones."""

GRADIENTS_NOT_FINITE = "gradients that are not finite"
"""Subjects of findings."""
NOT_FINITE = "values that are not finite"
NORMS = "norms"
FROZEN = "frozen values"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trouble:
    fqn: str
    weight: float
    why: str
    step: int
    ranks: tuple[int, ...] = ()
    onset: tuple[int, int] = (-1, -1)


@dataclass(slots=True)
class _Past:
    norms: Known
    moved: int = 0
    still: int = 0
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=STILL + 1 + FEW))
    """Of the last rounds, the present one last."""


class Values:
    """The past of all sampled tensors, and the troubles that stand."""

    def __init__(self, config: AlertConfig) -> None:
        self._config = config
        self._past: dict[str, _Past] = {}
        self._standing: dict[str, dict[str, _Trouble]] = {NOT_FINITE: {}, NORMS: {}, FROZEN: {}}
        self._step = -1
        self._changed_step = -1
        """Last step at which any tensor had changed since its round before."""

    def keep_only(self, fqns: Iterable[str]) -> None:
        """Drop tensors that a new layout no longer has."""
        kept = set(fqns)
        self._past = {fqn: one for fqn, one in self._past.items() if fqn in kept}
        for kind, standing in self._standing.items():
            self._standing[kind] = {fqn: one for fqn, one in standing.items() if fqn in kept}

    def take(
        self,
        tensors: Sequence[TensorInput],
        step: int,
        *,
        has_gradient: Callable[[str], bool] = lambda _: False,
    ) -> list[Finding]:
        """Judge the tensors of one round. `has_gradient`: whether updates bring one a gradient."""
        if step < self._step:
            self._rewind(step)
        self._step = step
        for one in tensors:
            past = self._past.setdefault(one.fqn, _Past(Known(self._config.norm_window)))
            last_step = past.steps[-1] if past.steps else -1
            past.steps.append(step)
            self._put(NOT_FINITE, one.fqn, self._not_finite(one, step), past)
            self._put(NORMS, one.fqn, self._jumped(one, past.norms.values, step), past)
            frozen = self._frozen(one, past, last_step, has_gradient(one.fqn))
            self._put(FROZEN, one.fqn, frozen, past, shown=STILL)
            if not math.isnan(one.norm):
                past.norms.add(step, one.norm)
        return self._findings()

    def _rewind(self, step: int) -> None:
        """After a rollback steps come again: rounds that came after this one are not their past,
        and nothing has changed or stood still yet."""
        self._changed_step = -1
        for past in self._past.values():
            past.norms.rewind(step)
            while past.steps and past.steps[-1] > step:
                past.steps.pop()
            past.still = 0

    def gradients_not_finite(self, bad: Sequence[TensorInput], step: int) -> Finding | None:
        """One finding of gradients that are not finite and go into an update."""
        if not bad or not self._config.looks_for(Rule.NON_FINITE):
            return None
        worst = bad[0]
        ranks = tuple(sorted({rank for one in bad for rank in one.ranks}))
        where = f" on {_ranks(worst.ranks)}" if worst.ranks else ""
        count = worst.nan_count + worst.inf_count
        return Finding(
            rule=Rule.NON_FINITE,
            subject=GRADIENTS_NOT_FINITE,
            severity=Severity.CRITICAL,
            reason=f"the gradient of {worst.fqn} at step {step}: {count:,} of {worst.count:,} "
            f"elements are not finite{where}{listing([one.fqn for one in bad[1:]])}",
            ranks=ranks[:64],
            fqn=worst.fqn,
            step=step,
            others=tuple(one.fqn for one in bad[1:]),
            onset=(-1, step),
        )

    def _put(
        self, kind: str, fqn: str, found: _Trouble | None, past: _Past, *, shown: int = 1
    ) -> None:
        """Note or end a trouble, which the last `shown` rounds show when it is new."""
        standing = self._standing[kind]
        if found is None:
            standing.pop(fqn, None)
            return
        known = standing.get(fqn)
        first = known if known is not None else found
        shown_since = past.steps[max(len(past.steps) - shown, 0)]
        onset = known.onset if known is not None else onset_of(past.steps, shown_since)
        standing[fqn] = replace(found, step=first.step, onset=onset)

    @staticmethod
    def _not_finite(one: TensorInput, step: int) -> _Trouble | None:
        bad = one.nan_count + one.inf_count
        if not bad:
            return None
        why = f"{one.nan_count:,} NaN and {one.inf_count:,} infinite of {one.count:,} elements"
        where = f" on {_ranks(one.ranks)}" if one.ranks else ""
        return _Trouble(fqn=one.fqn, weight=0.0, why=f"{why}{where}", step=step, ranks=one.ranks)

    def _jumped(self, one: TensorInput, norms: Sequence[float], step: int) -> _Trouble | None:
        # Once told, it stands until the norm is back or its median has followed.
        stands = one.fqn in self._standing[NORMS]
        found = norm_jump(one, norms, self._config, stands=stands)
        return _Trouble(fqn=one.fqn, weight=found[0], why=found[1], step=step) if found else None

    def _frozen(
        self, one: TensorInput, past: _Past, last_step: int, has_gradient: bool
    ) -> _Trouble | None:
        """Values that no longer change although they did, and although updates bring a gradient."""
        step = past.steps[-1]
        if not past.norms or step <= last_step:
            return None
        if one.norm != past.norms.values[-1]:
            past.moved, past.still = past.moved + 1, 0
            self._changed_step = max(self._changed_step, step)
            return None
        past.still += 1
        enough = past.moved >= MOVED and past.still >= STILL and has_gradient
        # Where nothing changes at all, as with a rate of zero at the end of a schedule, no layer
        # is left behind.
        since = past.steps[max(len(past.steps) - STILL - 1, 0)]
        if not enough or self._changed_step <= since:
            return None
        why = (
            f"has not changed since step {since}, though it has a gradient and others "
            "change: no optimizer updates it"
        )
        return _Trouble(fqn=one.fqn, weight=one.norm, why=why, step=since)

    def _findings(self) -> list[Finding]:
        found: list[Finding] = []
        kinds = (
            (NOT_FINITE, Rule.NON_FINITE, Severity.CRITICAL),
            (NORMS, Rule.NORM_JUMP, Severity.WARNING),
            (FROZEN, Rule.NORM_JUMP, Severity.WARNING),
        )
        for kind, rule, severity in kinds:
            some = list(self._standing[kind].values())
            if not some or not self._config.looks_for(rule):
                continue
            # Where weights are equal the one that was found first comes first.
            some.sort(key=lambda one: (-one.weight, one.step))
            found.append(_finding(kind, rule, severity, some))
        return found


def _finding(kind: str, rule: Rule, severity: Severity, some: Sequence[_Trouble]) -> Finding:
    worst = some[0]
    ranks = tuple(sorted({rank for one in some for rank in one.ranks}))
    return Finding(
        rule=rule,
        subject=kind,
        severity=severity,
        reason=f"{worst.fqn}: {worst.why}{listing([one.fqn for one in some[1:]])}",
        ranks=ranks[:64],
        fqn=worst.fqn,
        step=worst.step,
        others=tuple(one.fqn for one in some[1:]),
        onset=worst.onset,
    )


def norm_jump(
    tensor: TensorInput, norms: Sequence[float], config: AlertConfig, *, stands: bool = False
) -> tuple[float, str] | None:
    """(how far it is, why) if the norm is a jump; None when it is none or there are too few rounds.

    A jump is far from the median and sharp, too: far from the last norms; one that `stands` was.
    Norms below the floor count as the floor: biases that start at zero grow by large factors
    harmlessly.
    """
    if len(norms) < config.norm_least or not tensor.count or math.isnan(tensor.norm):
        return None
    floor = config.norm_floor * tensor.count**0.5
    usual = max(median(norms), floor)
    if usual == 0:
        return None
    last = median(list(norms)[-LAST:])
    ratio = tensor.norm / usual
    step_ratio = 0.0 if stands else STEP_RATIO
    if ratio > config.norm_jump_ratio and tensor.norm > step_ratio * max(last, floor):
        why = f"its norm is {ratio:.3g} times the median of the last {len(norms)} rounds"
        return math.log(ratio), why
    fell = ratio < 1 / config.norm_jump_ratio and usual > floor
    if fell and (stands or tensor.norm * STEP_RATIO < last):
        why = f"its norm fell to {ratio:.3g} of the median of the last {len(norms)} rounds"
        return -math.log(ratio) if ratio > 0 else math.inf, why
    return None


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:8]))
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}{' and more' * (len(ranks) > 8)}"
