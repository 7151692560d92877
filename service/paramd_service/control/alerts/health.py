"""The verdict on a job: one pure function, and the same answer for all who show it.

The header of the page, its Mesh and its list of jobs, the command line, agents' tools and metrics
take the verdict from here, so that none is green while another is amber. "ok" stands only where
somebody looked: what is not watched is said in the same line, with the command that turns it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paramd.mesh.edits.calls import PauseWord
from paramd.mesh.insight.reports import Alert
from paramd_service.control.alerts.book import Severity
from paramd_service.control.alerts.config import Rule
from paramd_service.control.mesh.registry import State

WORDS = (
    "ok", "running", "starting", "paused", "warning", "degraded", "critical", "down", "ended",
)  # fmt: skip
"""From good to bad; then "ended"."""

OLD_S = 300.0
"""Seconds after which a look is too old to say that all is well, unless looks are rarer."""
OLD_TIMES = 3
"""Times the usual seconds between two looks after which one is too old."""

MAX_MORE = 20
"""Most lines beside the first."""

TURN_ON = "paramd watch on"
"""The command that turns on what is not watched."""

_LEVEL_OF = {
    "ok": "ok", "running": "info", "starting": "info", "paused": "warning", "warning": "warning",
    "degraded": "warning", "critical": "critical", "down": "critical", "ended": "ended",
}  # fmt: skip

_WORST_FIRST: tuple[Rule, ...] = (
    Rule.STALE_RANK, Rule.STUCK, Rule.LAYOUT_MISMATCH, Rule.NON_FINITE, Rule.REPLICA_DRIFT,
    Rule.STALLED_RANK, Rule.GRADIENT_JUMP, Rule.NORM_JUMP, Rule.LOGGED_NUMBER, Rule.SLOW_RANK,
    Rule.STRAGGLER, Rule.CLOCK_JUMP, Rule.FAILED_EXPORT, Rule.STORE, Rule.LOST_MARK,
    Rule.CERTIFICATE,
)  # fmt: skip
"""Causes before symptoms: a rank that is lost makes others hang, values that are not finite make
the loss NaN."""
_PLACE_OF = {str(rule): place for place, rule in enumerate(_WORST_FIRST)}

_OF_VALUES = frozenset({str(Rule.GRADIENT_JUMP), str(Rule.NORM_JUMP), str(Rule.STUCK)})
"""Warnings that explain a critical symptom, such as a loss that is NaN."""


class WatchState(StrEnum):
    """How well something is watched."""

    ON = "on"
    WARMING_UP = "warming up"
    """Looked at, but without the past that a sudden change is judged by."""
    OFF = "off"
    FAILING = "failing"


def duration_text(value_s: float) -> str:
    """Whole seconds in words: "40 s", "12 min", "2 h 24 min"."""
    if value_s < 120:
        return f"{value_s:.0f} s"
    hours, minutes = divmod(round(value_s / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """One thing that is watched, or is not."""

    what: str
    """values, gradients, slow ranks, replicas."""
    state: WatchState
    every_s: float = 0.0
    """Seconds between two looks; 0 when it is off."""
    age_s: float | None = None
    """Seconds since the last look that succeeded; None before the first."""
    detail: str = ""
    """Why it fails, what it still needs, or which setting keeps it off."""

    @property
    def is_blind(self) -> bool:
        """Whether nobody has looked yet, can, or has done so lately."""
        off = self.state in (WatchState.OFF, WatchState.FAILING)
        return off or self.age_s is None or self._is_old

    @property
    def _is_old(self) -> bool:
        return self.age_s is not None and self.age_s > max(OLD_S, OLD_TIMES * self.every_s)

    @property
    def text(self) -> str:
        """One clause in words: "values checked every 40 s, last 12 s ago"."""
        if self.state is WatchState.OFF:
            return f"{self.what} are not watched{f' ({self.detail})' if self.detail else ''}"
        if self.state is WatchState.FAILING:
            return f"{self.what} could not be checked ({self.detail})"
        if self.age_s is not None and self._is_old:
            return f"{self.what} were last checked {duration_text(self.age_s)} ago"
        warming = f" (warming up: {self.detail})" if self.state is WatchState.WARMING_UP else ""
        every = f"every {duration_text(self.every_s)}"
        if self.age_s is None:
            return f"{self.what} are not checked yet ({every}){warming}"
        return f"{self.what} checked {every}, last {duration_text(self.age_s)} ago{warming}"

    @property
    def turn_on(self) -> str:
        """The command that turns it on; empty when it is on, or when a setting keeps it off."""
        return TURN_ON if self.state is WatchState.OFF and not self.detail else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is to be said of a job now."""

    level: str
    """ok, info, warning, critical or ended: the only source of a color."""
    word: str
    """One of `WORDS`."""
    line: str
    """The first line: what is wrong, with which rank or layer, since which step; or what was
    looked at. Never empty."""
    cause: str = ""
    """Id of the alert of the first line; empty when none fires."""
    more: tuple[str, ...] = ()
    """The other firing alerts in words, worst first."""
    ranks: tuple[int, ...] = ()
    """Ranks that firing alerts name."""
    names: tuple[str, ...] = ()
    """Tensors that firing alerts name."""
    step: int = -1
    """Since which step; -1 when unknown."""
    watches: tuple[Watch, ...] = ()

    @property
    def why(self) -> str:
        """The line, unless all is well."""
        return self.line if self.word != "ok" else ""


