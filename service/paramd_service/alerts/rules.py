"""Rules over the sidecars' reports. Pure: inputs in, findings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

from paramd.v1 import common_pb2
from paramd_service.alerts.book import Finding, Severity
from paramd_service.alerts.config import AlertConfig, Rule
from paramd_service.control.mesh.host import clock_jump_s
from paramd_service.control.mesh.registry import (
    TOGETHER_S,
    MeshView,
    RankView,
    ended_s_of,
    is_killed,
)
from paramd_service.control.parts import Failure
from paramd_service.control.store.history import Sample, series_of

STEPS_OF_PATIENCE = 20
"""A rank with long steps is not stalled before this many of them have passed."""

FIRST_STEP_S = 900.0
"""Patience, in seconds, with a first step: it compiles, warms up and fills caches."""

JOIN_S = 60.0
"""Patience with a sidecar that has never joined, in seconds: longer than its start on a busy
machine, and than its longest back-off after a restart of the control plane."""

CLOCK_JUMP_S = 5.0
"""Least jump of a wall clock that is told of, in seconds."""

FAILED_EXPORT_S = 600.0
"""Seconds for which a failed export is told of, unless another succeeds before."""

DAY_S = 86_400

PRESENT = frozenset({"joined", "silent"})

MESH_RULES = frozenset({
    Rule.STALE_RANK, Rule.STALLED_RANK, Rule.STRAGGLER, Rule.LAYOUT_MISMATCH, Rule.CLOCK_JUMP,
    Rule.CERTIFICATE, Rule.STORE, Rule.FAILED_EXPORT,
})  # fmt: skip
"""Checked on every report cycle; the others only when parameters are sampled."""

_NS = 1e9
MAX_RANKS_KEPT = 64
"""Larger meshes keep no history of individual ranks."""

_ENDED = (common_pb2.PHASE_ORPHANED, common_pb2.PHASE_TORN)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInput:
    """Snapshot of what is known about one rank."""

    rank: int
    membership: str
    """missing, joined, silent, gone or left."""
    reason: str
    """What is wrong; empty when nothing is."""
    age_s: float
    """Age of the last report, or for a missing rank the time since the watch began."""
    step: int
    step_time_s: float
    """Smoothed; 0 before the second boundary."""
    boundary_age_s: float
    """Time since the last boundary, including the report's age; -1 before the first."""
    stall_count: int
    stall_total_s: float
    stall_max_s: float
    layout_digest: str
    trainer_lives: bool
    ended_s: float = 0.0
    """Time since the trainer's process ended; 0 while it lives, or when unknown."""
    killed: bool = False
    """A signal has killed the trainer, as far as is known."""
    sidecar_pid: int = 0
    ended_well: bool = False
    """Whether its script ran to its end."""
    clock_jump_s: float = 0.0
    """How far the wall clock of its host has jumped since its sidecar began."""

    @property
    def over_s(self) -> float:
        """Time since the trainer ended, or the rank was lost with its sidecar and so perhaps with
        its host; 0 while neither is known."""
        lost_s = self.age_s if self.membership == "gone" else 0.0
        return max(self.ended_s, lost_s)


Ranks = Mapping[int, RankInput]


def mesh_findings(now: Ranks, before: Ranks, config: AlertConfig) -> list[Finding]:
    """Problems of the ranks. `before` has the same ranks about `stall_window_s` ago."""
    rules: tuple[tuple[Rule, Iterator[Finding]], ...] = (
        (Rule.STALE_RANK, stale_ranks(now, config)),
        (Rule.STALLED_RANK, stalled_ranks(now, config)),
        (Rule.STRAGGLER, stragglers(now, before, config)),
        (Rule.LAYOUT_MISMATCH, layout_mismatch(now)),
        (Rule.CLOCK_JUMP, clock_jumps(now, before)),
    )
    return [finding for rule, found in rules if config.looks_for(rule) for finding in found]


