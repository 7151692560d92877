"""Jobs and their current incarnations; an embedded control plane has exactly one job.

    register -----------> open --all ranks detached, or empty for too long--> over
    Join of an incarnation  |
    that we handed out -----+--a newer incarnation or control plane---------> over

A job whose incarnation is over stays listed until it registers again or is evicted for newer jobs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paramd import places
from paramd.errors import (
    ConflictError,
    DeniedError,
    ExhaustedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd.places import IncarnationRecord
from paramd.security.tickets import Signer, Verifier
from paramd.state_files import is_job_name
from paramd_service import admission
from paramd_service.aio import kept
from paramd_service.control.base.config import MAX_WORLD_SIZE, Bootstrap
from paramd_service.control.base.site import Site
from paramd_service.control.mesh.coordinator import Coordinator
from paramd_service.control.mesh.origin import Networks
from paramd_service.control.mesh.registry import (
    Death,
    MeshView,
    Registry,
    death_of,
    listed,
    report_interval,
    trains,
    why_end,
)
from paramd_service.control.mesh.sidecars import LayoutSource, OwnDirectory, OwnFinder, SidecarCalls
from paramd_service.control.mesh.statistics import StatsSource
from paramd_service.control.mesh.watch import Publish, RefusalBook, StateWatch

REFRESHED = "the training has attached its parameters anew (attachment.refresh)"

MAX_JOBS = 512
"""Jobs kept in memory; past the cap, the oldest idle one is evicted."""

JOBS_OF_TOKEN = 192
"""Jobs of one token, whose ranks are at most MAX_WORLD_SIZE together; past that, the token's own
oldest idle job is evicted."""

LOOKED_PER_S = 16_384
"""Ranks of one mesh that are examined each second: one takes 8 us of the event loop."""

RETURN_S = 20.0
"""Grace period after our start in which a job with an open incarnation is reported as starting
rather than unknown; longer than a sidecar's longest back-off between attempts to join."""

MAX_VERIFIERS = 1024

SETTLES_S = 10.0
"""Seconds after the first death in which a report may tell of an earlier one."""

log = logging.getLogger("paramd.control")


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlIdentity:
    """Settings shared by every job of a control plane."""

    generation: int
    """Of two control planes, sidecars obey the one with the higher generation."""
    control_address: Callable[[], str] = str
    """Our own gRPC target, once it is known."""
    sidecar_networks: Networks = ()
    """Where sidecars may be, besides where they join from."""
    report_s: float = 2.0
    """Seconds between two reports of a sidecar."""
    silent_after_s: float = 4.5
    """Seconds without a report after which a joined sidecar is silent."""


