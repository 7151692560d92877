"""The health of a job: one verdict, and the same for all who show it.

The header of the page, its Mesh and its list of jobs, the command line, agents' tools and metrics
take the verdict from here, so that none is green while another is amber. "ok" stands only where
somebody looked: what is not watched is said in the same line, with the command that turns it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paramd.mesh.edits.calls import PauseState, PauseWord
from paramd.v1 import common_pb2
from paramd_service.control.mesh.registry import MeshView, Report, State

WORDS = (
    "ok", "running", "starting", "paused", "warning", "degraded", "critical", "down", "ended",
)  # fmt: skip
"""From good to bad; then "ended"."""

OLD_S = 300.0
"""Seconds after which a look is too old to say that all is well, unless looks are rarer."""
OLD_TIMES = 3
"""Times the usual seconds between two looks after which one is too old."""

TURN_ON = "paramd watch on"
"""The command that turns on what is not watched."""

_LEVEL_OF = {
    "ok": "ok", "running": "info", "starting": "info", "paused": "warning", "warning": "warning",
    "degraded": "warning", "critical": "critical", "down": "critical", "ended": "ended",
}  # fmt: skip


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the ranks' reports show of a job."""

    state: State
    reason: str
    """Why the state is not ok."""
    pause: PauseWord
    is_late: bool = False
    """The reason is only that reports or boundaries are late, as on a busy machine or in an
    evaluation."""

    @classmethod
    def of(cls, view: MeshView, reason: str) -> Seen:
        """What the reports show, where `reason` says why the job's state is not ok."""
        return cls(
            state=view.state,
            reason=reason,
            pause=pause_word(view.joined),
            is_late=view.is_late,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """A verdict, and how many alerts fire."""

    verdict: Verdict
    critical_count: int = 0
    warning_count: int = 0


def verdict_of(
    seen: Seen,
    *,
    alerts: Verdict | None = None,
    watches: Sequence[Watch] = (),
    tells_of_late: bool = False,
) -> Verdict:
    """The verdict on a job.

    Args:
        seen: What its ranks report.
        alerts: What is to be said of the alerts that fire; None: none does.
        watches: All that could be watched, in the order of its lines.
        tells_of_late: Whether an alert would fire about a rank that is lost or hangs. Then the
            verdict on one that is only late stays "running".
    """
    if seen.state in (State.ENDED, State.FINISHED):
        return _verdict("ended", seen.reason if seen.reason else "the training has ended", watches)
    # The alert of a rank that hangs or lost its trainer says more than the rank's state.
    if alerts is not None:
        return alerts
    if seen.state in (State.DOWN, State.DEGRADED):
        word = "running" if seen.is_late and tells_of_late else seen.state.value
        return _verdict(word, seen.reason, watches)
    if seen.pause is not PauseWord.RUNNING:
        return _verdict("paused", "training is paused on request", watches)
    if seen.state is State.STARTING:
        reason = seen.reason if seen.reason else "not all ranks have joined yet"
        return _verdict("starting", reason, watches)
    blind = [one for one in watches if one.is_blind]
    if blind or not watches:
        return _verdict("running", _blind_line(blind), watches)
    looked = "; ".join(one.text for one in watches)
    return _verdict("ok", f"every rank reports, nothing is wrong; {looked}", watches)


def level_of(word: str) -> str:
    """The level of one of `WORDS`."""
    return _LEVEL_OF[word]


def _verdict(word: str, line: str, watches: Sequence[Watch]) -> Verdict:
    return Verdict(level=level_of(word), word=word, line=line, watches=tuple(watches))


def _blind_line(blind: Sequence[Watch]) -> str:
    if not blind:
        return "every rank reports, but nothing is watched yet"
    said = "; ".join(one.text for one in blind)
    turn_on = next((one.turn_on for one in blind if one.turn_on), "")
    return f"every rank reports, but {said}{f': {turn_on} turns it on' if turn_on else ''}"


def is_paused(state: common_pb2.RankState) -> bool:
    """Whether a rank is paused, or is about to be. Cheap: the dashboard asks it of all ranks."""
    return bool(state.hold_left_ms) or state.phase == common_pb2.PHASE_HELD


def pause_of(state: common_pb2.RankState, step: int) -> PauseState:
    """The pause in a rank's state; the holder is not part of it."""
    if not is_paused(state):
        return PauseState(state=PauseWord.RUNNING, step=step)
    return PauseState(
        state=PauseWord.STEPPING if state.hold_steps_left else PauseWord.PAUSED,
        step=step,
        steps_left=state.hold_steps_left,
        lease_left_s=state.hold_left_ms / 1000,
    )


def pause_word(joined: Sequence[Report]) -> PauseWord:
    """The pause of a mesh, as any of its ranks reports it."""
    paused = next((report for report in joined if is_paused(report.state)), None)
    return pause_of(paused.state, paused.step).state if paused is not None else PauseWord.RUNNING
