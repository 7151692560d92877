"""A mesh's view of its job: document, ticket, layout, unreachable ranks.

The view may be stale: sidecars check incarnation and layout with every pin, and a refusal
triggers a refresh.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import quote

from paramd.errors import ConflictError, DeniedError, ParamdError, UnreachableError, UsageError
from paramd.inside import ELSEWHERE, own_wait
from paramd.layout.codec import join_batches
from paramd.layout.select import NameIndex
from paramd.mesh.peers.control import JobDocument, PeerAddress, RestClient, behind, readable
from paramd.mesh.peers.grpc import (
    LIVENESS_S,
    Background,
    Channels,
    LeaseEndedError,
    RankUnreachableError,
    cancelled,
)
from paramd.mesh.peers.relay import TunnelRelay
from paramd.mesh.peers.sidecars import FastPathBackoff, Sidecars
from paramd.security import tickets
from paramd.security.tls import ClientTls

RECOVERY_S = 4.0
"""How long, in seconds, to wait for a killed sidecar: respawned by then, or not soon."""

JOINING_S = 30.0
"""How long, in seconds, to wait for the first sidecar of a job that has just begun."""

TICKET_MARGIN_S = 60.0
"""A ticket is renewed this long before it expires, or a third of its lifetime if shorter."""

AGAIN_S = 0.2
"""Seconds between two tries of a request."""

PAGE = 200
"""Items of a list in one response."""

_DOWN_S = 10.0
# Finite, so that a rank without a replica is still read from.
_DOWN_COST = 1e9
_RENEW_AGAIN_S = 5.0
_RETRY_S = 0.2
_LEAST_LOOK_S = 0.5

Result = TypeVar("Result")


class Directory(Protocol):
    """Source of job documents: the control plane over REST, or its own registry."""

    @property
    def url(self) -> str:
        """The URL of the control plane, for messages."""

    def look_again(self) -> None:
        """Check whether it has moved to another address."""

    async def jobs(self) -> list[str]:
        """Names of the jobs it serves."""

    async def job(self, job: str) -> JobDocument:
        """The job's document, with a fresh ticket. Raises ParamdError."""

    async def close(self) -> None:
        """Closes connections. Idempotent."""


KnownLayout: TypeAlias = Callable[[], Awaitable[tuple[str, NameIndex]]]
"""Digest and names of the layout that this process has anyway. Raises UnreachableError."""


