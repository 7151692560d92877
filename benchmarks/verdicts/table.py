"""What the campaign found, compared with what was to be found. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.report import Goal, Report, Table
from benchmarks.verdicts.case import LOST, STUCK, WITHIN_S, Case, Expected
from benchmarks.verdicts.watch import BAD

PRECISION = 1.0
RECALL = 0.95
RIGHT = ("quiet", "right")
"""States of cases as they should be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One case and whether its first line was right."""

    case: Case
    state: str
    """quiet (healthy and no line), right, late, wrong, missed, alarmed (a line while healthy), or
    failed (the case itself did not run)."""
    seconds: float = -1.0
    """From the onset to the first line."""
    line: Mapping[str, Any] | None = None
    why: str = ""
    run: str = ""
    """When it ended, for how long it ran, and the machine's load average then."""

    @property
    def ok(self) -> bool:
        return self.state in RIGHT


def judged(case: Case, outcome: Mapping[str, Any] | None) -> Judged:
    """Compare the first line that says that something is wrong with the one expected."""
    if outcome is None:
        return Judged(case=case, state="failed", why="no outcome: see its folder")
    run = f"{outcome['when']}, {outcome['seconds'] / 60:g} min, load {outcome['load']:g}"
    return replace(_judged(case, outcome), run=run)


def _judged(case: Case, outcome: Mapping[str, Any]) -> Judged:
    first = next((one for one in outcome["lines"] if one["word"] in BAD), None)
    seen = [one for one in outcome["lines"] if one["word"]]
    if not seen:
        return Judged(case=case, state="failed", why="the job was never reached")
    if case.expected is None:
        if outcome["ended"]:
            return Judged(case=case, state="failed", why=f"a rank ended: {outcome['ended']}")
        state = "quiet" if first is None else "alarmed"
        return Judged(case=case, state=state, line=first)
    onset = outcome["onset"]
    if onset is None:
        return Judged(case=case, state="failed", line=first, why="its sickness never began")
    if first is None:
        return Judged(case=case, state="missed")
    seconds = first["s"] - onset["monotonic_s"]
    if seconds < 0:
        return Judged(case=case, state="alarmed", seconds=seconds, line=first)
    why = mismatch(case.expected, first, onset_step=int(onset["step"]), pace_s=case.pace_s)
    state = "wrong" if why else "right" if seconds <= WITHIN_S else "late"
    return Judged(case=case, state=state, seconds=seconds, line=first, why=why)


def mismatch(expected: Expected, line: Mapping[str, Any], *, onset_step: int, pace_s: float) -> str:
    """What differs between the first line and the expected one; empty: nothing."""
    text = line["text"]
    rules = frozenset({line["rule"]}) if line["rule"] else _rules_of(text)
    if expected.rules and not rules & expected.rules:
        return f"{'/'.join(rules) or 'no rule'}, expected {' or '.join(sorted(expected.rules))}"
    ranks = frozenset(line["ranks"]) or frozenset(map(int, _RANK.findall(text)[:1]))
    if expected.ranks and ranks != expected.ranks:
        return f"ranks {sorted(ranks)}, expected {sorted(expected.ranks)}"
    if expected.layer and expected.layer not in line["name"] and expected.layer not in text:
        return f"{line['name'] or 'no tensor'}, expected {expected.layer}"
    if expected.says and not any(word in text for word in expected.says):
        return f"no word of {', '.join(expected.says)}"
    # Samples are seconds apart: a line may know the onset only as well as they do.
    apart = round(WITHIN_S / pace_s)
    if line["step"] >= 0 and not onset_step - apart <= line["step"] <= onset_step + apart:
        return f"since step {line['step']}, expected about {onset_step}"
    return ""


_RANK = re.compile(r"\brank (\d+)")

_SAYS = (
    (LOST, ("trainer has ended", "killed by", "exited with", "its sidecar was lost")),
    (STUCK, ("is stopped", "no boundary for")),
)
"""What the line of a rank's own state says before an alert of it fires, a second later."""


def _rules_of(text: str) -> frozenset[str]:
    return next(
        (rules for rules, words in _SAYS if any(word in text for word in words)), frozenset()
    )


def report(found: Sequence[Judged]) -> Report:
    """The table, precision and recall."""
    told = [one for one in found if one.state in ("right", "late", "wrong", "alarmed")]
    sick = [one for one in found if one.case.expected is not None]
    right = [one for one in found if one.state == "right"]
    precise = sum(one.state in ("right", "late") for one in told)
    precision = precise / len(told) if told else 1.0
    recall = len(right) / len(sick) if sick else 1.0
    slowest_s = max((one.seconds for one in right), default=0.0)
    failed = [one.case.name for one in found if one.state == "failed"]
    notes = [
        "Real trainings of two ranks at default settings, each for at least the minutes of its row."
    ]
    notes += [
        f"Simulated in {one.case.name}: {one.case.simulated}."
        for one in found
        if one.case.simulated
    ]
    if failed:
        notes.append(f"Did not run: {', '.join(failed)}.")
    if right:
        middle_s = statistics.median(one.seconds for one in right)
        notes.append(f"Median time to the right line: {middle_s:.0f} s.")
    return Report(
        name="verdicts",
        tables=[
            Table(
                title="First lines",
                header=_HEADER,
                rows=[_row(one) for one in found],
            )
        ],
        goals=[
            Goal(what="precision", measured=precision, limit=PRECISION, at_least=True),
            Goal(what="recall", measured=recall, limit=RECALL, at_least=True),
            Goal(what="slowest right line", measured=slowest_s, limit=WITHIN_S, unit="s"),
            Goal(what="cases that did not run", measured=len(failed), limit=0),
        ],
        notes=notes,
        numbers={
            "precision": precision,
            "recall": recall,
            "cases": [
                {"case": one.case.name, "state": one.state, "seconds": one.seconds,
                 "why": one.why, "line": one.line, "run": one.run}
                for one in found
            ],
        },
    )  # fmt: skip


_HEADER = ("case", "healthy or sick", "found", "seconds", "first line", "differs", "run")


def _row(one: Judged) -> list[str]:
    text = one.line["text"].replace("|", "/") if one.line is not None else ""
    return [
        one.case.name,
        "healthy" if one.case.expected is None else "sick",
        one.state if one.ok else f"**{one.state}**",
        f"{one.seconds:.0f}" if one.case.expected is not None and one.line is not None else "",
        text[:160],
        one.why,
        one.run,
    ]
