"""Watch one incarnation of one job: the sidecars' reports and, at intervals, sampled parameters.

Findings go into the book; its changes go to the log, the events, the webhooks and the store.
Nothing here can fail the control plane: a failed round is logged once, and the next one follows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paramd.clock import now_s
from paramd.errors import ParamdError
from paramd.layout.types import Layout
from paramd.mesh.insight.reports import Alert
from paramd_service.aio import stopped
from paramd_service.alerts import looks
from paramd_service.alerts.bits import BitRounds
from paramd_service.alerts.book import Book, Covered, Finding, Severity
from paramd_service.alerts.config import AlertConfig, Rule
from paramd_service.alerts.costs import Spent, longest, spent, stalled
from paramd_service.alerts.courses import LEAST as LEAST_SAMPLES
from paramd_service.alerts.courses import Courses
from paramd_service.alerts.drift import Sample, drift_findings, groups_of, next_sample
from paramd_service.alerts.numbers import Ask, LoggedRounds
from paramd_service.alerts.pace import Pace
from paramd_service.alerts.rules import (
    MESH_RULES,
    Ends,
    Ranks,
    certificate,
    failed_export,
    mesh_findings,
    points_of,
    rank_inputs,
    unrecorded,
)
from paramd_service.alerts.sampling import TENSOR_RULES, MeshSampler
from paramd_service.alerts.store import AlertStore, State
from paramd_service.alerts.suspects import Changes
from paramd_service.alerts.values import GRADIENTS_NOT_FINITE, Values
from paramd_service.alerts.webhook import Webhooks
from paramd_service.control.mesh.evidence import Look
from paramd_service.control.mesh.health import Watch, WatchState
from paramd_service.control.mesh.host import why_slow
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.parts import Failure, LostMark
from paramd_service.control.store.edits import EditRow
from paramd_service.control.store.history import Sample as Measured
from paramd_service.control.store.history import SeriesKey, series_of

if TYPE_CHECKING:
    from paramd.mesh.peers.discovery import SidecarFinder

_DRIFT = frozenset({Rule.REPLICA_DRIFT})
_SAMPLED = TENSOR_RULES | {Rule.GRADIENT_JUMP}
_GRADIENTS = frozenset({Rule.GRADIENT_JUMP})

log = logging.getLogger("paramd.control.alerts")

RANKS_PER_S = 1024
"""Ranks checked per second at most: a check costs about 3 us a rank, so 0.3 % of a core."""

POINTS_EVERY_S = 10.0
LOGGED_EVERY_S = 2.0
"""As often as sidecars report that they have new entries."""
MARKS_EVERY_S = 5.0
HURRY_S = 5.0
HURRIED_EVERY_S = 1.0
STEPS_OF_PATIENCE = 2.5
"""A sample waits for this many steps before it is given up."""
WINDOW_PARTS = 6
"""Past states kept per stall window."""
KEEP_AGAIN_S = 5.0
REPORTED_S = 3.0
"""Seconds after which reports have the waits that a sample has caused."""
BETWEEN_PARTS_S = 0.01

Tell = Callable[[Alert], object]
Offer = Callable[[Iterable[Measured]], None]


class Rounds:
    """Sampling rounds: each takes the next parameters, plus those with firing alerts."""

    def __init__(
        self, watcher: Watcher, view: Callable[[], MeshView], sampler: MeshSampler
    ) -> None:
        """No I/O. Findings and measurements go to the watcher."""
        self._watcher = watcher
        self._config = watcher.config
        self._view = view
        self._sampler = sampler
        self.values = Values(watcher.config)
        self.courses = Courses()
        self._stats_begin = 0
        self._gradients_begin = 0
        self._digests_begin = 0
        self._turn = 0

    def forget(self) -> None:
        """Begin anew: nobody looks for a while, and what changes meanwhile is no jump."""
        self.values, self.courses = Values(self._config), Courses()

    async def stats(self) -> bool:
        """Check statistics of the next parameters; return whether there were any. Raises
        ParamdError."""
        values = self.values
        if not any(self._config.looks_for(rule) for rule in TENSOR_RULES):
            return False
        layout = await self._sampler.layout()
        self.values.keep_only(tensor.fqn for tensor in layout.tensors)
        sample = self._next(layout, self._stats_begin, TENSOR_RULES)
        if not sample.tensors:
            return False
        # Before it is read: what cannot be read must not keep the rest from being looked at.
        self._stats_begin = sample.next_begin
        found = await self._sampler.stats(sample.tensors, timeout_s=self._timeout_s())
        # Turned off meanwhile: nobody would look at a finding again.
        if not found.tensors or self.values is not values:
            return False
        findings = self.values.take(
            found.tensors, found.step, has_gradient=self.courses.has_gradient
        )
        covers = _covers(TENSOR_RULES, {one.fqn for one in found.tensors})
        self._watcher.observe(
            findings, lambda alert: alert.subject != GRADIENTS_NOT_FINITE and covers(alert)
        )
        self._measured("norm", found.step, {one.fqn: one.norm for one in found.tensors})
        return True

    async def gradients(self) -> bool:
        """Check the gradients of one update; return whether some came in time. Raises
        ParamdError."""
        courses = self.courses
        if not self._config.looks_for(Rule.GRADIENT_JUMP):
            return False
        layout = await self._sampler.layout()
        self.courses.keep_only(tensor.fqn for tensor in layout.tensors)
        begin = self._gradients_begin
        sample = self._next(layout, begin, _GRADIENTS)
        if not sample.tensors:
            return False
        whole = sample.next_begin == begin
        names = ["*"] if whole else [tensor.fqn for tensor in sample.tensors]
        self._gradients_begin = sample.next_begin
        found = await self._sampler.gradients(names, timeout_s=self._timeout_s())
        if found.step < 0 or self.courses is not courses:
            return False
        bad = [one for one in found.tensors if one.nan_count or one.inf_count]
        not_finite = self.values.gradients_not_finite(bad, found.step)
        seen = {one.fqn for one in found.tensors}
        self._watcher.observe(
            [not_finite] if not_finite is not None else [],
            lambda alert: alert.subject == GRADIENTS_NOT_FINITE and alert.name in seen,
        )
        self.courses.forget(found.frozen)
        findings = self.courses.take(found.sampled(), found.step)
        warm = self.courses.warm_count >= LEAST_SAMPLES
        # After a restart of the control plane an alert stays until there is a course again.
        self._watcher.observe(findings, lambda alert: warm and alert.rule == Rule.GRADIENT_JUMP)
        norms = {one.fqn: one.norm * found.factor for one in found.tensors}
        total = {"total": self.courses.total()} if norms else {}
        self._measured("grad_norm", found.step, norms | total)
        return bool(found.tensors)

    def _timeout_s(self) -> float:
        """Patience with one round: an update may be long in coming."""
        times = [one.state.step_time_ns / 1e9 for one in self._view().joined]
        return max(self._config.sample_timeout_s, STEPS_OF_PATIENCE * max(times, default=0.0))

    def _measured(self, name: str, step: int, values: Mapping[str, float]) -> None:
        now_s = self._watcher.clock()
        self._watcher.offer(
            Measured(
                series=self._watcher.series(name, subject), step=step, time_s=now_s, value=value
            )
            for subject, value in values.items()
            if math.isfinite(value)
        )

    async def digests(self) -> None:
        """Compare replicas of the next parameters. Raises ParamdError."""
        if not self._config.looks_for(Rule.REPLICA_DRIFT):
            return
        layout = await self._sampler.layout()
        # A copy of these stops the trainer.
        if layout.mirrored and not self._watcher.is_on:
            return
        sample = self._next(layout, self._digests_begin, _DRIFT)
        joined = {report.rank for report in self._view().joined}
        most_ranks = self._config.sample_ranks
        groups = groups_of(sample.tensors, joined, most_ranks=most_ranks, turn=self._turn)
        self._digests_begin = sample.next_begin
        if not groups:
            return
        found = await self._sampler.digests(groups, timeout_s=self._config.sample_timeout_s)
        self._turn += 1
        findings = drift_findings(found.differences, found.places, found.step)
        self._watcher.observe(findings, _covers(_DRIFT, {group.fqn for group in groups}))

    def _next(self, layout: Layout, begin: int, rules: frozenset[Rule]) -> Sample:
        again = [alert.name for alert in self._watcher.book.firing if alert.rule in rules]
        return next_sample(layout, begin, most_bytes=self._config.sample_bytes, first=again)


def _covers(rules: frozenset[Rule], fqns: set[str]) -> Covered:
    """A test whether checking these tensors would find an alert's problem again."""
    return lambda alert: alert.rule in rules and (not alert.name or alert.name in fqns)


