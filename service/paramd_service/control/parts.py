"""The door by which a subject enters a control plane: `ControlPart`, and all that it may reach.

A control plane is a list of parts (`paramd_service/parts.py`) around the kernel, which serves gRPC
and REST, knows jobs and their ranks, asks their sidecars and keeps records. A part adds routes and
metrics, follows the jobs, and answers what others ask. It reaches the kernel through `ControlHost`,
and another part only by one of the questions below, which that one may not be there to answer.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from fastapi import APIRouter
from prometheus_client.core import Metric
from sqlalchemy import Connection

from paramd.documents import Document
from paramd.errors import ConflictError
from paramd.layout.edits.ops import OpSpec
from paramd.memory.gate import STALL_BUDGET_MS
from paramd.parts import made
from paramd_service.control.access.authority import Principal
from paramd_service.control.base.config import ControlConfig, loaded
from paramd_service.control.mesh.evidence import Look
from paramd_service.control.mesh.health import Health, Seen, verdict_of
from paramd_service.control.mesh.jobs import Incarnation, Jobs
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.records.events import EventBus
from paramd_service.control.records.records import Records
from paramd_service.control.store.edits import EditRow

Loaded = TypeVar("Loaded")

log = logging.getLogger("paramd.control.parts")


class ControlHost:
    """A control plane as its parts and its routes may reach it. Event loop only."""

    def __init__(
        self,
        config: ControlConfig,
        *,
        jobs: Jobs,
        records: Records,
        events: EventBus,
        parts: Sequence[type[ControlPart]],
        grpc_address: Callable[[], str] = str,
        expires_s: Callable[[], float | None] = lambda: None,
        shows_records: bool = False,
    ) -> None:
        """Makes the parts; raises as they do.

        Args:
            config: The control plane's.
            jobs: Its jobs.
            records: Its records, which are open.
            events: What viewers follow.
            parts: The classes of its parts.
            grpc_address: Tells its own gRPC target, once it serves.
            expires_s: Tells when the operator's certificate expires; None without.
            shows_records: Whether its only job has ended, of which the records are shown.
        """
        self.config = config
        self.jobs = jobs
        """`jobs.get(job)` is the job's `Incarnation`: registry, layouts, statistics, bootstrap."""
        self.records = records
        """Store, audit and metric history."""
        self.events = events
        """`events.publish(kind, data, job=)` pushes to all viewers of the job."""
        self.expires_s = expires_s
        self.shows_records = shows_records
        self._grpc_address = grpc_address
        # Last: they may look at all of the above.
        self.parts = ControlParts(
            made(
                parts,
                lambda kind: kind(self),
                ControlPart,
                tell=_tell_call,
                tell_failed=tell_failed,
            )
        )

    @property
    def grpc_address(self) -> str:
        """gRPC target of this control plane; empty until it is known."""
        return self._grpc_address()

    def loaded(self, load: Callable[..., Loaded], *, otherwise: Loaded, told: str) -> Loaded:
        """A part's own settings, from the files and the environment.

        Args:
            load: Reads them from the files' places and the environment.
            otherwise: Those of a training's own control plane whose source is invalid ...
            told: ... and what it logs then.

        Raises:
            UsageError: A site's source is invalid.
        """
        return loaded(load, strict=self.jobs.is_site, otherwise=otherwise, told=told)

    def health(self, mesh: Incarnation, seen: Seen) -> Health:
        """The verdict on a job, as a part or else as the ranks' reports alone give it."""
        found = self.parts.health(mesh, seen)
        return found if found is not None else Health(verdict=verdict_of(seen))


def _tell_call(part: str, method: str, took_s: float) -> None:
    log.info("part %s: %s took %.0f us", part, method, 1e6 * took_s)


def tell_failed(part: str, what: str, error: Exception) -> None:
    """Log what an installed package's part failed to do."""
    log.error("part %s has failed in %s", part, what, exc_info=error)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRequest:
    """What is asked of the store about a job that has ended."""

    job: str
    limit: int
    """Most rows."""
    state: str | None
    """Only rows in this state; None: in any."""
    id: str | None
    """Only rows whose id begins so; None: all."""
    oldest: bool
    """Oldest rows first."""