def worst_first(firing: Sequence[Alert]) -> list[Alert]:
    """The alerts in the order in which they deserve to be examined: the worst is the first, however
    late it began. Of alerts of one rule the critical ones come first, then the oldest."""
    return sorted(firing, key=_badness)


def _badness(one: Alert) -> tuple[int, int, bool, float, int]:
    critical = one.severity == Severity.CRITICAL
    place = _PLACE_OF.get(one.rule, len(_WORST_FIRST))
    if critical and one.rule != Rule.LOGGED_NUMBER:
        group = 0
    else:
        group = 1 if critical or one.rule in _OF_VALUES else 2
    return group, place, not critical, one.first_seen_s, _number(one)


def _number(alert: Alert) -> int:
    """The alert's number, in order of firing; an id is `job-incarnation-number-time`."""
    number = alert.id.split("-")[-2:-1]
    return int(number[0]) if number and number[0].isdecimal() else 0


def line_of(alert: Alert) -> str:
    """An alert in one line, with the step since which it fires."""
    known = alert.step < 0 or f"step {alert.step}" in alert.reason
    return alert.reason if known else f"{alert.reason} (since step {alert.step})"


def verdict_of(
    *,
    state: State,
    reason: str,
    pause: PauseWord,
    firing: Sequence[Alert],
    watches: Sequence[Watch] = (),
    is_late: bool = False,
) -> Verdict:
    """The verdict on a job. `reason` is why its `state` is not ok; `watches` is all that could be
    watched, in the order of its lines. `is_late`: the reason is only that reports or boundaries are
    late, as on a busy machine or in an evaluation. The verdict says so, and stays "running" until
    an alert fires about a rank that is lost or hangs."""
    if state is State.ENDED:
        return _verdict("ended", reason if reason else "the training has ended", watches)
    # The alert of a rank that hangs or lost its trainer says more than the rank's state.
    if firing:
        return _of_alerts(worst_first(firing), state, watches)
    if state in (State.DOWN, State.DEGRADED):
        return _verdict("running" if is_late else state.value, reason, watches)
    if pause is not PauseWord.RUNNING:
        return _verdict("paused", "training is paused on request", watches)
    if state is State.STARTING:
        return _verdict("starting", reason if reason else "not all ranks have joined yet", watches)
    blind = [one for one in watches if one.is_blind]
    if blind or not watches:
        return _verdict("running", _blind_line(blind), watches)
    looked = "; ".join(one.text for one in watches)
    return _verdict("ok", f"every rank reports, nothing is wrong; {looked}", watches)


def _verdict(word: str, line: str, watches: Sequence[Watch]) -> Verdict:
    return Verdict(level=_LEVEL_OF[word], word=word, line=line, watches=tuple(watches))


def _blind_line(blind: Sequence[Watch]) -> str:
    if not blind:
        return "every rank reports, but nothing is watched yet"
    said = "; ".join(one.text for one in blind)
    turn_on = next((one.turn_on for one in blind if one.turn_on), "")
    return f"every rank reports, but {said}{f': {turn_on} turns it on' if turn_on else ''}"


def _of_alerts(alerts: Sequence[Alert], state: State, watches: Sequence[Watch]) -> Verdict:
    first = alerts[0]
    critical = any(one.severity == Severity.CRITICAL for one in alerts)
    word = "down" if state is State.DOWN else "critical" if critical else "warning"
    return Verdict(
        level=_LEVEL_OF[word],
        word=word,
        line=line_of(first),
        cause=first.id,
        more=tuple(line_of(one) for one in alerts[1 : MAX_MORE + 1]),
        ranks=tuple(sorted({rank for one in alerts for rank in one.ranks})),
        names=tuple(dict.fromkeys(one.name for one in alerts if one.name)),
        step=first.step,
        watches=tuple(watches),
    )