def _poisons(alert: Alert) -> bool:
    """Whether a loss or a gradient is not finite: parameters may be next."""
    bad = alert.rule == Rule.LOGGED_NUMBER and alert.severity == Severity.CRITICAL
    return bad or alert.subject == GRADIENTS_NOT_FINITE


@dataclass(frozen=True, slots=True)
class _Owed:
    """A sample whose waits are not all reported yet."""

    before: Spent
    paid_s: float
    due_s: float


@dataclass(kw_only=True, eq=False)
class Watcher:
    """Life cycle: `start`, `tick` once a second, `close`; the results are in `book`."""

    config: AlertConfig
    job: str
    incarnation: int
    view: Callable[[], MeshView]
    """Returns the current mesh, for the rounds."""
    sampler: MeshSampler
    webhooks: Webhooks
    """Closed by the caller; shared by all jobs."""
    store: AlertStore
    """Keeps the alerts. The caller closes it, as it does the history that `offer` adds to."""
    offer: Offer
    """Adds to the history. Never blocks, never fails; drops what it cannot keep."""
    ask_logged: Ask | None = None
    """Calls GetLogged of a sidecar; None: logged numbers are not taken."""
    look: Look | None = None
    """Asks the ranks what they are doing; None: never."""
    reaching: Callable[[], Awaitable[SidecarFinder]] | None = None
    """Opens the connections to the sidecars; None: only samples are compared."""
    lost_marks: Callable[[], Awaitable[Sequence[LostMark]]] | None = None
    """Tells which marks are no longer on all ranks; None: there are none."""
    tell: Tell = lambda alert: None
    """Called with every alert that starts firing or is resolved, for the event bus."""
    expires_s: Callable[[], float | None] = lambda: None
    """When the control plane's certificate expires; None without TLS."""
    trouble: Callable[[], str] = str
    """Why the store cannot be written now; empty while it can."""
    failed: Callable[[], Failure | None] = lambda: None
    """The newest export that has ended, if it failed."""
    applied: Callable[[], Awaitable[Sequence[EditRow]]] | None = None
    """Tells the last applied edits of the job, newest first; None: none are suspected that were
    applied before a restart."""
    clock: Callable[[], float] = now_s
    """Seconds since the Unix epoch."""

    def __post_init__(self) -> None:
        config, view = self.config, self.view
        self.changes = Changes(self.incarnation)
        """The edits that were applied lately, which alerts may come from."""
        self.book = Book(job=self.job, incarnation=self.incarnation, suspect=self.changes.suspect)
        self._began_s = self.clock()
        self._window: deque[tuple[float, Ranks]] = deque()
        self._ends = Ends()
        self._look_due_s = 0.0
        self._points_due_s = 0.0
        self._restored = False
        self._unkept: dict[str, Alert] = {}
        self._to_keep = asyncio.Event()
        self._trouble: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._hurried = asyncio.Event()
        self._hurry_until_s = 0.0
        self._on = asyncio.Event()
        """Set while parameters and gradients are sampled; see `turn`."""
        if config.watch:
            self._on.set()
        self._paces = {
            kind: Pace(share=config.watch_share / 2, least_s=least_s)
            for kind, least_s in (
                ("stats", config.stats_every_s),
                ("gradients", config.gradients_every_s),
            )
        }
        self._owed: dict[str, _Owed] = {}
        self._last_s: dict[str, float] = {}
        """When a round of each kind succeeded last."""
        self.rounds = Rounds(self, view, self.sampler)
        self._logged = None
        if self.ask_logged is not None:
            self._logged = LoggedRounds(self, view, self.ask_logged)
        self._look_rounds = looks.LookRounds(self, self.look) if self.look is not None else None
        self._bits = None
        if self.reaching is not None and config.compare and config.compare_steps:
            self._bits = BitRounds(
                config,
                reaching=self.reaching,
                joined=lambda: {one.rank for one in view().joined},
                observe=self.observe,
            )
        self.round_counts = {"stats": 0, "digests": 0}
        """Rounds that succeeded, by kind."""
        self.failed_counts = {"stats": 0, "digests": 0}
        """Rounds that failed, by kind."""

    @property
    def ready(self) -> bool:
        """Whether stored alerts have been restored and checks are running."""
        return self._restored

    @property
    def is_on(self) -> bool:
        """Whether parameters and gradients are sampled; see `turn`."""
        return self._on.is_set()

    @property
    def tells_of_late(self) -> bool:
        """Whether rules decide when a rank that is late is lost, or hangs."""
        both = all(self.config.looks_for(rule) for rule in (Rule.STALE_RANK, Rule.STUCK))
        return both and self.config.look and self._look_rounds is not None

    @property
    def looks_at_values(self) -> bool:
        """Whether values are looked at: by the rule, and in the last round."""
        looked = "stats" in self._last_s and "stats" not in self._trouble
        return looked and self.config.looks_for(Rule.NON_FINITE)

    def start(self) -> None:
        """Resume the stored alerts, then watch."""
        self._tasks = [asyncio.create_task(self._keep(), name="paramd-alerts-keep")]
        digests: tuple[float, Callable[[], Awaitable[bool | None]]]
        digests = (self.config.digests_every_s, self.rounds.digests)
        if self._bits is not None:
            digests = (BETWEEN_PARTS_S, self._bits.one)
        rounds = (
            ("digests", self.config.compare, *digests),
            ("marks", self.config.looks_for(Rule.LOST_MARK), MARKS_EVERY_S, self._marks),
        )
        self._tasks += [
            asyncio.create_task(self._run(name, every_s, look), name=f"paramd-watch-{name}")
            for name, is_on, every_s, look in rounds
            if is_on
        ]
        sampled = (("stats", self.rounds.stats), ("gradients", self.rounds.gradients))
        self._tasks += [
            asyncio.create_task(self._sample(name, one), name=f"paramd-watch-{name}")
            for name, one in sampled
        ]
        if self._look_rounds is not None and self.config.look:
            looked = self._looking(self._look_rounds)
            self._tasks.append(asyncio.create_task(looked, name="paramd-watch-looks"))
        if self._logged is not None:
            logged = self._run("logged numbers", LOGGED_EVERY_S, self._logged.round)
            self._tasks.append(asyncio.create_task(logged, name="paramd-watch-logged"))

    def why_slow(self, rank: int) -> str:
        """What on the host of a rank may slow it; empty when nothing is to be seen."""
        reports = (one.report for one in self.view().ranks if one.rank == rank)
        return next((why_slow(one.state) for one in reports if one is not None), "")

    def turn(self, on: bool) -> None:
        """Turn the sampling of parameters and gradients on or off, until the run ends."""
        if on:
            self._on.set()
        else:
            self._on.clear()
            self.rounds.forget()
            self._on_change(self.book.end(lambda one: one.rule in _SAMPLED, self.clock()))
            for kind in self._paces:
                self._trouble.pop(kind, None)
                self._last_s.pop(kind, None)

    def watches(self) -> tuple[Watch, ...]:
        """What is watched, and what is not."""
        now_s = self.clock()
        found = [self._watch("values", "stats", (Rule.NON_FINITE, Rule.NORM_JUMP), now_s)]
        found.append(self._watch("gradients", "gradients", (Rule.GRADIENT_JUMP,), now_s))
        if self._look_rounds is not None and len(self.view().ranks) > 1:
            found.append(self._slow_ranks(self._look_rounds.every_s, now_s))
        return tuple(found)

    def _slow_ranks(self, every_s: float, now_s: float) -> Watch:
        what = "slow ranks"
        by = "[alerts] look = false" if not self.config.look else self._disabled(Rule.SLOW_RANK)
        if by:
            return Watch(what=what, state=WatchState.OFF, detail=by)
        return self._state(what, "looks", every_s, "", now_s)

    def _disabled(self, *rules: Rule) -> str:
        """The setting that disables all of the rules; empty if it leaves one."""
        if any(self.config.looks_for(rule) for rule in rules):
            return ""
        return f"[alerts] disabled = {json.dumps([str(rule) for rule in rules])}"

    def _watch(self, what: str, kind: str, rules: Sequence[Rule], now_s: float) -> Watch:
        by = self._disabled(*rules)
        if by or not self._on.is_set():
            return Watch(what=what, state=WatchState.OFF, detail=by)
        warm = self.rounds.courses.warm_count if kind == "gradients" else LEAST_SAMPLES
        needs = f"{warm} of {LEAST_SAMPLES} samples" if warm < LEAST_SAMPLES else ""
        return self._state(what, kind, self._paces[kind].usual_s(now_s), needs, now_s)

    def _state(self, what: str, kind: str, every_s: float, needs: str, now_s: float) -> Watch:
        last_s = self._last_s.get(kind)
        age_s = max(now_s - last_s, 0.0) if last_s is not None else None
        state, detail = WatchState.WARMING_UP if needs else WatchState.ON, needs
        if trouble := self._trouble.get(kind):
            state, detail = WatchState.FAILING, trouble
        return Watch(what=what, state=state, every_s=every_s, age_s=age_s, detail=detail)

    async def close(self, *, incarnation_over: bool = False) -> None:
        """Stop watching. Idempotent. With `incarnation_over`, resolve all alerts; otherwise they
        stay firing in the store, for the next control plane to resume."""
        await stopped(*self._tasks)
        self._tasks = []
        if incarnation_over:
            self._on_change(self.book.close(self.clock()))
        try:
            await self._save()
        except ParamdError as error:
            log.warning("the last changes of alerts are lost: %s", error)

    def tick(self, view: MeshView) -> None:
        """Check the sidecars' reports. Never fails; large meshes are checked less often."""
        now_s = self.clock()
        for kind in [kind for kind, owed in self._owed.items() if now_s >= owed.due_s]:
            self._settle(kind, view)
        if self._logged is not None:
            self._logged.join(view.joined)
        if not self._restored or now_s < self._look_due_s:
            return
        self._look_due_s = now_s + len(view.ranks) / RANKS_PER_S
        try:
            ranks = rank_inputs(view, watched_s=now_s - self._began_s)
            self._look(self._ends.known(ranks, now_s), now_s)
        except Exception:
            log.exception("job %s: checking the mesh failed", self.job)

    def _look(self, now: Ranks, now_s: float) -> None:
        while len(self._window) > 1 and self._window[1][0] <= now_s - self.config.stall_window_s:
            self._window.popleft()
        before = self._window[0][1] if self._window else {}
        missing = {rank.rank for rank in now.values() if rank.membership == "missing"}
        self.observe(
            [
                *mesh_findings(now, before, self.config),
                *certificate(self.expires_s(), now_s, self.config),
                *unrecorded(self.trouble(), self.config),
                *failed_export(self.failed(), now_s, self.config),
            ],
            # After a restart of the control plane, a rank's alert stays until the rank is back.
            lambda alert: alert.rule in MESH_RULES and missing.isdisjoint(alert.ranks),
        )
        part_s = self.config.stall_window_s / WINDOW_PARTS
        if not self._window or now_s - self._window[-1][0] >= part_s:
            self._window.append((now_s, now))
        if now_s >= self._points_due_s:
            self._points_due_s = now_s + POINTS_EVERY_S
            self.offer(points_of(now, job=self.job, incarnation=self.incarnation, time_s=now_s))

    async def _marks(self) -> None:
        findings = [
            Finding(
                rule=Rule.LOST_MARK,
                subject=f"mark {one.name}",
                severity=Severity.WARNING,
                reason=f"restore point {one.name!r} of step {one.step} can no longer be used: "
                f"{one.reason}; delete it (paramd unmark), and make another",
                step=one.step,
            )
            for one in (await self.lost_marks() if self.lost_marks is not None else ())
        ]
        self.observe(findings, lambda alert: alert.rule == Rule.LOST_MARK)

    async def _run(
        self, kind: str, every_s: float, one: Callable[[], Awaitable[bool | None]]
    ) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self._round(kind, one)

    async def _round(self, kind: str, one: Callable[[], Awaitable[bool | None]]) -> bool:
        """One round; return whether there was one, failed or not."""
        try:
            if await one() is False:
                return False
        except ParamdError as error:
            self._failed(kind, f"{type(error).__name__}: {error}")
        except Exception as error:
            log.exception("job %s: a round of %s failed", self.job, kind)
            self._failed(kind, type(error).__name__)
        else:
            self.round_counts[kind] = self.round_counts.get(kind, 0) + 1
            self._last_s[kind] = self.clock()
            if self._trouble.pop(kind, None):
                log.info("job %s: rounds of %s work again", self.job, kind)
        return True

    async def _sample(self, kind: str, one: Callable[[], Awaitable[bool | None]]) -> None:
        """Rounds as often as their measured cost allows, more often after an odd one."""
        pace = self._paces[kind]
        pace.begin(self.clock())
        while True:
            hurry = kind == "gradients" and self.rounds.courses.suspicious
            idle_s, idle = time.monotonic(), spent(self.view().joined)
            await self._pause(kind, pace.every_s(self.clock(), hurry=hurry))
            await self._on.wait()
            self._settle(kind, self.view())
            begin_s, before = time.monotonic(), spent(self.view().joined)
            made = await self._round(kind, one)
            # A round may wait long for an update, while these processes have other work.
            usual = max(before.cpu_s - idle.cpu_s, 0.0) / max(begin_s - idle_s, 1e-3)
            anyhow_s = usual * (time.monotonic() - begin_s)
            cost_s = spent(self.view().joined).since(before, anyhow_s=anyhow_s)
            pace.paid(cost_s, made=made)
            self._owed[kind] = _Owed(before, cost_s, self.clock() + REPORTED_S)

    def _settle(self, kind: str, view: MeshView) -> None:
        """Count the waits that the last sample caused, which only later reports have."""
        owed = self._owed.pop(kind, None)
        if owed is not None:
            waited_s = longest(stalled(view.joined), owed.before.stalled_s)
            self._paces[kind].later(max(waited_s - owed.paid_s, 0.0))

    async def _looking(self, rounds: looks.LookRounds) -> None:
        while True:
            await asyncio.sleep(rounds.next_s())
            await self._round("looks", rounds.round)

    def hurry(self) -> None:
        """Look at the parameters now, whatever it costs: see `_poisons`."""
        self._hurry_until_s = self.clock() + HURRY_S
        self._hurried.set()

    async def _pause(self, kind: str, every_s: float) -> None:
        if kind != "stats":
            await asyncio.sleep(every_s)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurried.wait(), every_s)
            # A round takes a part of a large model: several follow each other.
            await asyncio.sleep(HURRIED_EVERY_S)
            if self.clock() >= self._hurry_until_s:
                self._hurried.clear()

    def _failed(self, kind: str, reason: str) -> None:
        self.failed_counts[kind] = self.failed_counts.get(kind, 0) + 1
        if self._trouble.get(kind) != reason:
            self._trouble[kind] = reason
            log.warning("job %s: a round of %s failed: %s", self.job, kind, reason)

    def series(self, name: str, subject: str) -> SeriesKey:
        """The history of a metric of one subject; see `series_of`."""
        return series_of(self.job, self.incarnation, name, subject)

    def observe(self, findings: Sequence[Finding], covered: Covered) -> None:
        """Take the findings of one check; see `Book.observe`."""
        self._on_change(self.book.observe(findings, covered=covered, now_s=self.clock()))

    def _on_change(self, changes: Sequence[Alert]) -> None:
        for alert in changes:
            firing = alert.state == State.FIRING
            log.log(
                logging.WARNING if firing else logging.INFO,
                "job %s, run %d: %s %s: %s",
                alert.job,
                alert.incarnation,
                alert.rule,
                "fires" if firing else "is over",
                alert.reason,
                extra={
                    "job": alert.job,
                    "incarnation": alert.incarnation,
                    "step": alert.step,
                    **({"rank": alert.ranks[0]} if len(alert.ranks) == 1 else {}),
                },
            )
            if firing and _poisons(alert):
                self.hurry()
            self.tell(alert)
            self._unkept[alert.id] = alert
        if changes:
            self.webhooks.post(changes)
            self._to_keep.set()

    async def _keep(self) -> None:
        while True:
            try:
                if not self._restored:
                    self.book.restore(await self.store.load_firing(self.job, self.incarnation))
                    if self.applied is not None:
                        self.changes.add(reversed(await self.applied()))
                    self._restored = True
                await self._save()
            except ParamdError as error:
                # Alerts matter more than their history: without a store, continue in memory.
                self._restored = True
                if self._trouble.get("store") != str(error):
                    self._trouble["store"] = str(error)
                    log.warning("job %s: alerts are not saved: %s", self.job, error)
                await asyncio.sleep(KEEP_AGAIN_S)
                continue
            self._trouble.pop("store", None)
            await self._to_keep.wait()

    async def _save(self) -> None:
        # Cleared before the copy: an alert that changes during the write sets it again.
        self._to_keep.clear()
        changed = dict(self._unkept)
        if changed:
            await self.store.save(list(changed.values()))
        for key, alert in changed.items():
            # Unless it has changed since: the new state must still be written.
            if self._unkept.get(key) is alert:
                del self._unkept[key]
