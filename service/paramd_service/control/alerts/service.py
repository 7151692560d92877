"""Watchers, one per open incarnation, and the loading of their config."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paramd.errors import ParamdError, UsageError
from paramd.layout.edits.ops import EditState
from paramd.mesh.edits.calls import Mark, PauseWord
from paramd.mesh.insight.reports import Alert
from paramd_service.aio import kept
from paramd_service.control.alerts.config import AlertConfig
from paramd_service.control.alerts.health import Verdict, verdict_of
from paramd_service.control.alerts.looks import Look
from paramd_service.control.alerts.numbers import ASK_TIMEOUT_S
from paramd_service.control.alerts.sampling import MeshSampler
from paramd_service.control.alerts.suspects import KEPT
from paramd_service.control.alerts.watcher import Offer, Watcher
from paramd_service.control.alerts.webhook import Webhooks
from paramd_service.control.base.config import settings_of, table_of_file, table_of_text
from paramd_service.control.insight.verdict import Evidence
from paramd_service.control.insight.why import chosen, evidence_of, inspect
from paramd_service.control.mesh.jobs import Incarnation, Jobs
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.mesh.registry import State as MeshState
from paramd_service.control.mesh.watch import Publish
from paramd_service.control.store.alerts import AlertStore, State
from paramd_service.control.store.edits import EditRow, EditStore
from paramd_service.control.store.exports import ExportRow

Pause = Callable[[str, str], Awaitable[None]]

log = logging.getLogger("paramd.control.alerts")

ENVIRONMENT = "PARAMD_ALERTS"
"""The table as JSON; its keys override those of files."""

STALL_BUDGET = "PARAMD_STALL_BUDGET_MS"


def _look_at(mesh: Incarnation) -> Look:
    async def look() -> Sequence[Evidence]:
        ranks = chosen(mesh.registry.view().ranks, ())
        return [evidence_of(one) for one in await inspect(mesh.calls, ranks, log_lines=0)]

    return look


@dataclass(kw_only=True, eq=False)
class Watchers:
    """All jobs' watchers: `start` follows `Jobs`, `close` ends them. Single event loop."""

    config: AlertConfig
    publish: Publish
    store: AlertStore
    """As in `Watcher`, like the next ones."""
    offer: Offer
    expires_s: Callable[[], float | None] = lambda: None
    trouble: Callable[[], str] = str
    pause: Pause | None = None
    """Pauses the training of a job, with the given reason; None: nothing can."""
    lost_marks: Callable[[str], Awaitable[Sequence[Mark]]] | None = None
    """Tells which marks of a job are no longer on all ranks; None: there are none."""

    failed: Callable[[str], ExportRow | None] | None = None
    """Tells the newest export of a job that has ended, if it failed; None: there are none."""
    edits: EditStore | None = None
    """Where edits are kept that an earlier control plane applied; None: nowhere."""

    def __post_init__(self) -> None:
        self.webhooks = Webhooks(self.config.webhooks)
        self._watchers: dict[str, Watcher] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def start(self, jobs: Jobs) -> None:
        """Watch the open jobs and every later one."""
        jobs.follow(self._begin, self._end, self._look)
        jobs.on_evict.append(lambda job: self._watchers.pop(job, None))

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

    def _begin(self, mesh: Incarnation) -> None:
        watcher = Watcher(
            config=self.config,
            job=mesh.job,
            incarnation=mesh.number,
            view=mesh.registry.view,
            sampler=MeshSampler(mesh.reaching),
            ask_logged=lambda report, request: mesh.calls.ask(
                report.rank, report.address, request, timeout_s=ASK_TIMEOUT_S
            ),
            look=_look_at(mesh),
            reaching=mesh.reaching,
            lost_marks=partial(self.lost_marks, mesh.job) if self.lost_marks else None,
            webhooks=self.webhooks,
            store=self.store,
            offer=self.offer,
            tell=self._tell,
            failed=partial(self.failed, mesh.job) if self.failed else lambda: None,
            applied=partial(self.edits.page, mesh.job, limit=KEPT, state=EditState.APPLIED)
            if self.edits is not None
            else None,
            expires_s=self.expires_s,
            trouble=self.trouble,
        )
        watcher.start()
        self._watchers[mesh.job] = watcher

    def _end(self, mesh: Incarnation) -> None:
        # `Jobs` ends an incarnation before it announces the next one, so this is the right watcher.
        watcher = self._watchers.get(mesh.job)
        if watcher is not None:
            kept(self._ending, watcher.close(incarnation_over=True))

    def _look(self, mesh: Incarnation, view: MeshView) -> None:
        watcher = self._watchers.get(mesh.job)
        if watcher is not None:
            watcher.tick(view)

    def _tell(self, alert: Alert) -> None:
        self.publish("alert", asdict(alert), job=alert.job)
        if self.pause and alert.state == State.FIRING and alert.rule in self.config.pause:
            # Once: whoever resumes training has seen the alert, which may continue to fire.
            kept(self._ending, self._paused(alert, self.pause), "paramd-alert-pause")

    @staticmethod
    async def _paused(alert: Alert, pause: Pause) -> None:
        try:
            await pause(alert.job, f"alert {alert.rule}")
        except ParamdError as error:
            log.warning("job %s is not paused for an alert: %s", alert.job, error)