def certificate(expires_s: float | None, now_s: float, config: AlertConfig) -> Iterator[Finding]:
    """Expiry of the control plane's certificate. `expires_s` is Unix time; None without TLS."""
    if expires_s is None or not config.looks_for(Rule.CERTIFICATE):
        return
    left_days = (expires_s - now_s) / DAY_S
    if left_days > config.certificate_days:
        return
    days = f"{abs(left_days):.1f} days"
    what = f"expires in {days}" if left_days > 0 else f"expired {days} ago"
    yield Finding(
        rule=Rule.CERTIFICATE,
        subject="control plane",
        severity=Severity.WARNING if left_days > 1 else Severity.CRITICAL,
        reason=f"the certificate of the control plane {what}; replace its files, new connections "
        "use them at once",
    )


def unrecorded(trouble: str, config: AlertConfig) -> Iterator[Finding]:
    """A store that cannot be written; `trouble` is why, empty while it can."""
    if trouble and config.looks_for(Rule.STORE):
        yield Finding(
            rule=Rule.STORE,
            subject="control plane",
            severity=Severity.WARNING,
            reason="nothing is recorded: edits are refused, and history, audit and exports have "
            f"gaps; {trouble}",
        )


def failed_export(failed: Failure | None, now_s: float, config: AlertConfig) -> Iterator[Finding]:
    """The newest export that has ended, if it failed within the last minutes."""
    if failed is None or not config.looks_for(Rule.FAILED_EXPORT):
        return
    if now_s - failed.ended_s < FAILED_EXPORT_S:
        yield Finding(
            rule=Rule.FAILED_EXPORT,
            subject="exports",
            severity=Severity.WARNING,
            reason=f"{failed.what} failed: {failed.reason[:300]}",
            step=failed.step,
        )


def stale_ranks(now: Ranks, config: AlertConfig) -> Iterator[Finding]:
    """Ranks that do not report, and those whose trainer has ended. The first to end is critical;
    others end because of it. A script that ran to its end is a finding only if other ranks go on:
    ranks may end one after the other, and one that waits for such a rank is stuck."""
    lost = (rank for rank in now.values() if _is_lost(rank, config))
    if all(rank.ended_well for rank in lost):
        return
    first = first_ended(now)
    for rank in sorted(now.values(), key=lambda rank: (rank is not first, -rank.over_s)):
        if _is_lost(rank, config):
            silent = _is_silent(rank, config)
            old = (
                f"its last report is {rank.age_s:.0f} s old" if silent else "its trainer has ended"
            )
            why = rank.reason or old
            if first is not None and rank.over_s > 0 and rank.rank != first.rank:
                why += f"; {_s(max(first.over_s - rank.over_s, 0.0))} after rank {first.rank}"
                yield _of_rank(Rule.STALE_RANK, rank, Severity.WARNING, why)
            else:
                yield _of_rank(Rule.STALE_RANK, rank, Severity.CRITICAL, why)


def _is_lost(rank: RankInput, config: AlertConfig) -> bool:
    """Whether it does not report, or its trainer has ended without having detached."""
    return rank.membership != "left" and (_is_silent(rank, config) or not rank.trainer_lives)


def _is_silent(rank: RankInput, config: AlertConfig) -> bool:
    # While a mesh starts, and after a restart of the control plane, ranks are missing for
    # as long as a sidecar may wait before it joins again.
    after_s = config.stale_after_s
    if rank.membership == "missing":
        after_s = max(after_s, JOIN_S)
    return rank.membership == "gone" or rank.age_s >= after_s


def first_ended(ranks: Ranks) -> RankInput | None:
    """The rank that ended or was lost first; None while all live. One that a signal has killed
    comes before others that ended in the same seconds: they see its connections break at once,
    and may be heard of before it."""
    ended = [rank for rank in ranks.values() if rank.over_s > 0]
    longest_s = max((rank.over_s for rank in ended), default=0.0)
    killed = [rank for rank in ended if rank.killed and rank.over_s > longest_s - TOGETHER_S]
    return max(killed if killed else ended, key=lambda rank: rank.over_s, default=None)


