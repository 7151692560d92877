"""Watches one job: looks every second at what sidecars report, now and then at parameters.

What the rules find goes into the book; what changes there is told to the log, the store, the
events and the webhooks, in this order. Nothing here can fail the control plane: a round that
fails is told once, and the next one comes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from paramd.errors import ParamdError
from paramd.layout.types import Layout
from paramd_service.control.alerts.book import Alert, Book, Finding, State
from paramd_service.control.alerts.config import AlertConfig, Rule
from paramd_service.control.alerts.drift import (
    ReplicaGroup,
    Sample,
    choose_holders,
    drift_findings,
    next_sample,
    replica_groups,
)
from paramd_service.control.alerts.inputs import points_of, rank_inputs
from paramd_service.control.alerts.rules import MESH_RULES, Ranks, mesh_findings
from paramd_service.control.alerts.sampling import Sampler
from paramd_service.control.alerts.store import AlertStore, MemoryStore, Point
from paramd_service.control.alerts.tensors import TENSOR_RULES, NormHistory, tensor_findings
from paramd_service.control.alerts.webhook import Webhooks
from paramd_service.control.view import MeshView

LOOK_EVERY_S = 1.0
"""Time between two looks at a small mesh."""

RANKS_PER_S = 1024
"""A look at that many ranks is worth another second: it costs some 15 us a rank."""

POINTS_EVERY_S = 10.0
WINDOW_PARTS = 6
"""Looks kept of the stall window."""

log = logging.getLogger("paramd.control.alerts")

Tell = Callable[[Alert], None]


class Watcher:
    """`start`, `close`; what it found stands in `book`. Use on one event loop."""

    def __init__(
        self,
        config: AlertConfig,
        *,
        job: str,
        epoch: int,
        view: Callable[[], MeshView],
        sampler: Sampler,
        store: AlertStore | None = None,
        tell: Tell | None = None,
        webhooks: Webhooks | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """No I/O.

        Args:
            view: The mesh now.
            tell: Is called with every alert that begins or ends, for the event bus.
            clock: Seconds since the Unix epoch.
        """
        self.config = config
        self.book = Book(job=job, epoch=epoch, clear_after_s=config.clear_after_s)
        self._job = job
        self._epoch = epoch
        self._view = view
        self._sampler = sampler
        self._store: AlertStore = store if store is not None else MemoryStore()
        self._tell = tell
        self.webhooks = webhooks if webhooks is not None else Webhooks(config)
        self._clock = clock
        self._window: deque[tuple[float, Ranks]] = deque()
        self._norms = NormHistory(config.norm_window)
        self._stats_begin = 0
        self._digests_begin = 0
        self._digest_rounds = 0
        self._trouble: dict[str, str] = {}
        self._points_due_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self.round_counts = {"stats": 0, "digests": 0}
        """Rounds that succeeded, by kind."""
        self.failed_counts = {"stats": 0, "digests": 0}
        """Rounds that failed, by kind."""

    async def start(self) -> None:
        """Goes on with what the store has, then watches."""
        self.book.restore(await self._store.load_firing(self._job, self._epoch))
        self.webhooks.start()
        self._tasks = [asyncio.create_task(self._look_on(), name="paramd-watch")]
        if self.config.watch:
            self._tasks += [
                asyncio.create_task(
                    self._rounds("stats", self.config.stats_every_s, self.stats_round),
                    name="paramd-watch-stats",
                ),
                asyncio.create_task(
                    self._rounds("digests", self.config.digests_every_s, self.digests_round),
                    name="paramd-watch-digests",
                ),
            ]

    async def close(self) -> None:
        """Ends watching. What still fires stays so in the store, for a successor. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
        await self.webhooks.close()
        await self._sampler.close()

    async def end_epoch(self) -> None:
        """The epoch is over, and with it all that was wrong in it."""
        await self._told(self.book.close(self._clock()))

    async def look(self) -> None:
        """One look at what the sidecars report."""
        now_s = self._clock()
        now = rank_inputs(self._view())
        while len(self._window) > 1 and self._window[1][0] <= now_s - self.config.stall_window_s:
            self._window.popleft()
        before = self._window[0][1] if self._window else {}
        findings = mesh_findings(now, before, self.config)
        changes = self.book.observe(
            findings, covered=lambda finding: finding.rule in MESH_RULES, now_s=now_s
        )
        if (
            not self._window
            or now_s - self._window[-1][0] >= self.config.stall_window_s / WINDOW_PARTS
        ):
            self._window.append((now_s, now))
        await self._told(changes)
        if now_s >= self._points_due_s:
            self._points_due_s = now_s + POINTS_EVERY_S
            points = points_of(now, job=self._job, epoch=self._epoch, time_s=now_s)
            await self._store.save_points(points)

    async def stats_round(self) -> None:
        """Statistics of the next parameters. Raises ParamdErrors."""
        layout = await self._sampler.layout()
        self._norms.keep_only(tensor.fqn for tensor in layout.tensors)
        sample = self._next(layout, self._stats_begin, TENSOR_RULES)
        if not sample.tensors:
            return
        found = await self._sampler.stats(sample.tensors, timeout_s=self.config.sample_timeout_s)
        self._stats_begin = sample.next_begin
        findings = tensor_findings(found.tensors, self._norms, found.step, self.config)
        self._norms.seen(found.tensors)
        seen = {tensor.fqn for tensor in found.tensors}
        now_s = self._clock()
        await self._told(
            self.book.observe(findings, covered=_covers(TENSOR_RULES, seen), now_s=now_s)
        )
        await self._store.save_points(
            [
                Point(
                    job=self._job,
                    epoch=self._epoch,
                    name="norm",
                    subject=tensor.fqn,
                    step=found.step,
                    time_s=now_s,
                    value=tensor.norm,
                )
                for tensor in found.tensors
            ]
        )

    async def digests_round(self) -> None:
        """Compares replicas of the next parameters. Raises ParamdErrors."""
        if not self.config.looks_for(Rule.REPLICA_DRIFT):
            return
        layout = await self._sampler.layout()
        sample = self._next(layout, self._digests_begin, frozenset({Rule.REPLICA_DRIFT}))
        groups = self._groups(sample)
        self._digests_begin = sample.next_begin
        if not groups:
            return
        found = await self._sampler.digests(groups, timeout_s=self.config.sample_timeout_s)
        self._digest_rounds += 1
        findings = drift_findings(found.differences, found.places, found.step)
        seen = {group.fqn for group in groups}
        covered = _covers(frozenset({Rule.REPLICA_DRIFT}), seen)
        await self._told(self.book.observe(findings, covered=covered, now_s=self._clock()))

    def _groups(self, sample: Sample) -> list[ReplicaGroup]:
        joined = {report.rank for report in self._view().joined}
        groups = [
            group.on(joined.intersection(group.begins))
            for tensor in sample.tensors
            for group in replica_groups(tensor)
            if len(joined.intersection(group.begins)) > 1
        ]
        return choose_holders(groups, most_ranks=self.config.sample_ranks, turn=self._digest_rounds)

    def _next(self, layout: Layout, begin: int, rules: frozenset[Rule]) -> Sample:
        """The next tensors; those that fire are looked at again in every round."""
        again = [a.finding.fqn for a in self.book.firing if a.finding.rule in rules]
        return next_sample(layout, begin, most_bytes=self.config.sample_bytes, first=again)

    async def _look_on(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("a look at the mesh failed")
            await asyncio.sleep(LOOK_EVERY_S + len(self._view().ranks) / RANKS_PER_S)

    async def _rounds(self, kind: str, every_s: float, one: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                work = one()
                assert asyncio.iscoroutine(work)
                await work
            except ParamdError as error:
                self._failed(kind, f"{type(error).__name__}: {error}")
            except Exception as error:
                log.exception("a round of %s failed", kind)
                self._failed(kind, type(error).__name__)
            else:
                self.round_counts[kind] += 1
                if self._trouble.pop(kind, None):
                    log.info("rounds of %s work again", kind)

    def _failed(self, kind: str, reason: str) -> None:
        self.failed_counts[kind] += 1
        if self._trouble.get(kind) != reason:
            self._trouble[kind] = reason
            log.warning("a round of %s failed: %s", kind, reason)

    async def _told(self, changes: Sequence[Alert]) -> None:
        for alert in changes:
            level = logging.WARNING if alert.state is State.FIRING else logging.INFO
            log.log(
                level, "alert %s: %s: %s", alert.state.value, alert.finding.rule.value,
                alert.finding.reason,
            )  # fmt: skip
        if not changes:
            return
        await self._store.save_alerts(changes)
        if self._tell is not None:
            for alert in changes:
                self._tell(alert)
        self.webhooks.post(changes)


def _covers(rules: frozenset[Rule], fqns: set[str]) -> Callable[[Finding], bool]:
    """Whether a look at these tensors would find a finding again."""
    return lambda finding: finding.rule in rules and (not finding.fqn or finding.fqn in fqns)
