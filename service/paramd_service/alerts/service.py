"""The watchers of a control plane's jobs: one for each open incarnation."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from functools import partial

from paramd.errors import ParamdError
from paramd.layout.edits.ops import EditState
from paramd.mesh.insight.reports import Alert
from paramd_service.aio import kept
from paramd_service.alerts.config import AlertConfig
from paramd_service.alerts.numbers import ASK_TIMEOUT_S
from paramd_service.alerts.sampling import MeshSampler
from paramd_service.alerts.store import AlertStore, State
from paramd_service.alerts.suspects import KEPT
from paramd_service.alerts.watcher import Watcher
from paramd_service.alerts.webhook import Webhooks
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.parts import ControlHost
from paramd_service.control.store.edits import EditRow

log = logging.getLogger("paramd.control.alerts")


class Watchers:
    """All jobs' watchers. Single event loop."""

    def __init__(self, host: ControlHost, config: AlertConfig) -> None:
        self.config = config
        self.store = AlertStore(host.records.store)
        self.webhooks = Webhooks(config.webhooks)
        self._host = host
        self._watchers: dict[str, Watcher] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stop all watchers; firing alerts stay firing in the store. Idempotent."""
        for watcher in list(self._watchers.values()):
            await watcher.close()
        if self._ending:
            await asyncio.wait(self._ending)
        await self.webhooks.close()

    def get(self, job: str) -> Watcher | None:
        """The watcher of a job's latest incarnation, which may be over; None before any."""
        return self._watchers.get(job)

    def all(self) -> list[tuple[str, Watcher]]:
        """Every job's watcher, sorted by job name."""
        return sorted(self._watchers.items())

    def applied(self, row: EditRow) -> None:
        """Note an edit that was applied: a finding may come from it."""
        watcher = self._watchers.get(row.job)
        if watcher is not None:
            watcher.changes.add([row])

    def began(self, mesh: Incarnation) -> None:
        """Watch an incarnation."""
        records, parts = self._host.records, self._host.parts
        watcher = Watcher(
            config=self.config,
            job=mesh.job,
            incarnation=mesh.number,
            view=mesh.registry.view,
            sampler=MeshSampler(mesh.reaching),
            ask_logged=lambda report, request: mesh.calls.ask(
                report.rank, report.address, request, timeout_s=ASK_TIMEOUT_S
            ),
            look=parts.look(mesh),
            reaching=mesh.reaching,
            lost_marks=partial(parts.lost_marks, mesh.job),
            webhooks=self.webhooks,
            store=self.store,
            offer=records.history.offer,
            tell=self._tell,
            failed=partial(parts.failed, mesh.job),
            applied=partial(records.edits.page, mesh.job, limit=KEPT, state=EditState.APPLIED),
            expires_s=self._host.expires_s,
            trouble=lambda: records.history.problem,
        )
        watcher.start()
        self._watchers[mesh.job] = watcher

    def seen(self, mesh: Incarnation, view: MeshView) -> None:
        """Check what its ranks report; called once a second."""
        watcher = self._watchers.get(mesh.job)
        if watcher is not None:
            watcher.tick(view)

    def is_over(self, mesh: Incarnation) -> None:
        """Resolve the alerts of an incarnation that has ended."""
        # `Jobs` ends an incarnation before it announces the next one, so this is the right watcher.
        watcher = self._watchers.get(mesh.job)
        if watcher is not None:
            kept(self._ending, watcher.close(incarnation_over=True))

    def evicted(self, job: str) -> None:
        """Let go of a job."""
        self._watchers.pop(job, None)

    def _tell(self, alert: Alert) -> None:
        self._host.events.publish("alert", asdict(alert), job=alert.job)
        if alert.state == State.FIRING and alert.rule in self.config.pause:
            # Once: whoever resumes training has seen the alert, which may continue to fire.
            kept(self._ending, self._pause(alert), "paramd-alert-pause")

    async def _pause(self, alert: Alert) -> None:
        try:
            await self._host.parts.pause(alert.job, f"alert {alert.rule}")
        except ParamdError as error:
            log.warning("job %s is not paused for an alert: %s", alert.job, error)