class Ends:
    """When trainers ended, as far as it is known. Reports are late by what a busy machine makes of
    them, so the earliest time that any report says is right; else ranks that end together would
    take turns in being the first."""

    def __init__(self) -> None:
        self._at_s: dict[int, float] = {}

    def known(self, now: Ranks, now_s: float) -> dict[int, RankInput]:
        """The same ranks, with the time since which each is known to have ended."""
        ends_s = {rank.rank: now_s - rank.ended_s for rank in now.values() if rank.ended_s > 0}
        self._at_s = {rank: min(at_s, self._at_s.get(rank, at_s)) for rank, at_s in ends_s.items()}
        return {
            number: replace(rank, ended_s=now_s - self._at_s[number]) if number in ends_s else rank
            for number, rank in now.items()
        }


def stalled_ranks(now: Ranks, config: AlertConfig) -> Iterator[Finding]:
    """Ranks that are alive and report, but finish no updates."""
    present = [r for r in now.values() if r.membership in PRESENT and r.trainer_lives]
    stalled = [
        rank
        for rank in present
        if rank.boundary_age_s
        >= max(
            config.stalled_after_s,
            STEPS_OF_PATIENCE * rank.step_time_s if rank.step_time_s else FIRST_STEP_S,
        )
    ]
    if stalled and len(stalled) == len(present):
        longest_s = min(rank.boundary_age_s for rank in stalled)
        yield Finding(
            rule=Rule.STALLED_RANK,
            subject="mesh",
            severity=Severity.WARNING,
            reason=f"no rank has finished an update for {_s(longest_s)}; it hangs, evaluates or "
            "saves",
            ranks=tuple(rank.rank for rank in stalled[:64]),
            step=min(rank.step for rank in stalled),
        )
        return
    for rank in stalled:
        reason = f"it has not finished an update for {_s(rank.boundary_age_s)}; others have"
        yield _of_rank(Rule.STALLED_RANK, rank, Severity.CRITICAL, reason)


def stragglers(now: Ranks, before: Ranks, config: AlertConfig) -> Iterator[Finding]:
    """Ranks whose steps are longer than others', now and a window ago: a single long step, such as
    one with a checkpoint, is no straggler. Ranks that wait for each other have equal times."""
    then = {rank.rank for rank, _ in _slow(before, config)}
    for rank, usual_s in _slow(now, config):
        if rank.rank in then:
            reason = f"its steps take {_s(rank.step_time_s)}, the others' {_s(usual_s)}"
            yield _of_rank(Rule.STRAGGLER, rank, Severity.WARNING, reason)


def _slow(ranks: Ranks, config: AlertConfig) -> Iterator[tuple[RankInput, float]]:
    """Ranks with long steps, and how long the others' are, in seconds."""
    timed = [r for r in ranks.values() if r.membership in PRESENT and r.step_time_s > 0]
    if len(timed) < 2:
        return
    usual_s = median(rank.step_time_s for rank in timed)
    # The median of two is their mean, which hides the slower one: compare with the faster.
    usual_s = min(r.step_time_s for r in timed) if len(timed) == 2 else usual_s
    least_s = max(usual_s + config.straggler_least_s, usual_s * config.straggler_ratio)
    yield from ((rank, usual_s) for rank in timed if rank.step_time_s >= least_s)


def clock_jumps(now: Ranks, before: Ranks) -> Iterator[Finding]:
    """Ranks whose host's wall clock has jumped within the window: leases and times in logs are
    wrong by as much. It is told of for the length of the window."""
    for rank in now.values():
        then = before.get(rank.rank)
        # A new sidecar counts from its own start.
        if then is None or then.sidecar_pid != rank.sidecar_pid:
            continue
        jump_s = rank.clock_jump_s - then.clock_jump_s
        if abs(jump_s) >= CLOCK_JUMP_S:
            way = "ahead" if jump_s > 0 else "back"
            reason = f"the clock of its host jumped {_s(abs(jump_s))} {way}"
            yield _of_rank(Rule.CLOCK_JUMP, rank, Severity.WARNING, reason)


