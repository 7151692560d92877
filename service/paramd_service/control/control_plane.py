"""One control plane: its components, their start order and their drain order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from paramd import parts, places
from paramd.errors import ParamdError, UnreachableError
from paramd.places import IncarnationRecord
from paramd_service.control.access.authority import Tokens
from paramd_service.control.access.doorway import Doorway
from paramd_service.control.access.join import FailureLimit
from paramd_service.control.access.revocations import Revocations
from paramd_service.control.api.app import build_app
from paramd_service.control.api.services import Services
from paramd_service.control.base.config import Bootstrap, ControlConfig
from paramd_service.control.base.endpoint import HANDOVER_S, Claim, Whereabouts, successor
from paramd_service.control.base.site import (
    IncarnationNotes,
    Site,
    next_generation,
    open_site,
    read_token,
    site_dir,
)
from paramd_service.control.grpc_server import GrpcServer
from paramd_service.control.http_server import HttpServer
from paramd_service.control.mesh.jobs import ControlIdentity, Incarnation, Jobs
from paramd_service.control.mesh.origin import parse_networks
from paramd_service.control.mesh.registry import may_train
from paramd_service.control.metrics.metrics import LoopLag, Metrics
from paramd_service.control.parts import ControlHost, ControlPart, tell_failed
from paramd_service.control.records.events import EventBus
from paramd_service.control.records.records import Records, open_records
from paramd_service.control.store.engine import StoreError
from paramd_service.parts import CONTROL
from paramd_service.tls import JobPems, ServerTls, advertised

TICK_S = 1.0
JOINED_S = 2.0
"""How long REST waits for the sidecars of a training that resumes."""
LOOKS = 100
"""Number of checks during that time."""
SITE_RANKS = 16_384
"""Most ranks admitted across all jobs of a site."""

log = logging.getLogger("paramd.control")


class ControlPlane:
    """Life cycle: `start`, `wait_until_done`, `stop`. Single event loop.

    A site's jobs register themselves; an embedded control plane opens the one job of its parent in
    `start`. They do not differ otherwise.
    """

    def __init__(self, config: ControlConfig, bootstrap: Bootstrap | None, claim: Claim) -> None:
        """No I/O. `bootstrap` is the one job of an embedded control plane; None for a site."""
        self._config = config
        self._bootstrap = bootstrap
        self._claim = claim
        self._tls = ServerTls(claim.files) if claim.files is not None else None
        self._grpc_tls = self._tls
        if claim.of_job:
            self._take_own_tls()
        self._grpc = GrpcServer()
        self._doorway = Doorway()
        self._http = HttpServer(self._doorway)
        self._drain_s = config.drain_s
        self._lag = LoopLag()
        self._events = EventBus()
        self._incarnations = IncarnationNotes()
        self._revocations = Revocations(ticket_ttl_s=config.ticket_ttl_s)
        self._done = asyncio.Event()
        self._grpc_target = ""
        self._reason = ""
        self._jobs: Jobs | None = None
        self._records: Records | None = None
        self._host: ControlHost | None = None
        self._token = ""
        self._asked_until_s = -math.inf
        """Until when a request to leave the ports is valid; on the monotonic clock."""
        self._past: IncarnationRecord | None = None
        """The incarnation whose records are shown, and nothing else."""

    @property
    def asked_to_stop(self) -> bool:
        """Whether it was asked, or has decided, to stop."""
        return self._done.is_set()

    def ask_to_stop(self, reason: str) -> None:
        """Make `wait_until_done` return; the first reason wins."""
        self._reason = self._reason or reason
        self._done.set()

    def hand_over(self) -> None:
        """Leave the ports to the job's next run, which asks for them: its address stays, and so do
        the sessions of open pages. Only once no trainer of this run may be alive: another training
        of the same name does not stop this one's control plane."""
        self._asked_until_s = time.monotonic() + HANDOVER_S
        self._hand_over_if_over()

    def _hand_over_if_over(self) -> None:
        mine, jobs = self._bootstrap, self._jobs
        if mine is None or jobs is None or time.monotonic() > self._asked_until_s:
            return
        if not may_train(jobs.get(mine.job).registry.view()):
            # Its callers wait for the next one.
            self._drain_s = 0.0
            self.ask_to_stop("the job's next run has asked for the ports")

    async def start(self) -> Whereabouts:
        """Start everything, in the numbered order.

        Raises:
            UsageError: The state dir cannot be used.
            UnreachableError: GRPC's port was taken after it had been claimed.
            ConflictError: A newer incarnation of the job is already running.
        """
        where = self._claim.whereabouts()
        # 1. Open the records, and load ended tokens before anyone is let in.
        self._records = await open_records(self._config, self._bootstrap)
        await self._revocations.start(self._records.tokens)
        # 2. Settle generation and secrets, make the parts; an embedded control plane opens its job.
        host = self._open_jobs(self._records)
        jobs = host.jobs
        # 3. Serve gRPC, unless there are only records.
        if self._past is None:
            await self._start_grpc(jobs, self._records)
        else:
            self._claim.give_grpc()
        self._grpc_target = where.grpc_address
        # 4. Serve REST. A training that resumes is running already, and clients ask for it at once.
        if self._bootstrap is not None and self._bootstrap.resumes:
            await self._all_joined(jobs.get(self._bootstrap.job))
        services = self._services(host)
        if self._past is None:
            own = services.tokens.own_digest
            kept = self._records.directory / "sessions.json"
            services.sessions.keep(kept, own, port=self._claim.http.port)
        await self._http.start(build_app(services), self._claim.listeners, tls=self._tls)
        # 5. All is served.
        await host.parts.started()
        # 6. Announce the address to the job's programs, now that all of it works.
        if self._bootstrap is not None:
            self._claim.announce(self._bootstrap)
            # The training may have gone on to the next one meanwhile.
            self._goes_on(jobs.get(self._bootstrap.job))
        # Noted only now: who reads that it has begun finds its address, or that it has ended.
        self._incarnations.start()
        mine = self._bootstrap
        whose = f"job {mine.job}, run {mine.incarnation}" if mine is not None else "a site"
        log.info("serving %s at %s", whose, where.url)
        return self._claim.whereabouts(await self._checkpoints(host))

    async def _checkpoints(self, host: ControlHost) -> tuple[Mapping[str, Any], ...]:
        """Newest first; none if they are unknown, or for several jobs."""
        if self._bootstrap is None:
            return ()
        try:
            return tuple(await host.parts.checkpoints(self._bootstrap.job))
        except StoreError:
            return ()

    async def _all_joined(self, mesh: Incarnation) -> None:
        """Return after `JOINED_S` at the latest: one missing rank must not keep all from REST."""
        for _ in range(LOOKS):
            if not mesh.registry.view().absent:
                return
            await asyncio.sleep(JOINED_S / LOOKS)

    async def wait_until_done(self) -> str:
        """Run until nothing is left to do; return why."""
        while True:
            before_s = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), TICK_S)
                return self._reason
            self._lag.saw(time.monotonic() - before_s - TICK_S)
            assert self._jobs is not None
            self._jobs.tick(time.monotonic())
            self._hand_over_if_over()
            reason = self._why_end(self._jobs)
            if reason is not None:
                self.ask_to_stop(reason)
            await self._jobs.keep_channels()

    async def stop(self) -> None:
        """Drain, in the numbered order. Safe after a failed start."""
        self.ask_to_stop("stopped")
        # 1. Withdraw the address: no new clients.
        self._claim.withdraw()
        # 2. Health reports stopping; sidecars are sent away; boundaries in progress may finish.
        await self._grpc.say_stopping()
        if self._jobs is not None:
            self._jobs.send_away(UnreachableError("the control plane is stopping; join again"))
        await self._grpc.stop(self._drain_s)
        # 3. REST finishes its requests; event streams, which would never end, are closed first.
        self._events.close()
        await self._http.stop(self._drain_s)
        # 4. The parts, then the jobs, whose connections their work uses.
        if self._host is not None:
            await self._host.parts.closed()
        if self._jobs is not None:
            await self._jobs.close()
        await self._incarnations.close()
        await self._revocations.stop()
        # 5. The records last: everything above still writes to them.
        if self._records is not None:
            await self._records.stop()

    def _take_own_tls(self) -> None:
        """Serve TLS with the job's CA: REST for everyone with a token, gRPC within the job."""
        assert self._bootstrap is not None
        host = advertised(self._claim.http.host, self._config.advertise, tls=True)
        names = (host, socket.gethostname())
        pems = self._bootstrap.certificates.served([name for name in names if name])
        self._tls = ServerTls(JobPems(pems, mutual=False))
        self._grpc_tls = ServerTls(JobPems(pems, mutual=True))

    @property
    def _tls_of_files(self) -> ServerTls | None:
        """TLS that the operator must renew; None without TLS, or with the job's CA."""
        return None if self._claim.of_job else self._tls

    def _open_jobs(self, records: Records) -> ControlHost:
        mine = self._bootstrap
        site: Site | None = None
        if mine is None:
            site = open_site(read_token(self._config.token_file))
            generation = next_generation(site_dir())
        elif mine.ended:
            past = places.incarnations(mine.job)
            self._past = next(one for one in past if one.incarnation == mine.incarnation)
            generation = 0
        else:
            generation = next_generation(places.job_dir(mine.job))
        self._token = mine.token if mine is not None else site.token if site is not None else ""
        terms = ControlIdentity(
            generation=generation,
            control_address=lambda: self._grpc_target,
            report_s=self._config.report_s,
            silent_after_s=self._config.silent_after_s,
            sidecar_networks=parse_networks(self._config.sidecar_networks),
        )
        empty_end_s = self._config.empty_end_s if mine is not None else math.inf
        self._jobs = jobs = Jobs(
            terms,
            site=site,
            empty_end_s=empty_end_s,
            publish=self._events.publish,
            has_ended=self._revocations.has_ended,
        )
        if self._past is None:
            for noted in (jobs.on_begin, jobs.on_death, jobs.on_end):
                noted.append(lambda mesh: self._incarnations.note(mesh.job, mesh.record()))
        if mine is not None:
            jobs.on_begin.append(self._goes_on)
        jobs.on_begin.append(records.incarnation_began)
        jobs.on_end.append(records.incarnation_ended)
        files = self._tls_of_files
        self._host = host = ControlHost(
            self._config,
            jobs=jobs,
            records=records,
            events=self._events,
            parts=parts.found(CONTROL, "control", ControlPart, tell_failed),
            grpc_address=lambda: self._grpc_target,
            expires_s=lambda: files.expires_s if files is not None else None,
            shows_records=self._past is not None,
        )
        jobs.on_begin.append(host.parts.began)
        jobs.on_end.append(host.parts.ended)
        jobs.on_evict.append(host.parts.evicted)
        jobs.on_view.extend((host.parts.seen, records.tick))
        if mine is not None:
            jobs.open(mine, past=self._past)
        return host

    def _goes_on(self, mesh: Incarnation) -> None:
        """Be found by the programs of a next incarnation, which has the same addresses."""
        try:
            self._claim.announce_next(mesh.bootstrap)
        except ParamdError as error:
            log.warning("run %d could not be announced: %s", mesh.number, error)

    def _why_end(self, jobs: Jobs) -> str | None:
        """Why to stop, or None. Only an embedded control plane ends by itself."""
        if self._bootstrap is None or self._claim.endpoint is None:
            return None
        if self._past is not None:
            job, last = self._bootstrap.job, self._past.incarnation
            if os.getppid() != self._bootstrap.parent:
                return "the process that started it has left"
            begins = places.is_starting(job) or places.incarnations(job)[-1].incarnation > last
            return "the job begins again" if begins else None
        newer = successor(self._claim.endpoint)
        if newer is not None:
            # It waits for the store, and its callers for it.
            self._drain_s = 0.0
            return f"the control plane of run {newer.incarnation} (pid {newer.pid}) has taken over"
        over = jobs.get(self._bootstrap.job).over
        return str(over) if over is not None else None

    async def _start_grpc(self, jobs: Jobs, records: Records) -> None:
        ranks = self._bootstrap.world_size if self._bootstrap is not None else SITE_RANKS
        wanted = self._claim.give_grpc()
        bound = await self._grpc.start(
            jobs,
            self._revocations,
            wanted,
            address=lambda: self._grpc_target,
            ranks=ranks,
            denied=records.denied,
            tls=self._grpc_tls,
        )
        if bound != wanted:
            raise UnreachableError(f"another process has taken {wanted}, the address for gRPC")

    def _services(self, host: ControlHost) -> Services:
        records = host.records
        return Services(
            host=host,
            listen_host=self._claim.http.host,
            refusal=self._refusal,
            tls=self._tls,
            ca=self._ca,
            metrics=Metrics(host=host, lag=self._lag, tls=self._tls_of_files),
            tokens=Tokens(
                self._token,
                records.tokens,
                recorded=records.recorded,
                on_revoked=self._revocations.revoked,
            ),
            revocations=self._revocations,
            denied=records.denied,
            failures=FailureLimit(),
            doorway=self._doorway,
            stopping=self._done.is_set,
        )

    @property
    def _refusal(self) -> str:
        """Why all but the records is refused; empty while jobs are served."""
        if self._bootstrap is None or self._past is None:
            return ""
        return (
            f"job {self._bootstrap.job!r} {places.end_text(self._past)}: only its records are "
            "shown here, and this needs its ranks or changes something; start the job again"
        )

    @property
    def _ca(self) -> bytes:
        """The job's own CA, if it has signed our certificate."""
        mine = self._bootstrap
        return mine.certificates.authority.pem if mine is not None and self._claim.of_job else b""