class Incarnation:
    """One incarnation of one job: its members and the services built on them. Event loop only;
    connections are opened on first use."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        terms: ControlIdentity,
        *,
        publish: Publish = lambda kind, data, *, job: None,
        owner: str | None = None,
    ) -> None:
        self.bootstrap = bootstrap
        self.terms = terms
        self.owner = owner
        """Id of the token that registered it; None: the control plane owner's."""
        self.report_interval = report_interval(
            bootstrap.world_size, report_s=terms.report_s, silent_after_s=terms.silent_after_s
        )
        self.registry = Registry(bootstrap, silent_after_s=self.report_interval.silent_after_s)
        self.calls = SidecarCalls(bootstrap, generation=terms.generation)
        self.layouts = LayoutSource(self.calls)
        self.coordinator = Coordinator(
            self.calls,
            self.registry.view,
            incarnation=bootstrap.incarnation,
            generation=terms.generation,
        )
        self.reaching = OwnFinder(
            OwnDirectory(bootstrap, self.registry, terms.control_address),
            lambda: self.layouts.get(self.registry.view()),
        )
        self.statistics = StatsSource(self.reaching)
        self.refusals = RefusalBook()
        self.watch = StateWatch(
            job=bootstrap.job, incarnation=bootstrap.incarnation, publish=publish
        )
        self.look_due_s = 0.0
        """When to examine the ranks again; on the monotonic clock."""
        self.began_s = time.time()
        self.ended_s: float | None = None
        self.last_step = -1
        """Lowest step the ranks last reported when the incarnation ended; -1 when none reported."""
        self.death: Death | None = None
        """How its first rank died; None: none has. Kept for ever, whatever ends it afterwards."""
        self.over: ParamdError | None = None
        """Why joins and boundary requests are refused; None while they are accepted."""
        self._streams: set[asyncio.Task[None]] = set()

    @property
    def job(self) -> str:
        return self.bootstrap.job

    @property
    def number(self) -> int:
        return self.bootstrap.incarnation

    def check(self) -> None:
        """Raise the reason if this incarnation is over."""
        if self.over is not None:
            raise self.over

    def check_ranks(self, world_size: int) -> None:
        """Raise ConflictError if this many ranks are not this incarnation's."""
        if world_size != self.bootstrap.world_size:
            raise ConflictError(
                f"{world_size} ranks go on from run {self.number}, which has "
                f"{self.bootstrap.world_size}; attach again"
            )

    def end(self, reason: ParamdError) -> None:
        """End the incarnation and all streams with `reason`; the first reason wins. Idempotent."""
        if self.over is None:
            self.over = reason
        if self.ended_s is None:
            self.ended_s = time.time()
            self.last_step = self.registry.last_step
        for stream in self._streams:
            stream.cancel()

    def note_death(self, view: MeshView, now_s: float) -> bool:
        """Note how the first rank died; return whether that is news. A report that arrives later
        may tell of an earlier death, for as long as reports may be late."""
        found = death_of(view, now_s)
        if found is None or self.over is not None:
            return False
        known = self.death
        if known is not None:
            late = now_s - known.at_s > SETTLES_S
            if late or not found.is_before(known):
                return False
        self.death = found
        return True

    @property
    def reason(self) -> str:
        """How its first rank died, then why it is over; empty while neither is so."""
        over = str(self.over) if self.over is not None else ""
        if self.death is None or over.startswith(self.death.reason):
            return over
        return f"{self.death.reason}; then {over}" if over else self.death.reason

    def recall(self, record: IncarnationRecord) -> None:
        """Be an incarnation that ended in an earlier process, as it was noted then."""
        killed = "its control plane was killed, and nobody noted when"
        self.over = ConflictError(record.reason.removesuffix("; attach again") or killed)
        self.began_s, self.last_step = record.began_s, record.step
        self.ended_s = record.ended_s if record.ended_s is not None else record.began_s
        self.registry.is_past = True

    def send_away(self, reason: ParamdError) -> None:
        """End the streams and refuse new ones; the incarnation continues elsewhere."""
        self.over = self.over if self.over is not None else reason
        for stream in self._streams:
            stream.cancel()

    async def follow(
        self, stream: Coroutine[Any, Any, None], token_ended: asyncio.Future[None]
    ) -> None:
        """Run the reader of one Join stream until it, its token or this incarnation ends. Raises
        what the stream raised, or why this incarnation is over."""
        if self.over is not None:
            stream.close()
            raise self.over
        task = asyncio.create_task(stream)
        self._streams.add(task)
        try:
            # `wait`, not `await task`: `end` cancels the reader, and the caller must get the
            # reason, not a cancellation.
            either: set[asyncio.Future[None]] = {task, token_ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.discard(task)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if not task.cancelled():
            task.result()
        self.check()

    def record(self) -> IncarnationRecord:
        """This incarnation's entry in the list of incarnations."""
        return IncarnationRecord(
            incarnation=self.number,
            world_size=self.bootstrap.world_size,
            began_s=self.began_s,
            ended_s=self.ended_s,
            reason=self.reason,
            step=self._record_step(),
        )

    def _record_step(self) -> int:
        if self.ended_s is not None:
            return self.last_step
        return self.death.step if self.death is not None else -1

    async def close(self) -> None:
        """Release everything that was opened. Call after `end`."""
        # The coordinator first: its rounds still call sidecars.
        await self.coordinator.close()
        await self.statistics.close()
        await self.reaching.close()
        await self.calls.close()
        self.layouts.close()


async def _never_ends(_token_id: str | None) -> bool:
    return False


OnChange = Callable[[Incarnation], None]


class Jobs:
    """Event loop only; file writes run on threads."""

    def __init__(
        self,
        terms: ControlIdentity,
        *,
        site: Site | None,
        empty_end_s: float = math.inf,
        publish: Publish = lambda kind, data, *, job: None,
        has_ended: Callable[[str | None], Awaitable[bool]] = _never_ends,
    ) -> None:
        """No I/O. `has_ended`: whether the token of this id has ended; may raise UnreachableError.
        `site`: with None, only jobs opened here are served and none may register. An incarnation
        ends after `empty_end_s` without a joined sidecar; infinite for a site: the network may be
        partitioned. `publish` tells viewers of a change: kind, data and the job."""
        self.terms = terms
        """Settings shared by all jobs."""
        self._site = site
        self._empty_end_s = empty_end_s
        self._publish = publish
        self._has_ended = has_ended
        self._current: OrderedDict[str, Incarnation] = OrderedDict()
        self._verifier = lru_cache(MAX_VERIFIERS)(lambda key: Verifier(Signer(key).public_key))
        self._registering = asyncio.Lock()
        self._began_s = time.monotonic()
        self._closing: set[asyncio.Task[None]] = set()
        self.on_begin: list[OnChange] = []
        """Called with each incarnation when it begins."""
        self.on_death: list[OnChange] = []
        """Called with each incarnation whose first rank has died."""
        self.on_end: list[OnChange] = []
        """Called with each incarnation when it ends."""
        self.on_evict: list[Callable[[str], object]] = []
        """Called with each job that is listed no more, after its end."""
        self.on_view: list[Callable[[Incarnation, MeshView], None]] = []
        """Called once a second with the mesh of each open incarnation."""

    @property
    def is_site(self) -> bool:
        """Whether jobs may register."""
        return self._site is not None

    def all(self) -> list[Incarnation]:
        """Each job's latest incarnation, sorted by job name."""
        return [self._current[job] for job in sorted(self._current)]

    def get(self, job: str) -> Incarnation:
        """The job's latest incarnation, which may be over.

        Raises:
            UnreachableError: We have just started and the job's sidecars have not rejoined yet.
            NotFoundError: No such job.
        """
        found = self._current.get(job)
        if found is None:
            starting = self.is_site and time.monotonic() - self._began_s < RETURN_S
            if starting and _went_on(job):
                raise UnreachableError(
                    f"the control plane has just started, and no sidecar of job {job!r} has "
                    "rejoined yet; try again in a moment"
                )
            names = sorted(self._current)
            known = f"jobs here: {', '.join(names[:8])}" if names else "no job is here yet"
            if admission.CALLER.get() is not None:
                known = "GET /api/v1/jobs lists those that your token is for"
            raise NotFoundError(f"job {job[:64]!r} is not served here; {known}")
        return found

    def open(
        self,
        bootstrap: Bootstrap,
        owner: str | None = None,
        *,
        past: IncarnationRecord | None = None,
        why: str = "",
    ) -> Incarnation:
        """Begin an incarnation that this token owns, and end the job's older one; or show one that
        is `past`. `why` it has begun, for the older one's reason.

        Raises:
            ConflictError: The job is already in this incarnation or a later one.
            ExhaustedError: Too many jobs.
        """
        older = self._current.get(bootstrap.job)
        if older is not None and older.number >= bootstrap.incarnation:
            raise ConflictError(
                f"job {bootstrap.job!r} is in run {older.number}; {bootstrap.incarnation} is over"
            )
        while (crowd := self._crowd(owner, bootstrap)) is not None:
            self._evict_one(crowd)
        mesh = Incarnation(bootstrap, self.terms, publish=self._publish, owner=owner)
        if past is not None:
            mesh.recall(past)
        if older is not None:
            # What ended it is not that this one begins, when no tick came between.
            view, now_s = older.registry.view(), time.monotonic()
            self._note_death(older, view, now_s)
            self._end_if_over(older, view, now_s)
            begun = f"run {bootstrap.incarnation} has begun{f': {why}' if why else ''}"
            self._end(older, ConflictError(f"{begun}; attach again"))
        self._current[bootstrap.job] = mesh
        self._current.move_to_end(bootstrap.job)
        log.info("job %s: run %d begins with %d ranks", mesh.job, mesh.number, bootstrap.world_size)
        data = {"incarnation": mesh.number, "world_size": bootstrap.world_size, "over": False}
        self._publish("incarnation", data, job=mesh.job)
        for callback in self.on_begin:
            callback(mesh)
        return mesh

    async def register(
        self,
        job: str,
        *,
        world_size: int,
        incarnation_floor: int = 0,
        succeeds: int = 0,
        owner: str | None = None,
    ) -> Incarnation:
        """Begin an attaching job's new incarnation, above `incarnation_floor` and all earlier ones.

        `succeeds`: the job's present one, which still trains, goes on in it; 0: none.

        Raises:
            UsageError: The name or the world size is out of range.
            ConflictError: The job is already training, or this control plane serves no site.
            DeniedError: Another token owns the job, which has not ended.
            ExhaustedError: Too many jobs.
            UnreachableError: The store of tokens cannot be read.
        """
        if not succeeds:
            self._site_of_all()
        places.check_job_name(job)
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise UsageError(f"world_size: {world_size}; expected 1 to {MAX_WORLD_SIZE}")
        # The lock spans check, file and open: two attaches of one name must not both pass.
        async with self._registering:
            await self._check_owner(job, owner)
            former = self._succeeded(job, succeeds)
            if former is not None:
                former.check_ranks(world_size)
            else:
                self._site_of_all()
                self._check_free(job)
            incarnation = await asyncio.to_thread(
                places.next_incarnation, job, above=incarnation_floor
            )
            if former is not None and self._site is None:
                begun = former.bootstrap.succeeded(incarnation)
            else:
                begun = self._bootstrap(self._site_of_all(), job, incarnation, world_size)
            return self.open(begun, owner, why=REFRESHED if former is not None else "")

    def _succeeded(self, job: str, number: int) -> Incarnation | None:
        """The job's present incarnation if it has this number and is not over."""
        present = self._current.get(job)
        if present is None or present.number != number or present.over is not None:
            return None
        return present

    def end(self, job: str, by: str) -> Incarnation:
        """End the job's incarnation, whose training must be over. Idempotent.

        Raises:
            NotFoundError, UnreachableError: As `get`.
            ConflictError: A trainer is alive.
        """
        mesh = self.get(job)
        if mesh.ended_s is None:
            self._check_free(job)
            self._note_death(mesh, mesh.registry.view(), time.monotonic())
            self._end(mesh, ConflictError(f"{by} ended it; attach again"))
        return mesh

    async def admit(
        self, job: str, incarnation: int, world_size: int, *, owner: str | None = None
    ) -> Incarnation:
        """The incarnation that a sidecar may join: the current one or that of its ticket, which is
        already verified as ours: after our restart, or, of an embedded control plane, when the
        training has attached its parameters anew.

        Raises:
            ConflictError: The incarnation is over.
            UsageError: The world size is out of range.
        """
        found = self._current.get(job)
        if self._site is None and found is not None and found.number < incarnation:
            # Its trainer has signed a ticket of it: it attaches its parameters anew.
            found.check_ranks(world_size)
            return self.open(found.bootstrap.succeeded(incarnation), owner, why=REFRESHED)
        if (found is None or found.number < incarnation) and self._site is not None:
            if not 1 <= world_size <= MAX_WORLD_SIZE:
                raise UsageError(f"world_size: {world_size}; expected 1 to {MAX_WORLD_SIZE}")
            async with self._registering:
                # Again under the lock: another rank's Join may have opened it meanwhile.
                found = self._current.get(job)
                if found is None or found.number < incarnation:
                    # Record the number first, or a concurrent attach could be given it again.
                    last = await asyncio.to_thread(
                        places.last_incarnation, job, at_least=incarnation
                    )
                    if last > incarnation:
                        raise ConflictError(f"job {job!r} is past run {incarnation}; attach again")
                    return self.open(
                        self._bootstrap(self._site, job, incarnation, world_size), owner
                    )
        return self.at(job, incarnation)

    def at(self, job: str, incarnation: int) -> Incarnation:
        """The job's incarnation if it has this number and is open.

        Raises:
            NotFoundError: For an unknown job.
            ConflictError: For another incarnation or one that is over.
        """
        found = self.get(job)
        if found.number != incarnation:
            raise ConflictError(
                f"job {job!r} is in run {found.number} here, not in {incarnation}; connect again"
            )
        found.check()
        return found

    def verifier(self, job: str, incarnation: int) -> Verifier:
        """Verifier for an incarnation's tickets.

        Raises:
            DeniedError: When it cannot be ours.
        """
        return self._verifier(self._private_key(job, incarnation))

    def signer(self, job: str, incarnation: int) -> Signer:
        """Signer of an incarnation. Raises as `verifier`."""
        return Signer(self._private_key(job, incarnation))

    def _private_key(self, job: str, incarnation: int) -> bytes:
        if self._site is not None:
            # Any incarnation: a genuine ticket of a past one deserves "over", not a bare denial.
            return self._site.private_key(job, incarnation)
        present = self._current.get(job)
        # A later one has the same key: see `admit`.
        if present is not None and present.number <= incarnation:
            return present.bootstrap.private_key
        raise DeniedError(
            f"the ticket is for job {job[:64]!r}, run {incarnation}, which is not served here"
        )

    async def incarnations(self, job: str) -> list[IncarnationRecord]:
        """All known incarnations of a job, oldest first. Raises NotFoundError."""
        present = self.get(job)
        known = {r.incarnation: r for r in await asyncio.to_thread(places.incarnations, job)}
        mine = present.record()
        first = known.get(mine.incarnation, mine)  # as an earlier control plane saw it
        known[mine.incarnation] = first.then(mine)
        return [
            known[incarnation] for incarnation in sorted(known) if incarnation <= present.number
        ]

    def tick(self, now_s: float) -> None:
        """Examine every open incarnation, large ones less often: publish changes, end finished
        ones. `now_s` is on the monotonic clock."""
        meshes = self._current.values()
        for mesh in [i for i in meshes if i.ended_s is None and now_s >= i.look_due_s]:
            mesh.look_due_s = now_s + mesh.bootstrap.world_size // LOOKED_PER_S
            view = mesh.registry.view()
            mesh.watch.tick(view)
            self._note_death(mesh, view, now_s)
            for callback in self.on_view:
                callback(mesh, view)
            self._end_if_over(mesh, view, now_s)

    def _note_death(self, mesh: Incarnation, view: MeshView, now_s: float) -> None:
        if mesh.note_death(view, now_s):
            log.warning("job %s, run %d: %s", mesh.job, mesh.number, mesh.reason)
            for callback in self.on_death:
                callback(mesh)

    def _end_if_over(self, mesh: Incarnation, view: MeshView, now_s: float) -> None:
        reason = why_end(
            view,
            empty_since_s=mesh.registry.empty_since_s,
            now_s=now_s,
            empty_end_s=self._empty_end_s,
        )
        if mesh.over is not None:
            self._end(mesh, mesh.over)
        elif reason is not None:
            self._end(mesh, ConflictError(f"{reason}; attach again"))

    async def keep_channels(self) -> None:
        """Close channels to replaced sidecars."""
        for mesh in self.all():
            await mesh.calls.keep_only(mesh.registry.view())

    def send_away(self, reason: ParamdError) -> None:
        """End all Join streams because the control plane is stopping. Incarnations stay open."""
        for mesh in self._current.values():
            mesh.send_away(reason)

    async def close(self) -> None:
        """Release everything. Call after the servers have stopped."""
        for mesh in self.all():
            await mesh.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def _site_of_all(self) -> Site:
        if self._site is None:
            raise ConflictError(
                "this control plane belongs to one job; start a site's with: "
                "paramd control serve --listen HOST:PORT"
            )
        return self._site

    async def _check_owner(self, job: str, who: str | None) -> None:
        present = self._current.get(job)
        if present is None or present.ended_s is not None or who in (None, present.owner):
            return
        if not await self._has_ended(present.owner):
            raise DeniedError(
                f"job {job!r} was registered with another token, and is not over; use that one, or "
                "have an admin end the job (paramd cleanup) or revoke the token"
            )

    def _check_free(self, job: str) -> None:
        present = self._current.get(job)
        if present is None or present.ended_s is not None:
            return
        view = present.registry.view()
        if trains(view):
            ranks = listed([report.rank for report in view.joined])
            raise ConflictError(
                f"job {job!r} is already training, in run {present.number} (ranks "
                f"{ranks}); stop that training, or attach under another job name"
            )

    def _bootstrap(self, site: Site, job: str, incarnation: int, world_size: int) -> Bootstrap:
        return Bootstrap(
            job=job,
            incarnation=incarnation,
            world_size=world_size,
            private_key=site.private_key(job, incarnation),
            token=site.token,
        )

    def _crowd(self, owner: str | None, new: Bootstrap) -> list[Incarnation] | None:
        """The jobs of which one must be evicted for a new job of this token; None if none must."""
        known = [mesh for job, mesh in self._current.items() if job != new.job]
        mine = [mesh for mesh in known if mesh.owner == owner and owner is not None]
        ranks = sum(mesh.bootstrap.world_size for mesh in mine) + new.world_size
        if len(mine) >= JOBS_OF_TOKEN or (mine and ranks > MAX_WORLD_SIZE):
            return mine
        return known if len(known) >= MAX_JOBS else None

    def _evict_one(self, known: list[Incarnation]) -> None:
        of = Counter(mesh.owner for mesh in known)
        # Oldest first, of the token with the most jobs; ended jobs before merely empty ones.
        known.sort(key=lambda mesh: -of[mesh.owner])
        idle = [i for i in known if i.ended_s is not None]
        idle += [i for i in known if i.registry.empty_since_s is not None]
        if idle:
            self._end(idle[0], ConflictError("evicted for newer jobs; attach again"))
            del self._current[idle[0].job]
            for callback in self.on_evict:
                callback(idle[0].job)
            return
        raise ExhaustedError(
            f"{len(known)} jobs are served; expected at most {MAX_JOBS}, and {JOBS_OF_TOKEN} with "
            f"{MAX_WORLD_SIZE:,} ranks of one token. Try again when some have ended"
        )

    def _end(self, mesh: Incarnation, reason: ParamdError) -> None:
        if mesh.ended_s is not None:
            return
        mesh.end(reason)
        log.info("job %s: run %d is over: %s", mesh.job, mesh.number, mesh.reason)
        data = {"incarnation": mesh.number, "over": True, "reason": mesh.reason}
        self._publish("incarnation", data, job=mesh.job)
        for callback in self.on_end:
            callback(mesh)
        kept(self._closing, mesh.close())


def _went_on(job: str) -> bool:
    """Whether the job's last incarnation in the state dir is still open."""
    if not is_job_name(job):
        return False
    known = places.incarnations(job)
    return bool(known) and known[-1].ended_s is None