def layout_mismatch(now: Ranks) -> Iterator[Finding]:
    """Ranks whose layout differs from the majority's."""
    digests = {
        r.rank: r.layout_digest for r in now.values() if r.membership in PRESENT and r.layout_digest
    }
    counted = Counter(digests.values()).most_common()
    if len(counted) < 2:
        return
    usual, count = counted[0]
    tie = counted[1][1] == count
    odd = tuple(rank for rank, digest in digests.items() if tie or digest != usual)
    what = "no majority has one of them" if tie else f"{count} ranks have {usual[:12]}"
    yield Finding(
        rule=Rule.LAYOUT_MISMATCH,
        subject="mesh",
        severity=Severity.CRITICAL,
        reason=f"the ranks report {len(counted)} different layouts ({what}); nothing can be "
        "summoned as a whole",
        ranks=odd[:64],
    )


def _of_rank(rule: Rule, rank: RankInput, severity: Severity, reason: str) -> Finding:
    return Finding(
        rule=rule,
        subject=f"rank {rank.rank}",
        severity=severity,
        reason=f"rank {rank.rank}: {reason}",
        ranks=(rank.rank,),
        step=rank.step,
    )


def _s(value_s: float) -> str:
    return f"{value_s * 1000:.3g} ms" if value_s < 1 else f"{value_s:.3g} s"


_MEASURED: tuple[tuple[str, Callable[[RankInput], float]], ...] = (
    ("step", lambda rank: float(rank.step)),
    ("step_time_s", lambda rank: rank.step_time_s),
    ("stall_total_s", lambda rank: rank.stall_total_s),
)


def rank_inputs(view: MeshView, *, watched_s: float) -> dict[int, RankInput]:
    """Inputs of all ranks, by rank. The mesh has been watched for `watched_s`."""
    return {rank.rank: _input(rank, watched_s) for rank in view.ranks}


def _input(rank: RankView, watched_s: float) -> RankInput:
    report = rank.report
    state = report.state if report is not None else common_pb2.RankState(boundary_age_ns=-1)
    boundary_age_s = state.boundary_age_ns / _NS + rank.age_s if state.boundary_age_ns >= 0 else -1
    return RankInput(
        rank=rank.rank,
        membership=rank.membership.value,
        reason=rank.reason,
        age_s=rank.age_s if report is not None else watched_s,
        step=report.step if report is not None else -1,
        step_time_s=state.step_time_ns / _NS,
        boundary_age_s=boundary_age_s,
        stall_count=state.stall_count,
        stall_total_s=state.stall_total_ns / _NS,
        stall_max_s=state.stall_max_ns / _NS,
        layout_digest=report.layout_digest if report is not None else "",
        trainer_lives=state.phase not in _ENDED,
        ended_s=ended_s_of(rank),
        killed=is_killed(rank),
        ended_well=rank.ended_well,
        sidecar_pid=state.sidecar_pid,
        clock_jump_s=clock_jump_s(state),
    )


def points_of(ranks: Ranks, *, job: str, incarnation: int, time_s: float) -> list[Sample]:
    """Measurements for the history: step, step time and stalls of the joined ranks, one by one in
    small meshes, else the minimum, median and maximum."""
    joined = [rank for rank in ranks.values() if rank.membership == "joined"]
    step = min((rank.step for rank in joined), default=-1)
    return [
        Sample(
            series=series_of(job, incarnation, name, subject), step=step, time_s=time_s, value=value
        )
        for name, read in _MEASURED
        for subject, value in _subjects({str(rank.rank): read(rank) for rank in joined})
    ]


def _subjects(values: Mapping[str, float]) -> list[tuple[str, float]]:
    if len(values) <= MAX_RANKS_KEPT:
        return list(values.items())
    ordered = sorted(values.values())
    return [("min", ordered[0]), ("median", median(ordered)), ("max", ordered[-1])]