def verdict_on(
    watcher: Watcher | None,
    *,
    state: MeshState,
    reason: str,
    pause: PauseWord,
    is_late: bool = False,
) -> Verdict:
    """The verdict on a job by its watcher; see `verdict_of`. None: it has none, as a job whose
    records alone are shown, and nobody would tell of ranks that are not heard of."""
    return verdict_of(
        state=state,
        reason=reason,
        pause=pause,
        firing=watcher.book.firing if watcher is not None else (),
        watches=watcher.watches() if watcher is not None else (),
        is_late=is_late and watcher is not None and watcher.tells_of_late,
    )


def parse_alerts(table: Mapping[str, Any], *, place: str, trusted: bool = True) -> dict[str, Any]:
    """The fields of AlertConfig set by a table, with types checked; `place` is its origin, for
    errors. One that is not `trusted` may come with someone else's project: it may set
    thresholds, but no receivers of alerts.

    Raises:
        UsageError: An unknown key or a value of the wrong type.
    """
    for key in ("webhooks", "pause"):
        if key in table and not trusted:
            raise UsageError(
                f"{place}: {key} in the working directory is not trusted; set it in the "
                f"user's own paramd.toml or in {ENVIRONMENT}"
            )
    return settings_of(table, AlertConfig, name="alerts", place=place)


def load_alerts(
    files: Sequence[tuple[Path, bool]], environment: Mapping[str, str], *, watch: bool
) -> AlertConfig:
    """The effective config: the environment's JSON, then the [alerts] of `files` (path, is_own);
    earlier ones win. Without `watch` nothing is sampled, whatever is configured.

    Raises:
        UsageError: Something cannot be read or is out of range.
    """
    merged: dict[str, Any] = _stall_budget(environment)
    for path, trusted in reversed(files):
        merged |= parse_alerts(
            table_of_file(path, "alerts"), place=f"{path}: [alerts]", trusted=trusted
        )
    table = table_of_text(environment.get(ENVIRONMENT, ""), ENVIRONMENT)
    merged |= parse_alerts(table, place=ENVIRONMENT)
    if not watch:
        merged |= {"watch": False, "look": False, "compare": False}
    return AlertConfig(**merged)


def _stall_budget(environment: Mapping[str, str]) -> dict[str, Any]:
    """The trainers' budget: an embedded control plane inherits a trainer's environment."""
    text = environment.get(STALL_BUDGET, "")
    try:
        budget_ms = float(text) if text else 0.0
    except ValueError:
        raise UsageError(f"{STALL_BUDGET} must be a number, is {text!r}") from None
    # A trainer that never waits has no budget to compare with.
    return {"stall_budget_s": budget_ms / 1e3} if budget_ms > 0 else {}