class SidecarFinder:
    """Finds the sidecars of one job, again after each outage, respawn or new incarnation."""

    def __init__(
        self,
        directory: Directory,
        job: str | None,
        *,
        tls: ClientTls | None = None,
        relay: TunnelRelay | None = None,
        known: KnownLayout | None = None,
    ) -> None:
        """No I/O. `job` None means the directory's only one. `close` closes `directory` too.

        `relay`, if given, reaches sidecars that this host cannot. A layout that is `known` here is
        not read from them, and not kept a second time.
        """
        self._relay = relay
        self._known = known
        self._directory = directory
        self._job = job
        self._document: JobDocument | None = None
        self._renew_at_s = 0.0
        self._ends_at_s = 0.0
        self._refreshing = asyncio.Lock()
        self._looking: asyncio.Task[JobDocument] | None = None
        self._channels = Channels(
            self._shown, tls=tls, job_tls=lambda: self.document.tls, relay=relay
        )
        self._background = Background()
        self._index: tuple[tuple[int, str], NameIndex] | None = None
        self._indexing = asyncio.Lock()
        self.backoff = FastPathBackoff()
        """Shared by all pins of this mesh; see `Pinner`."""
        self._down: dict[int, float] = {}

    async def start(self) -> None:
        """Read the job's document.

        Raises UnreachableError, DeniedError or NotFoundError; UsageError if no job was named and
        there is not exactly one.
        """
        if self._job is None:
            jobs = await self._directory.jobs()
            if len(jobs) != 1:
                found = ", ".join(sorted(jobs)) or "none"
                raise UsageError(f"job: name one; {self._directory.url} serves {found}")
            self._job = jobs[0]
        await self.refresh()

    async def close(self) -> None:
        """Wait for pending releases, then close all connections. Idempotent."""
        if self._looking is not None:
            await cancelled(self._looking)
        await self._background.close()
        await self._channels.close()
        if self._relay is not None:
            await self._relay.close()
        await self._directory.close()

    @property
    def document(self) -> JobDocument:
        if self._document is None:
            raise UsageError("the mesh is not connected; use it as a context manager")
        return self._document

    def _shown(self, rank: int | None) -> str:
        return self.document.shown(rank)

    async def refresh(self) -> JobDocument:
        """Read the job's document again; concurrent callers share one request."""
        before = self._document
        async with self._refreshing:
            # Another caller has refreshed it while we waited for the lock.
            if self._document is not before:
                return self.document
            assert self._job is not None
            # The previous incarnation's control plane may still respond, with a stale document.
            self._directory.look_again()
            document = await self._directory.job(self._job)
            if self._relay is not None:
                document = await self._relay.routed(document)
            self._document = document
            # The ticket's own lifetime: this host's clock may differ from the control plane's.
            life_s = tickets.life_s(document.ticket)
            self._ends_at_s = time.monotonic() + life_s
            margin_s = min(TICKET_MARGIN_S, life_s / 3)
            self._renew_at_s = time.monotonic() + life_s - margin_s
            return document

    def costs(self) -> dict[int, float]:
        """Read costs that steer plans to replicas of recently unreachable ranks."""
        now_s = time.monotonic()
        self._down = {rank: until_s for rank, until_s in self._down.items() if until_s > now_s}
        return dict.fromkeys(self._down, _DOWN_COST)

    def leave_out(self, rank: int) -> None:
        """Note that a rank does not respond, so that the next reads do without it for a while."""
        self._down[rank] = time.monotonic() + _DOWN_S

    async def index(self, sidecars: Sidecars) -> NameIndex:
        """Names and layout of the current incarnation; cached."""
        document = sidecars.document
        wanted = (document.incarnation, document.layout_digest)
        async with self._indexing:
            if self._known is not None:
                with suppress(UnreachableError):
                    digest, index = await self._known()
                    if digest == document.layout_digest:
                        return index
            if self._index is None or self._index[0] != wanted:
                self._index = (wanted, await self._read_index(sidecars))
            return self._index[1]

    async def _read_index(self, sidecars: Sidecars) -> NameIndex:
        document = sidecars.document
        error: ParamdError = UnreachableError(
            f"no sidecar of job {document.job!r} has joined; is it attached yet? "
            f"Run: paramd status --job {document.job}"
        )
        for rank in sorted(document.peers, key=lambda rank: (rank in self._down, rank)):
            try:
                batches = await sidecars.layout_batches(rank)
            except RankUnreachableError as found:
                error = found
                continue
            return await asyncio.to_thread(lambda read: NameIndex(join_batches(read)), batches)
        raise error

    async def attempts(
        self, attempt: Callable[[Sidecars], Awaitable[Result]], deadline_s: float
    ) -> Result:
        """Run `attempt`; retry it when the document, ticket or pins it used proved stale.

        Covers a restarted sidecar, a new incarnation, an expired ticket and an ended lease. An
        error that persists is raised within `RECOVERY_S`; before a sidecar has joined, `JOINING_S`.
        """
        give_up_s = deadline_s
        stopped: dict[int, RankUnreachableError] = {}
        denied = False
        while True:
            await self._renew_ticket()
            begun_s = time.monotonic()
            document = self.document
            sidecars = Sidecars(self._channels, document, self._background, dict(stopped))
            try:
                return await attempt(sidecars)
            except (ConflictError, DeniedError) as error:
                # Retrying helps only with a new incarnation or layout, or, once, a new ticket.
                was_denied, denied = denied, isinstance(error, DeniedError)
                try:
                    moved = _identity(await self.refresh()) != _identity(document)
                except UnreachableError:
                    raise error from None  # the sidecar's error says more
                if time.monotonic() > give_up_s or not (moved or (denied and not was_denied)):
                    raise
            except (UnreachableError, LeaseEndedError) as error:
                # Without a layout and without sidecars, the client is early: the training attaches.
                early = not document.peers and self._index is None
                patience_s = JOINING_S if early else RECOVERY_S
                give_up_s = min(give_up_s, time.monotonic() + patience_s)
                if time.monotonic() >= give_up_s:
                    raise
                await self._after_outage(error, document, stopped, begun_s + LIVENESS_S)

    def waits_for_itself(self) -> bool:
        """As of `Sidecars`, by the last document."""
        found = Sidecars(self._channels, self.document, self._background)
        return found.waits_for_itself()

    async def sidecars(self) -> Sidecars:
        """The sidecars of the last document, with a valid ticket.

        Raises:
            UnreachableError: If the ticket has expired and the control plane does not respond.
        """
        await self._renew_ticket()
        return Sidecars(self._channels, self.document, self._background)

    async def _renew_ticket(self) -> None:
        if self._document is not None and time.monotonic() < self._renew_at_s:
            return
        try:
            await self.refresh()
        except UnreachableError:
            if self._document is None or time.monotonic() > self._ends_at_s:
                raise
            # Sidecars verify tickets themselves: reads continue without the control plane.
            self._renew_at_s = time.monotonic() + _RENEW_AGAIN_S

    async def _after_outage(
        self,
        error: UnreachableError | LeaseEndedError,
        before: JobDocument,
        stopped: dict[int, RankUnreachableError],
        until_s: float,
    ) -> None:
        """Update `_down` and `stopped` for the next attempt; wait if nothing changed.

        A control plane that has not answered by `until_s` is not waited for. Raises
        RankUnreachableError if a stopped sidecar was found stopped again.
        """
        replan = False
        if isinstance(error, RankUnreachableError):
            if error.stopped and error.rank in stopped:
                raise error
            replan = error.rank not in self._down
            self.leave_out(error.rank)
            if error.stopped:
                stopped[error.rank] = error
        for rank, peer in (await self._looked_again(before, until_s)).peers.items():
            # A relay to the same place is for the next call: trying it, too, would double the wait.
            if not _same_place(peer, before.peers.get(rank)):
                self._down.pop(rank, None)
                stopped.pop(rank, None)
                replan = True
        if not replan:
            await asyncio.sleep(_RETRY_S)

    async def _looked_again(self, before: JobDocument, until_s: float) -> JobDocument:
        """The document read again, or `before` if it does not come in time."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self.refresh())
            # Retrieved, or asyncio logs an exception as never retrieved.
            self._looking.add_done_callback(lambda task: task.cancelled() or task.exception())
        looking = self._looking
        # Whatever comes later is for the next call: a link that is cut costs one wait, not two.
        await asyncio.wait({looking}, timeout=max(until_s - time.monotonic(), _LEAST_LOOK_S))
        if not looking.done():
            return before
        try:
            return looking.result()
        except UnreachableError:
            return before


def _same_place(one: PeerAddress, other: PeerAddress | None) -> bool:
    if other is None:
        return False
    return replace(one, address=behind(one.address)) == replace(
        other, address=behind(other.address)
    )


def _identity(document: JobDocument) -> tuple[int, str]:
    return document.incarnation, document.layout_digest


def segment(name: str) -> str:
    """A caller's name or id as one segment of a path."""
    return quote(name, safe="")


