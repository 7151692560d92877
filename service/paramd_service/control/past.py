"""The control plane of a job that has ended: its store, its REST side and the page, to be read.

`paramd dashboard` starts it at the address that the job had, and the job's next start ends it. It
has no ranks, writes nothing to the store, and leaves when the process that started it has left.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict

from paramd import places, state_files
from paramd.errors import NotFoundError, ParamdError
from paramd_service.control.access.authority import Tokens
from paramd_service.control.access.doorway import Doorway
from paramd_service.control.access.join import FailureLimit
from paramd_service.control.access.revocations import Revocations
from paramd_service.control.alerts.config import AlertConfig
from paramd_service.control.alerts.service import Watchers
from paramd_service.control.api.app import build_app
from paramd_service.control.api.services import Services
from paramd_service.control.base.config import Bootstrap, ControlConfig, loaded
from paramd_service.control.base.endpoint import Claim, Whereabouts, endpoint_of
from paramd_service.control.base.site import directory_of
from paramd_service.control.edits.service import EditRegistry
from paramd_service.control.edits.spec import EditConfig
from paramd_service.control.exports.documents import load_destinations
from paramd_service.control.exports.service import ExportService
from paramd_service.control.http_server import HttpServer
from paramd_service.control.mesh.jobs import ControlIdentity, Jobs
from paramd_service.control.metrics.metrics import LoopLag, Metrics
from paramd_service.control.records.events import EventBus
from paramd_service.control.records.records import Records
from paramd_service.destinations.destinations import Destination
from paramd_service.tls import ServerTls

LOOK_S = 1.0

log = logging.getLogger("paramd.control")


class PastControlPlane:
    """Life cycle as `ControlPlane`. Single event loop."""

    def __init__(self, config: ControlConfig, bootstrap: Bootstrap, claim: Claim) -> None:
        """No I/O."""
        self._config = config
        self._bootstrap = bootstrap
        self._claim = claim
        self._tls = ServerTls(claim.files) if claim.files is not None else None
        self._doorway = Doorway()
        self._http = HttpServer(self._doorway)
        self._events = EventBus()
        self._revocations = Revocations(ticket_ttl_s=config.ticket_ttl_s)
        self._records: Records | None = None
        self._jobs: Jobs | None = None
        self._done = asyncio.Event()
        self._reason = ""
        self._parent = os.getppid()

    @property
    def asked_to_stop(self) -> bool:
        """Whether it was asked, or has decided, to stop."""
        return self._done.is_set()

    def ask_to_stop(self, reason: str) -> None:
        """Make `wait_until_done` return; the first reason wins."""
        self._reason = self._reason or reason
        self._done.set()

    async def start(self) -> Whereabouts:
        """Serve the records of the job's last incarnation.

        Raises:
            NotFoundError: nothing is stored of it here.
            ConflictError: another version of paramd stored it.
        """
        job, where = self._bootstrap.job, self._claim.whereabouts()
        self._records = records = Records(self._config.store, directory_of(job), chain=job)
        await records.start_reading()
        await self._revocations.start(records.tokens)
        past = places.incarnations(job)
        if not past:
            raise NotFoundError(f"no incarnation of job {job!r} is noted here")
        self._jobs = jobs = Jobs(ControlIdentity(generation=0), site=None)
        edits = EditRegistry(records, EditConfig(), publish=self._events.publish)
        mesh = jobs.open(self._bootstrap)
        mesh.recall(past[-1])
        edits.began(mesh)
        services = self._services(records, jobs, edits, where, past[-1])
        services.sessions.keep(records.directory / "sessions.json")
        self._claim.give_grpc()
        await self._http.start(build_app(services), self._claim.listener, tls=self._tls)
        endpoint = endpoint_of(self._bootstrap, where.url, "")
        path = places.job_dir(job) / places.PAST_FILE
        state_files.replace(path, json.dumps(asdict(endpoint), sort_keys=True) + "\n")
        log.info("showing the records of job %s at %s", job, where.url)
        return where

    async def wait_until_done(self) -> str:
        """Run until it is asked to stop, who started it has left, or the job begins again."""
        job, last = self._bootstrap.job, self._bootstrap.incarnation
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), LOOK_S)
                return self._reason
            if os.getppid() != self._parent:
                return "the process that started it has left"
            if places.is_starting(job) or places.incarnations(job)[-1].incarnation > last:
                return "the job begins again"

    async def stop(self) -> None:
        """Release everything. Safe after a failed start."""
        self.ask_to_stop("stopped")
        with suppress(ParamdError, OSError):
            mine = places.past_endpoint(self._bootstrap.job)
            if mine is not None and mine.pid == os.getpid():
                (places.job_dir(mine.job) / places.PAST_FILE).unlink(missing_ok=True)
        self._events.close()
        await self._http.stop(0.0)
        if self._jobs is not None:
            await self._jobs.close()
        await self._revocations.stop()
        if self._records is not None:
            await self._records.stop()

    def _services(
        self,
        records: Records,
        jobs: Jobs,
        edits: EditRegistry,
        where: Whereabouts,
        last: places.IncarnationRecord,
    ) -> Services:
        job = self._bootstrap.job
        destinations = loaded(
            load_destinations,
            strict=False,
            otherwise=dict[str, Destination](),
            told="the destinations are invalid",
        )
        watchers = Watchers(
            config=AlertConfig(),
            publish=self._events.publish,
            store=records.alerts,
            offer=records.history.offer,
        )
        exports = ExportService(records, destinations, publish=self._events.publish)
        return Services(
            config=self._config,
            listen_host=self._claim.http.host,
            grpc_address=where.grpc_address,
            refusal=f"job {job!r} {places.end_text(last)}: only its records are shown here, and "
            "this needs its ranks or would change something; start the job again",
            tls=self._tls,
            jobs=jobs,
            metrics=Metrics(
                jobs=jobs,
                lag=LoopLag(),
                watchers=watchers,
                tls=None,
                exports=exports,
                edits=edits,
                records=records,
            ),
            edits=edits,
            watchers=watchers,
            exports=exports,
            tokens=Tokens(self._bootstrap.token, records.tokens),
            revocations=self._revocations,
            records=records,
            denied=records.denied,
            failures=FailureLimit(),
            doorway=self._doorway,
            events=self._events,
            stopping=self._done.is_set,
        )
