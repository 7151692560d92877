"""Alerts of a control plane's jobs, and their metric history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily as Counted
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric

from paramd_service.alerts import history, past, rest
from paramd_service.alerts.book import Severity
from paramd_service.alerts.config import AlertConfig, Rule, load_alerts
from paramd_service.alerts.health import verdict_of
from paramd_service.alerts.service import Watchers
from paramd_service.control.base.families import Row, family
from paramd_service.control.mesh.health import Health, Seen
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.parts import ControlHost, ControlPart
from paramd_service.control.store.edits import EditRow


class Alerts(ControlPart):
    """Watches every open incarnation, and says what is wrong with it."""

    name = "alerts"

    def __init__(self, host: ControlHost) -> None:
        super().__init__(host)
        config = host.loaded(
            partial(load_alerts, watch=not host.config.no_watch),
            otherwise=AlertConfig(),
            told="invalid alert configuration, using the defaults",
        )
        self._watchers = Watchers(host, config)

    def routes(self) -> Sequence[APIRouter]:
        return [
            rest.router(self.host, self._watchers),
            history.router(self.host, self._watchers),
            past.router(self.host),
        ]

    def began(self, mesh: Incarnation) -> None:
        self._watchers.began(mesh)

    def seen(self, mesh: Incarnation, view: MeshView) -> None:
        self._watchers.seen(mesh, view)

    def ended(self, mesh: Incarnation) -> None:
        self._watchers.is_over(mesh)

    def evicted(self, job: str) -> None:
        self._watchers.evicted(job)

    async def closed(self) -> None:
        await self._watchers.close()

    def edit_applied(self, row: EditRow) -> None:
        self._watchers.applied(row)

    def stall_budget_s(self) -> float:
        return self._watchers.config.stall_budget_s

    def health(self, mesh: Incarnation, seen: Seen) -> Health | None:
        watcher = self._watchers.get(mesh.job)
        # A job whose records alone are shown has none, and nobody would tell of its ranks.
        if watcher is None:
            return None
        firing = watcher.book.firing
        verdict = verdict_of(
            seen,
            firing=firing,
            watches=watcher.watches(),
            tells_of_late=watcher.tells_of_late,
        )
        critical = sum(alert.severity == Severity.CRITICAL for alert in firing)
        return Health(
            verdict=verdict, critical_count=critical, warning_count=len(firing) - critical
        )

    def metrics(self) -> Iterator[Metric]:
        watchers = self._watchers.all()
        firing: list[Row] = []
        rounds: list[Row] = []
        for job, watcher in watchers:
            counts = Counter(alert.rule for alert in watcher.book.firing)
            firing += [((job, rule.value), counts[rule]) for rule in Rule]
            for ok, found in (("true", watcher.round_counts), ("false", watcher.failed_counts)):
                rounds += [((job, kind, ok), count) for kind, count in found.items()]
        yield family(Gauge, "paramd_alerts_firing", "Firing alerts", "job rule", firing)
        fired = [((job,), watcher.book.fired_count) for job, watcher in watchers]
        yield family(Counted, "paramd_alerts_fired", "Alerts that ever fired", "job", fired)
        text = "Sampling rounds by outcome"
        yield family(Counted, "paramd_watch_rounds", text, "job kind ok", rounds)
        hooks = self._watchers.webhooks
        posts = [(("true",), hooks.posted_count), (("false",), hooks.failed_count)]
        yield family(Counted, "paramd_webhook_posts", "Webhook posts by outcome", "ok", posts)
