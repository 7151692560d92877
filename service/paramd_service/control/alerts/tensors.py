"""Rules over parameter statistics: non-finite values and norm jumps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from paramd_service.control.alerts.book import Finding, Severity
from paramd_service.control.alerts.config import AlertConfig, Rule

MAX_TENSORS_TOLD = 50
"""Most tensors a rule reports by name; the rest are counted."""

TENSOR_RULES = frozenset({Rule.NON_FINITE, Rule.NORM_JUMP})


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInput:
    """Statistics of one full tensor at one step."""

    fqn: str
    count: int
    nan_count: int
    inf_count: int
    norm: float
    """Of the finite elements."""


class NormHistory:
    """The last norms of each tensor."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._norms: dict[str, deque[float]] = {}

    def of(self, fqn: str) -> Sequence[float]:
        """A tensor's earlier norms, oldest first."""
        return self._norms.get(fqn, ())

    def seen(self, tensors: Iterable[TensorInput]) -> None:
        """Add one round."""
        for tensor in tensors:
            norms = self._norms.setdefault(tensor.fqn, deque(maxlen=self._window))
            norms.append(tensor.norm)

    def keep_only(self, fqns: Iterable[str]) -> None:
        """Drop tensors that a new layout no longer has."""
        kept = set(fqns)
        self._norms = {fqn: norms for fqn, norms in self._norms.items() if fqn in kept}


def tensor_findings(
    tensors: Sequence[TensorInput], history: NormHistory, step: int, config: AlertConfig
) -> list[Finding]:
    """Problems of the sampled tensors, compared with earlier rounds."""
    found: list[Finding] = []
    if config.looks_for(Rule.NON_FINITE):
        bad = [tensor for tensor in tensors if tensor.nan_count or tensor.inf_count]
        found += _told(bad, Rule.NON_FINITE, Severity.CRITICAL, _why_non_finite, step)
    if config.looks_for(Rule.NORM_JUMP):
        why = {
            tensor.fqn: reason
            for tensor in tensors
            if (reason := norm_jump(tensor, history.of(tensor.fqn), config))
        }
        jumped = [tensor for tensor in tensors if tensor.fqn in why]
        found += _told(jumped, Rule.NORM_JUMP, Severity.WARNING, lambda t: why[t.fqn], step)
    return found


def norm_jump(tensor: TensorInput, norms: Sequence[float], config: AlertConfig) -> str:
    """Why the norm is a jump; "" when it is none or there are too few rounds.

    Norms below the floor count as the floor: biases that start at zero grow by large factors
    harmlessly.
    """
    if len(norms) < config.norm_least or not tensor.count:
        return ""
    floor = config.norm_floor * tensor.count**0.5
    usual = max(median(norms), floor)
    if usual == 0:
        return ""
    ratio = tensor.norm / usual
    if ratio > config.norm_jump_ratio:
        return f"its norm is {ratio:.3g} times the median of the last {len(norms)} rounds"
    if ratio < 1 / config.norm_jump_ratio and usual > floor:
        return f"its norm fell to {ratio:.3g} of the median of the last {len(norms)} rounds"
    return ""


def _why_non_finite(tensor: TensorInput) -> str:
    return (
        f"{tensor.nan_count:,} NaN and {tensor.inf_count:,} infinite of {tensor.count:,} elements"
    )


def _told(
    tensors: Sequence[TensorInput],
    rule: Rule,
    severity: Severity,
    why: Callable[[TensorInput], str],
    step: int,
) -> list[Finding]:
    found = [
        Finding(
            rule=rule,
            subject=tensor.fqn,
            severity=severity,
            reason=f"{tensor.fqn}: {why(tensor)}",
            fqn=tensor.fqn,
            step=step,
        )
        for tensor in tensors[:MAX_TENSORS_TOLD]
    ]
    more = len(tensors) - len(found)
    if more > 0:
        found.append(
            Finding(
                rule=rule,
                subject="more tensors",
                severity=severity,
                reason=f"{more:,} more tensors",
                step=step,
            )
        )
    return found
