"""The jobs of a control plane, each with its present epoch; embedded, there is exactly one.

    register ------> epoch open --all ranks detached, or nobody there for long--> epoch over
    Join of an epoch       |
    that we handed out ----+--a newer epoch, or a newer control plane------------> epoch over

A job whose epoch is over stays listed until it registers anew, or is the oldest of too many.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
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
from paramd.security.tickets import Signer, Verifier
from paramd.state_files import is_job_name
from paramd_service.control.base import epochs
from paramd_service.control.base.config import MAX_WORLD_SIZE, Bootstrap
from paramd_service.control.base.site import Site
from paramd_service.control.mesh.incarnation import Incarnation, Terms
from paramd_service.control.mesh.view import MeshView, listed, trains, why_end
from paramd_service.control.mesh.watch import Publish

MAX_JOBS = 512
"""Jobs kept in memory; beyond it the one that ended first is forgotten."""

RETURN_S = 20.0
"""How long after our start a job that went on is awaited rather than unknown; above a sidecar's
longest pause between two attempts to join."""

MAX_VERIFIERS = 1024

log = logging.getLogger("paramd.control")

Told = Callable[[Incarnation], None]


class Verifiers:
    """Verifiers by job and epoch, the last ones used kept."""

    def __init__(self, site: Site | None, current: Mapping[str, Incarnation]) -> None:
        """`current` is looked at in each `get`: without a site only its epochs are ours."""
        self._site = site
        self._current = current
        self._kept: OrderedDict[tuple[str, int], Verifier] = OrderedDict()

    def get(self, job: str, epoch: int) -> Verifier:
        """Verifies tickets of an epoch. Raises DeniedError when no such epoch can be ours."""
        found = self._kept.get((job, epoch))
        if found is not None:
            self._kept.move_to_end((job, epoch))
            return found
        key = self._private_key(job, epoch)
        found = self._kept[job, epoch] = Verifier(Signer(key).public_key)
        if len(self._kept) > MAX_VERIFIERS:
            self._kept.popitem(last=False)
        return found

    def _private_key(self, job: str, epoch: int) -> bytes:
        if self._site is not None:
            # Of any epoch: a genuine ticket of a past one is told so, and not just denied.
            return self._site.private_key(job, epoch)
        present = self._current.get(job)
        if present is not None and present.epoch == epoch:
            return present.bootstrap.private_key
        raise DeniedError(
            f"the ticket is for job {job[:64]!r}, epoch {epoch}, which is not served here"
        )


class Jobs:
    """Used on the event loop only; what writes files runs beside it."""

    def __init__(
        self,
        terms: Terms,
        *,
        site: Site | None,
        empty_end_s: float = math.inf,
        publish: Publish = lambda kind, data, *, job: None,
    ) -> None:
        """No I/O.

        Args:
            site: None serves only the jobs that are opened here, and none registers.
            empty_end_s: An epoch is over after this long without any joined sidecar. A
                site never ends one for that: the network may have been cut.
            publish: Tells viewers of a change: kind, data, and the job.
        """
        self._terms = terms
        self._site = site
        self._empty_end_s = empty_end_s
        self._publish = publish
        self._current: OrderedDict[str, Incarnation] = OrderedDict()
        self._verifiers = Verifiers(site, self._current)
        self._registering = asyncio.Lock()
        self._began_s = time.monotonic()
        self._closing: set[asyncio.Task[None]] = set()
        self.on_begin: list[Told] = []
        """Called with each incarnation that begins."""
        self.on_end: list[Told] = []
        """Called with each incarnation that is over."""
        self.on_view: list[Callable[[Incarnation, MeshView], None]] = []
        """Called once a second with the mesh of each epoch that goes on."""

    @property
    def is_site(self) -> bool:
        """Whether jobs may register."""
        return self._site is not None

    @property
    def terms(self) -> Terms:
        """What holds for all jobs."""
        return self._terms

    def all(self) -> list[Incarnation]:
        """Each job's last epoch, ordered by the job's name."""
        return [self._current[job] for job in sorted(self._current)]

    def get(self, job: str) -> Incarnation:
        """The job's last epoch, which may be over.

        Raises:
            UnreachableError: we were just started, and the job's sidecars are not back yet.
            NotFoundError: no such job.
        """
        found = self._current.get(job)
        if found is None:
            starting = self.is_site and time.monotonic() - self._began_s < RETURN_S
            if starting and _went_on(job):
                raise UnreachableError(
                    f"the control plane was just started, and no sidecar of job {job!r} has come "
                    "back to it yet; try again in a moment"
                )
            names = sorted(self._current)
            told = f"jobs here: {', '.join(names[:8])}" if names else "no job is here yet"
            raise NotFoundError(f"job {job[:64]!r} is not served here; {told}")
        return found

    def open(self, bootstrap: Bootstrap) -> Incarnation:
        """Begins an epoch; an older one of the same job is over.

        Raises:
            ConflictError: the job is in this epoch, or a later one, already.
            ExhaustedError: too many jobs.
        """
        older = self._current.get(bootstrap.job)
        if older is not None and older.epoch >= bootstrap.epoch:
            raise ConflictError(
                f"job {bootstrap.job!r} is in epoch {older.epoch}; {bootstrap.epoch} is over"
            )
        if older is None:
            self._make_room()
        incarnation = Incarnation(bootstrap, self._terms, publish=self._publish)
        if older is not None:
            self._end(older, ConflictError(f"epoch {bootstrap.epoch} has begun; attach again"))
        self._current[bootstrap.job] = incarnation
        self._current.move_to_end(bootstrap.job)
        log.info(
            "job %s: epoch %d begins with %d ranks",
            bootstrap.job,
            bootstrap.epoch,
            bootstrap.world_size,
        )
        self._publish(
            "epoch",
            {"epoch": bootstrap.epoch, "world_size": bootstrap.world_size, "over": False},
            job=bootstrap.job,
        )
        for told in self.on_begin:
            told(incarnation)
        return incarnation

    async def register(self, job: str, *, world_size: int, epoch_floor: int = 0) -> Incarnation:
        """A new epoch for a job that attaches; it is above `epoch_floor` and all before.

        Raises:
            UsageError: the name or the world size is out of range.
            ConflictError: the job trains already, or this control plane is no site's.
            ExhaustedError: too many jobs.
        """
        site = self._site_of_all()
        places.check_job_name(job)
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise UsageError(f"world_size: {world_size}; expected 1 to {MAX_WORLD_SIZE}")
        async with self._registering:
            self._check_free(job)
            epoch = await asyncio.to_thread(places.next_epoch, job, above=epoch_floor)
            return self.open(self._bootstrap(site, job, epoch, world_size))

    async def admit(self, job: str, epoch: int, world_size: int) -> Incarnation:
        """The incarnation that a sidecar may join: the present one, or after our restart
        the one that its ticket, which we must have made, speaks of.

        Raises:
            ConflictError: the epoch is over.
            UsageError: the world size is out of range.
        """
        found = self._current.get(job)
        if (found is None or found.epoch < epoch) and self._site is not None:
            if not 1 <= world_size <= MAX_WORLD_SIZE:
                raise UsageError(f"world_size: {world_size}; expected 1 to {MAX_WORLD_SIZE}")
            async with self._registering:
                found = self._current.get(job)
                if found is None or found.epoch < epoch:
                    # Another one that starts meanwhile must not get the same number.
                    last = await asyncio.to_thread(places.last_epoch, job, at_least=epoch)
                    if last > epoch:
                        raise ConflictError(f"job {job!r} is past epoch {epoch}; attach again")
                    return self.open(self._bootstrap(self._site, job, epoch, world_size))
        return self.at(job, epoch)

    def at(self, job: str, epoch: int) -> Incarnation:
        """The job's incarnation when it is in this epoch and goes on.

        Raises:
            NotFoundError: no such job.
            ConflictError: it is in another epoch, or this one is over.
        """
        found = self.get(job)
        if found.epoch != epoch:
            raise ConflictError(
                f"job {job!r} is in epoch {found.epoch} here, not in {epoch}; connect again"
            )
        found.check()
        return found

    def verifier(self, job: str, epoch: int) -> Verifier:
        """Verifies tickets of an epoch. Raises DeniedError when no such epoch can be ours."""
        return self._verifiers.get(job, epoch)

    async def epochs(self, job: str) -> list[epochs.EpochRecord]:
        """All epochs known of a job, the newest last. Raises NotFoundError."""
        present = self.get(job)
        known = {r.epoch: r for r in await asyncio.to_thread(epochs.records, job)}
        known[present.epoch] = present.record()
        return [known[epoch] for epoch in sorted(known) if epoch <= present.epoch]

    def look(self, now_s: float) -> None:
        """Looks at every epoch that goes on, tells what changed, ends what is finished.

        Args:
            now_s: On the monotonic clock.
        """
        for incarnation in [i for i in self._current.values() if i.ended_s is None]:
            view = incarnation.registry.view()
            incarnation.watch.look(view)
            for told in self.on_view:
                told(incarnation, view)
            reason = why_end(
                view,
                empty_since_s=incarnation.registry.empty_since_s,
                now_s=now_s,
                empty_end_s=self._empty_end_s,
            )
            if incarnation.over is not None:
                self._end(incarnation, incarnation.over)
            elif reason is not None:
                self._end(incarnation, ConflictError(f"{reason}; attach again"))

    async def keep_channels(self) -> None:
        """Closes channels to sidecars that have been replaced."""
        for incarnation in self.all():
            await incarnation.calls.keep_only(incarnation.registry.view())

    def send_away(self, reason: ParamdError) -> None:
        """Ends all Join streams: the control plane is stopping. Epochs go on elsewhere."""
        for incarnation in self._current.values():
            incarnation.send_away(reason)

    async def close(self) -> None:
        """Lets go of everything. Call it when the servers have stopped."""
        for incarnation in self.all():
            await incarnation.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def _site_of_all(self) -> Site:
        if self._site is None:
            raise ConflictError(
                "this control plane belongs to one job; start a site's with: "
                "paramd control serve --listen HOST:PORT"
            )
        return self._site

    def _check_free(self, job: str) -> None:
        present = self._current.get(job)
        if present is None or present.ended_s is not None:
            return
        view = present.registry.view()
        if trains(view):
            ranks = listed([report.rank for report in view.joined])
            raise ConflictError(
                f"job {job!r} trains already, in epoch {present.epoch} (ranks {ranks}); end that "
                "training, or attach under another job name"
            )

    def _bootstrap(self, site: Site, job: str, epoch: int, world_size: int) -> Bootstrap:
        return Bootstrap(
            job=job,
            epoch=epoch,
            world_size=world_size,
            private_key=site.private_key(job, epoch),
            token=site.token,
        )

    def _make_room(self) -> None:
        if len(self._current) < MAX_JOBS:
            return
        # In the order of their beginnings; one whose epoch is over goes before one that waits.
        known = list(self._current.values())
        idle = [i for i in known if i.ended_s is not None]
        idle += [i for i in known if i.registry.empty_since_s is not None]
        if idle:
            self._end(idle[0], ConflictError("forgotten for newer jobs; attach again"))
            del self._current[idle[0].job]
            return
        raise ExhaustedError(f"{MAX_JOBS} jobs are served already; try again later")

    def _end(self, incarnation: Incarnation, reason: ParamdError) -> None:
        if incarnation.ended_s is not None:
            return
        incarnation.end(reason)
        log.info("job %s: epoch %d is over: %s", incarnation.job, incarnation.epoch, reason)
        data = {"epoch": incarnation.epoch, "over": True, "reason": str(reason)}
        self._publish("epoch", data, job=incarnation.job)
        for told in self.on_end:
            told(incarnation)
        self._task(incarnation.close())

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _went_on(job: str) -> bool:
    """Whether the last epoch that the state dir has of a job was not over."""
    if not is_job_name(job):
        return False
    known = epochs.records(job)
    return bool(known) and known[-1].ended_s is None
