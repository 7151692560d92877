"""A control plane's records as one component: the store and everything written to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from paramd import places
from paramd.version import __version__
from paramd_service.aio import kept
from paramd_service.control.access.authority import Principal
from paramd_service.control.base.config import Bootstrap, ControlConfig
from paramd_service.control.base.site import directory_of, site_dir
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.records.audit import Action, Audit, Denials, Entry
from paramd_service.control.store.edits import EditStore
from paramd_service.control.store.engine import StoreError, parse_store
from paramd_service.control.store.history import MetricHistory
from paramd_service.control.store.store import Store
from paramd_service.control.store.tokens import TokenStore

MAX_REFUSAL_CHARS = 256
SELF = "control plane"
"""Actor of actions that the control plane takes by itself."""

log = logging.getLogger("paramd.control")


class Records:
    """The store with its audit, tokens, edits and history. Single event loop."""

    def __init__(self, store: str, directory: Path, *, chain: str, incarnation: int = 0) -> None:
        """No I/O. `store`: its URL; empty for a file in `directory`, which is the job's or the
        site's, with mode 0700. `chain`: of the control plane's own actions: the job's when
        embedded, empty for a site. `incarnation`: the embedded one's.

        Raises:
            UsageError: If `store` is not supported.
        """
        self.store = Store(parse_store(store, directory=directory))
        self.audit = Audit(self.store)
        self.directory = directory
        self.history = MetricHistory(self.store)
        self.tokens = TokenStore(self.store)
        self.edits = EditStore(self.store)
        self.chain = chain
        self._incarnation = incarnation
        self._denials = Denials(self.audit, chain)
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False

    async def start(self, settings: Mapping[str, Any]) -> None:
        """Open the store and record the start. An unavailable store is only logged.

        Raises:
            UsageError: The store's driver is missing.
            ConflictError: A newer paramd has used it.
        """
        try:
            await self.store.start()
        except StoreError as error:
            log.error("%s; until it is available, changes are refused and reads continue", error)
        self.history.start()
        self._started = True
        detail = {"settings": dict(settings), "store": str(self.store.address)}
        await self.audit.event(self._action(SELF, "", "control.start", detail))

    async def stop(self) -> None:
        """Record the stop, flush and close. Idempotent; safe after a failed start."""
        if self._started:
            # First: from here on `note` and `denied` add nothing behind the last record.
            self._started = False
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._denials.close()
            await self.audit.event(self._action(SELF, "", "control.stop", {}))
            await self.history.stop()
        await self.store.stop()

    def recorded(
        self, by: Principal, method: str, detail: Mapping[str, Any], of: Incarnation | None = None
    ) -> AbstractAsyncContextManager[Entry]:
        """Record a mutation around its effect, in the job's chain; see `Audit`. `of` is the changed
        incarnation; None for the control plane itself."""
        return self.audit.mutation(self._action(by.name, by.role.value, method, detail, of))

    async def happened(
        self, by: Principal, method: str, detail: Mapping[str, Any], of: Incarnation
    ) -> None:
        """Record a user's action that is allowed even when the audit cannot be written."""
        await self.audit.event(self._action(by.name, by.role.value, method, detail, of))

    def denied(self, actor: str, role: str, operation: str, reason: str) -> None:
        """Record a refused call. Never blocks, never fails."""
        if self._started:
            self._denials.saw(actor=actor, role=role, method=operation, reason=reason)

    def incarnation_began(self, mesh: Incarnation) -> None:
        """Record that a job's incarnation began; training never waits for it."""
        self.note(mesh, "run.begin", {"world_size": mesh.bootstrap.world_size})

    def incarnation_ended(self, mesh: Incarnation) -> None:
        """Record that a job's incarnation ended, and why."""
        self.note(mesh, "run.end", {"reason": mesh.reason})

    def tick(self, mesh: Incarnation, view: MeshView, now_s: float | None = None) -> None:
        """Record refusals reported by sidecars, batched; called once a second."""
        now_s = now_s if now_s is not None else time.monotonic()
        for refused in mesh.refusals.tick(view, now_s):
            detail = asdict(refused) | {"last": refused.last[:MAX_REFUSAL_CHARS]}
            self.note(mesh, "sidecar.denied", detail)

    async def event(self, action: Action) -> None:
        """Record what has happened, unless only records are shown. Never fails."""
        if self._started:
            await self.audit.event(action)

    def note(self, mesh: Incarnation, method: str, detail: Mapping[str, Any]) -> None:
        """Record an action that the control plane took by itself. Never blocks."""
        if not self._started:
            return
        action = self._action(SELF, "", method, detail, mesh)
        kept(self._tasks, self.audit.event(action), "paramd-audit-incarnation")

    def _action(
        self,
        actor: str,
        role: str,
        method: str,
        detail: Mapping[str, Any],
        of: Incarnation | None = None,
    ) -> Action:
        return Action(
            actor=actor,
            role=role,
            method=method,
            job=of.job if of is not None else self.chain,
            incarnation=of.number if of is not None else self._incarnation,
            detail=detail,
        )


async def open_records(config: ControlConfig, mine: Bootstrap | None) -> Records:
    """Start a control plane's records; `mine`: the embedded job. Raises as `Records.start`."""
    if mine is None:
        directory = site_dir()
    else:
        directory = directory_of(mine.job) if mine.ended else places.job_dir(mine.job)
    records = Records(
        config.store,
        directory,
        chain=mine.job if mine is not None else "",
        incarnation=mine.incarnation if mine is not None else 0,
    )
    if mine is not None and mine.ended:
        await records.store.start_reading()
        return records
    settings = {item.name: getattr(config, item.name) for item in fields(config) if item.repr}
    try:
        await records.start({**settings, "version": __version__})
    except BaseException:
        await records.stop()
        raise
    return records
