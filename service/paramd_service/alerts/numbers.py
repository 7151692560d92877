"""The numbers that training scripts log (`attachment.log`): into the history, and against rules.

A rule is a line of `[alerts] numbers`: "loss > 10", "lr < 0", "loss jumps 5" (above 5 times the
median of its last values). NaN and infinities are found without a rule, and so is a loss that
jumps far beyond all of its last values. `NumberHistory` is pure; `LoggedRounds` takes new entries
from the sidecars.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from paramd.bounds import (
    LOGGED_ANSWERS,
    LOGGED_ENTRIES,
    LOGGED_NAME_CHARS,
    LOGGED_NAMES,
    LOGGED_RANKS,
    LOGGED_VALUES,
)
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.alerts.book import Finding, Severity
from paramd_service.alerts.config import LOGGED, NumberRule, Rule, parse_number
from paramd_service.alerts.known import Known
from paramd_service.alerts.suspects import onset_of
from paramd_service.control.mesh.registry import MeshView, Report
from paramd_service.control.store.history import Sample

if TYPE_CHECKING:
    from paramd_service.alerts.watcher import Watcher

WINDOW = 20
"""Values that a jump is judged by, and within which a change is suspected of it: a script may log
at every step, and a change takes some steps to show."""
LEAST = 5
"""Values needed before a jump can be detected."""
LOSS = re.compile(r"(.*[/_.])?loss", re.ASCII)
"""Numbers in which a spike is found without a rule."""
SPIKE_WINDOW = 50
SPIKE_LEAST = 20
"""Values needed before a spike can be told from noise."""
SPIKE_RATIO = 8.0
"""Least factor between a spike of one step and the largest of the values before. Healthy losses
have spikes of a factor of four now and then."""
LASTING_RATIO = 3.0
"""The same for a spike that lasts for `LASTING` values."""
LASTING = 3
SPIKE_SIGMAS = 10.0
"""A spike is this many spreads above the median, too."""
SPIKE_S = 60.0
"""Seconds for which a spike is told of: it may last one step."""
POINT_S = 1.0
"""The history keeps the first value of a number in each period of this length."""

ASK_TIMEOUT_S = 3.0

Ask = Callable[[Report, pb.GetLoggedRequest], Awaitable[pb.GetLoggedResponse]]


class NumberHistory:
    """The last finite values of each (rank, name), and what is wrong with the latest ones."""

    def __init__(self, rules: Sequence[str]) -> None:
        """Raises UsageError for a rule that cannot be parsed."""
        self._rules = [parse_number(text) for text in rules]
        self._values: dict[tuple[int, str], Known] = {}
        self._losses: dict[tuple[int, str], Known] = {}
        """More values of those that are losses."""
        self._name_counts: Counter[int] = Counter()
        """Names known of each rank."""

    def judge(self, rank: int, name: str, values: Sequence[tuple[int, float]]) -> list[Finding]:
        """Problems among new (step, value) pairs, oldest first, which are then remembered. One
        finding per rule, for the last value that violates it."""
        if (rank, name) not in self._values:
            self._values[rank, name] = Known(WINDOW)
            self._name_counts[rank] += 1
        known = self._values[rank, name]
        found: dict[str, Finding] = {}
        for step, value in values:
            known.rewind(step)
            for text, why in self._problems(name, value, known.values):
                onset = onset_of(known.steps, step, few=WINDOW)
                found[text] = _finding(rank, name, text, why, onset)
            if math.isfinite(value):
                known.add(step, value)
        return list(found.values())

    def spike(self, rank: int, name: str, values: Sequence[tuple[int, float]]) -> Finding | None:
        """The highest spike among new values of a loss, which are then remembered."""
        if LOSS.fullmatch(name) is None:
            return None
        known = self._losses.setdefault((rank, name), Known(SPIKE_WINDOW))
        found, highest = None, -math.inf
        for step, value in values:
            if not math.isfinite(value):
                continue
            known.rewind(step)
            spike = spike_of(value, known.values)
            if spike is not None and spike[0] > highest:
                highest, usual = spike
                why = (
                    f"jumped to {highest:.4g} at step {step}; the largest of its last values "
                    f"before was {usual:.4g}"
                )
                found = _finding(rank, name, SPIKE, why, onset_of(known.steps, step, few=WINDOW))
            known.add(step, value)
        return found

    def knows(self, rank: int, name: str) -> bool:
        """Whether the number is followed: at most `LOGGED_NAMES` of a rank are."""
        return (rank, name) in self._values or self._name_counts[rank] < LOGGED_NAMES

    def _problems(
        self, name: str, value: float, known: Sequence[float]
    ) -> Iterable[tuple[str, str]]:
        if not math.isfinite(value):
            yield "nonfinite", f"is {value}"
            return
        for rule in self._rules:
            if rule.name == name and (why := _violated(rule, value, known)):
                yield rule.text, why


SPIKE = "spike"


def spike_of(value: float, known: Sequence[float]) -> tuple[float, float] | None:
    """(the spike, the largest value before it) if a loss is far beyond all of its last values: very
    far once, or far several times in a row. Where the last values are spread widely themselves, as
    those of a GAN or of returns, it must be farther."""
    if _is_far(value, known, SPIKE_RATIO):
        return value, max(known)
    values = [*known, value]
    before, last = values[:-LASTING], values[-LASTING:]
    return (max(last), max(before)) if _is_far(min(last), before, LASTING_RATIO) else None


def _is_far(value: float, known: Sequence[float], least_ratio: float) -> bool:
    if len(known) < SPIKE_LEAST:
        return False
    usual, largest = median(known), max(known)
    if largest <= 0:
        return False
    spread = 1.4826 * median(abs(one - usual) for one in known)
    ratio = max(least_ratio, largest / usual if usual > 0 else math.inf)
    return value > ratio * largest and value - usual > SPIKE_SIGMAS * spread


def _violated(rule: NumberRule, value: float, known: Sequence[float]) -> str:
    if rule.how == ">" and value > rule.bound:
        return f"is {value:.6g}, above {rule.bound:g}"
    if rule.how == "<" and value < rule.bound:
        return f"is {value:.6g}, below {rule.bound:g}"
    if rule.how == "jumps" and len(known) >= LEAST:
        usual = median(known)
        if value - usual > (rule.bound - 1) * abs(usual) and value > usual:
            return f"is {value:.6g}, the median of its last {len(known)} values is {usual:.6g}"
    return ""


def _finding(rank: int, name: str, text: str, why: str, onset: tuple[int, int]) -> Finding:
    bad = text == "nonfinite"
    return Finding(
        rule=Rule.LOGGED_NUMBER,
        subject=f"{name} of rank {rank}: {text}",
        severity=Severity.CRITICAL if bad else Severity.WARNING,
        reason=f"{name}, as rank {rank} logs it, {why}",
        ranks=(rank,),
        step=onset[1],
        onset=onset,
    )


def _in_order(entries: Sequence[pb.LoggedEntry], *, after: int) -> list[pb.LoggedEntry]:
    """The entries of an answer up to the first that a sidecar does not number so.

    One that numbers them otherwise could be asked for the same ones without end.
    """
    found: list[pb.LoggedEntry] = []
    for entry in entries[:LOGGED_ENTRIES]:
        if entry.number <= after:
            break
        after = entry.number
        found.append(entry)
    return found


class LoggedRounds:
    """Takes new entries from the sidecars. Single event loop."""

    def __init__(self, watcher: Watcher, view: Callable[[], MeshView], ask: Ask) -> None:
        """No I/O. Findings and measurements go to the watcher; `ask` calls GetLogged."""
        self._watcher = watcher
        self._view = view
        self._ask = ask
        self._history = NumberHistory(watcher.config.numbers)
        self._taken: dict[int, tuple[int, int]] = {}
        """Of each rank, the sidecar's pid and the number of the last entry taken from it."""
        self._point_due_s: dict[tuple[int, str], float] = {}
        self._joined: dict[int, tuple[int, int]] = {}
        """Of each rank, the sidecar's pid and its entries when it was first seen joined."""
        self._spikes: dict[tuple[int, str], tuple[Finding, float]] = {}
        """Spikes that are still told of, and until when."""

    async def round(self) -> None:
        """Take new entries. Raises the first ParamdError, after all ranks have been asked."""
        logging = [one for one in self._view().joined if one.state.logged_count][:LOGGED_RANKS]
        answers = await asyncio.gather(*map(self._one, logging), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    def join(self, reports: Iterable[Report]) -> None:
        """Note what sidecars have when they are first seen: after a restart of the control plane
        that is old, and fires nothing."""
        for report in reports:
            state = report.state
            known = self._joined.get(report.rank)
            if known is None or known[0] != state.sidecar_pid:
                first = known is None
                self._joined[report.rank] = state.sidecar_pid, state.logged_count if first else 0

    async def _one(self, report: Report) -> None:
        pid = report.state.sidecar_pid
        # A respawned sidecar counts from 1 again.
        known_pid, number = self._taken.get(report.rank, (pid, 0))
        number = number if known_pid == pid else 0
        for _ in range(LOGGED_ANSWERS):
            if number >= report.state.logged_count:
                return
            answer = await self._ask(
                report, pb.GetLoggedRequest(after=number, limit=LOGGED_ENTRIES)
            )
            found = _in_order(answer.entries, after=number)
            number = found[-1].number if found else max(number, answer.count)
            self._taken[report.rank] = pid, number
            if not found:
                return
            joined_pid, old = self._joined.get(report.rank, (pid, 0))
            old = old if joined_pid == pid else 0
            self._take(report.rank, [one for one in found if one.number <= old], is_old=True)
            self._take(report.rank, [one for one in found if one.number > old])

    def _take(self, rank: int, entries: Sequence[pb.LoggedEntry], *, is_old: bool = False) -> None:
        if not entries:
            return
        values: dict[str, list[tuple[int, float]]] = {}
        points: list[Sample] = []
        for entry in entries:
            for name, value in islice(entry.values.items(), LOGGED_VALUES):
                if len(name) > LOGGED_NAME_CHARS or not self._history.knows(rank, name):
                    continue
                if name in values or len(values) < LOGGED_NAMES:
                    values.setdefault(name, []).append((entry.step, value))
                    points += self._point(rank, name, entry, value)
        self._watcher.offer(points)
        found = [
            finding
            for name, some in values.items()
            for finding in self._history.judge(rank, name, some)
        ]
        found += self._spiked(rank, values)
        if is_old or not self._watcher.config.looks_for(Rule.LOGGED_NUMBER):
            if is_old:
                self._spikes.clear()
            return
        prefixes = tuple(f"{name} of rank {rank}: " for name in values)
        self._watcher.observe(
            found, lambda one: one.rule == Rule.LOGGED_NUMBER and one.subject.startswith(prefixes)
        )

    def _spiked(
        self, rank: int, values: Mapping[str, Sequence[tuple[int, float]]]
    ) -> list[Finding]:
        """Spikes of these numbers, those of the last minute too."""
        now_s = self._watcher.clock()
        found = []
        for name, some in values.items():
            new = self._history.spike(rank, name, some)
            stands = self._spikes.get((rank, name))
            if new is not None:
                # What comes soon after is of the same one.
                first = stands[0] if stands is not None and now_s < stands[1] else new
                stands = self._spikes[rank, name] = first, now_s + SPIKE_S
            if stands is None:
                continue
            if now_s < stands[1]:
                found.append(stands[0])
            else:
                del self._spikes[rank, name]
        return found

    def _point(self, rank: int, name: str, entry: pb.LoggedEntry, value: float) -> list[Sample]:
        due_s = self._point_due_s.get((rank, name), -math.inf)
        if entry.time_s < due_s and math.isfinite(value):
            return []
        self._point_due_s[rank, name] = entry.time_s + POINT_S
        series = self._watcher.series(f"{LOGGED}{name}", str(rank))
        return [Sample(series=series, step=entry.step, time_s=entry.time_s, value=value)]