ReadStored: TypeAlias = Callable[[Connection, StoredRequest], dict[str, Any]]
"""Reads it, and returns a document with the shapes of REST."""


class Exported(NamedTuple):
    """A finished export whose files this host can read."""

    directory: str
    destination: str
    id: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Work that a part began for a job, and that has failed."""

    what: str
    """In words: "the export to NAME"."""
    reason: str
    ended_s: float
    step: int


@dataclass(frozen=True, slots=True)
class LostMark:
    """A state that was kept under a name, and can no longer be used."""

    name: str
    step: int
    reason: str


class EditOfData(ABC):
    """An edit whose operands are uploaded before it is committed."""

    def __init__(self, edit_id: str) -> None:
        self.id = edit_id

    @property
    @abstractmethod
    def takes_data(self) -> bool:
        """Whether data may still be uploaded for it: its commit has not begun."""

    @abstractmethod
    async def preview(self) -> Document:
        """Compute statistics before and after it, without applying it. Its document."""

    @abstractmethod
    async def commit(self) -> None:
        """Start its commit; return once that has started. Idempotent.

        Raises:
            DeniedError: The caller may not commit it.
            ConflictError: Data is missing.
        """

    @abstractmethod
    async def abort(self) -> None:
        """Abort it, unless the trainers have agreed on it."""

    @abstractmethod
    async def ended(self, wait_s: float) -> Document:
        """Its document once it has ended, or after so many seconds."""


class ControlPart:
    """A subject in a control plane. Event loop only.

    Made once, before any job is open; it may read its own settings then, and does no other I/O.
    For each incarnation of a job `began`, `seen` once a second and `ended`, unless its process is
    stopped before; `evicted` when the job is listed no more. After a restart of the control plane
    `began` comes again for an incarnation that goes on: what was left open in the store is taken up
    there. `routes` is called once, before REST serves. `started` comes when all is served, and
    `closed` last, when no request runs any more; the jobs and the records are still open.
    """

    name: ClassVar[str]

    def __init__(self, host: ControlHost) -> None:
        """No I/O but for its own settings.

        Raises:
            UsageError: They are invalid, at a site.
        """
        self.host = host

    @classmethod
    def stored(cls) -> Mapping[str, ReadStored]:
        """What the store tells of a job that has ended, by the word that asks for it: see
        `paramd_service.control.ended`."""
        return {}

    def routes(self) -> Sequence[APIRouter]:
        """Its operations of REST, below /api/v1; who may call them is in the table of roles."""
        return ()

    def metrics(self) -> Iterable[Metric]:
        """Its metrics. Without I/O: called at each scrape."""
        return ()

    async def started(self) -> None:
        """REST and gRPC are served."""

    def began(self, mesh: Incarnation) -> None:
        """An incarnation of a job has begun. Raises nothing."""

    def recalled(self, mesh: Incarnation) -> None:
        """In place of `began`: a job that has ended, of which the records alone are shown."""

    def seen(self, mesh: Incarnation, view: MeshView) -> None:
        """Once a second: what is known of its ranks now. Raises nothing."""

    def ended(self, mesh: Incarnation) -> None:
        """It is over: `mesh.over` says why. Its sidecars may still answer. Raises nothing."""

    def evicted(self, job: str) -> None:
        """The job, which has ended, is listed no more: nothing is kept of it."""

    async def closed(self) -> None:
        """The control plane ends; what is under way is taken up by the next one. Idempotent."""

    # What others ask. A part that has no answer says so.

    def health(self, mesh: Incarnation, seen: Seen) -> Health | None:
        """The verdict on a job."""
        return None

    def stall_budget_s(self) -> float | None:
        """Seconds that an update may wait for a copy before that is trouble."""
        return None

    def look(self, mesh: Incarnation) -> Look | None:
        """Returns what asks the ranks what they are doing now."""
        return None

    async def pause(self, job: str, reason: str) -> bool:
        """Pause training for this reason; whether it does so at all.

        Raises:
            ParamdError: It does, and could not.
        """
        return False

    async def lost_marks(self, job: str) -> Sequence[LostMark]:
        """Kept states that are no longer on all ranks. Raises ParamdError."""
        return ()

    def edit_applied(self, row: EditRow) -> None:
        """An edit was applied."""

    async def edit_of_data(
        self,
        mesh: Incarnation,
        by: Principal,
        ops: Sequence[OpSpec],
        edit_id: str | None,
        terms: Mapping[str, Any],
    ) -> EditOfData | None:
        """Create an edit that waits for its data. Idempotent by id.

        Args:
            mesh: The incarnation that it changes.
            by: Who wants it.
            ops: What it does to which parameters.
            edit_id: Its id; None: a new one.
            terms: `note` and `reset_moments`, as in REST.

        Raises:
            ParamdError: It is refused.
        """
        return None

    def failed(self, job: str) -> Failure | None:
        """The newest of its work for a job that has ended, if it failed."""
        return None

    async def exported(self, job: str, export: str) -> Exported | None:
        """A finished export, by the first characters of its id.

        Raises:
            NotFoundError: For an unknown one.
            ConflictError: For one whose files cannot be read here.
        """
        return None

    async def checkpoints(self, job: str) -> Sequence[Mapping[str, Any]]:
        """Where a training that begins finds the job's last states: newest first, as documents.
        Raises StoreError."""
        return ()


class ControlParts:
    """The parts of one control plane, in the order of its list: ours, then those of packages."""

    def __init__(self, parts: Iterable[ControlPart]) -> None:
        self._parts = tuple(parts)

    def __iter__(self) -> Iterator[ControlPart]:
        return iter(self._parts)

    def routes(self) -> Iterator[APIRouter]:
        """As `ControlPart.routes`, of all; so are the others."""
        for part in self:
            yield from part.routes()

    def metrics(self) -> Iterator[Metric]:
        for part in self:
            yield from part.metrics()

    async def started(self) -> None:
        for part in self:
            await part.started()

    def began(self, mesh: Incarnation) -> None:
        for part in self:
            if mesh.registry.is_past:
                part.recalled(mesh)
            else:
                part.began(mesh)

    def seen(self, mesh: Incarnation, view: MeshView) -> None:
        for part in self:
            part.seen(mesh, view)

    def ended(self, mesh: Incarnation) -> None:
        for part in self:
            part.ended(mesh)

    def evicted(self, job: str) -> None:
        for part in self:
            part.evicted(job)

    async def closed(self) -> None:
        """The last first: parts may use those before them."""
        for part in reversed(self._parts):
            await part.closed()

    def health(self, mesh: Incarnation, seen: Seen) -> Health | None:
        answers = (part.health(mesh, seen) for part in self)
        return next((one for one in answers if one is not None), None)

    def stall_budget_s(self) -> float:
        answers = (part.stall_budget_s() for part in self)
        return next((one for one in answers if one is not None), STALL_BUDGET_MS / 1e3)

    def look(self, mesh: Incarnation) -> Look | None:
        answers = (part.look(mesh) for part in self)
        return next((one for one in answers if one is not None), None)

    async def pause(self, job: str, reason: str) -> None:
        """Raises ConflictError: no part does so."""
        for part in self:
            if await part.pause(job, reason):
                return
        raise _missing("pausing training")

    async def lost_marks(self, job: str) -> list[LostMark]:
        return [mark for part in self for mark in await part.lost_marks(job)]

    def edit_applied(self, row: EditRow) -> None:
        for part in self:
            part.edit_applied(row)

    async def edit_of_data(
        self,
        mesh: Incarnation,
        by: Principal,
        ops: Sequence[OpSpec],
        edit_id: str | None,
        terms: Mapping[str, Any],
    ) -> EditOfData:
        """Raises ConflictError: no part does so."""
        for part in self:
            if (found := await part.edit_of_data(mesh, by, ops, edit_id, terms)) is not None:
                return found
        raise _missing("an edit of parameters")

    def failed(self, job: str) -> Failure | None:
        answers = (part.failed(job) for part in self)
        return next((one for one in answers if one is not None), None)

    async def exported(self, job: str, export: str) -> Exported:
        """Raises ConflictError: no part does so."""
        for part in self:
            if (found := await part.exported(job, export)) is not None:
                return found
        raise _missing("an export")

    async def checkpoints(self, job: str) -> list[Mapping[str, Any]]:
        return [one for part in self for one in await part.checkpoints(job)]


def _missing(what: str) -> ConflictError:
    return ConflictError(f"{what} is not served here: this control plane has no part for it")