class JobRest:
    """REST requests about one job; paths are below its own. Raises as `RestClient.send`."""

    def __init__(self, rest: RestClient, reach: SidecarFinder) -> None:
        self._rest = rest
        self._reach = reach

    @property
    def job(self) -> str:
        return self._reach.document.job

    def waits_for_itself(self) -> bool:
        """Whether the caller is the thread that trains this job, so that no boundary comes."""
        return self._reach.waits_for_itself()

    def check_outside(self, what: str, instead: str = ELSEWHERE) -> None:
        """Raise ConflictError if the caller is the thread that trains, for which `what` waits."""
        if self.waits_for_itself():
            raise own_wait(what, instead)

    def path(self, path: str) -> str:
        """The path below /api/v1."""
        return f"/jobs/{segment(self.job)}{path}"

    async def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        return await self._rest.send(method, self.path(path), body, timeout_s=timeout_s)

    async def again(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        deadline_s: float,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """As `send`, again until the deadline while the control plane cannot be reached.

        The request may have arrived, so a second one must be a no-op. A killed control plane is
        back within seconds.
        """
        while True:
            try:
                return await self.send(method, path, body, timeout_s=timeout_s)
            except UnreachableError:
                if time.monotonic() + AGAIN_S >= deadline_s:
                    raise
                await asyncio.sleep(AGAIN_S)

    def pages(self, path: str, limit: int, **query: object) -> AsyncIterator[Mapping[str, Any]]:
        return self._rest.pages(self.path(path), min(PAGE, limit), **query)

    async def rows(self, name: str, limit: int, **query: object) -> list[Any]:
        """Up to `limit` entries of the list `name`, over as many pages as it takes."""
        found: list[Any] = []
        async for page in self.pages(f"/{name}", limit, **query):
            found += page[name]
            if len(found) >= limit:
                break
        return found[:limit]

    def read(self, parse: Callable[[], Result]) -> Result:
        """The parsed response; ParamdError if it breaks the API's schema."""
        with readable(self._rest.url):
            return parse()
