"""Jobs, their runs and ranks; registration of a job with a site."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, TypeAlias

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from paramd import clock
from paramd.errors import UnreachableError, UsageError
from paramd.security.tickets import RANK_TICKET_TTL_S, Role, handed, mint_of_ranks, shown_of
from paramd.security.tls import is_of_job
from paramd_service.control.access.authority import Principal
from paramd_service.control.access.doorway import check_job, principal_of
from paramd_service.control.access.roles import ticket_role
from paramd_service.control.api import rank_text
from paramd_service.control.api.models import (
    IncarnationList,
    JobDocument,
    JobList,
    JobRegistration,
    JobSummary,
    RankList,
    RegisteredJob,
    TlsDocument,
    VerdictDocument,
)
from paramd_service.control.api.services import Services
from paramd_service.control.mesh.health import Health, Seen, pause_word
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import MeshView, alive_count
from paramd_service.control.parts import ControlHost

MINTED_AT_ONCE = 32
"""Ranks whose two tickets (60 us each) are signed before the event loop serves other tasks."""

OfRank: TypeAlias = Annotated[
    int | None,
    Query(ge=0, description="Rank whose sidecar, and no other, gets the ticket"),
]
Gather: TypeAlias = Annotated[
    bool, Query(description="Also return a ticket with which that rank can read the others")
]


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["jobs"])
    signing: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)

    @routes.get("/jobs")
    async def list_jobs(request: Request) -> JobList:
        """Jobs of this control plane that the token is for, each in its last run."""
        mine = [one for one in services.host.jobs.all() if principal_of(request).sees(one.job)]
        return JobList(jobs=[summary_of(services.host, one, one.registry.view()) for one in mine])

    @routes.post("/jobs", status_code=201)
    async def register_job(registration: JobRegistration, request: Request) -> RegisteredJob:
        """Begin a new run of a job; the previous one ends."""
        hosts = registration.rank_hosts
        check_job(principal_of(request), registration.job)
        if hosts and len(hosts) != registration.world_size:
            raise UsageError(
                f"rank_hosts: {len(hosts)} for {registration.world_size} ranks; give one for each"
            )
        detail = registration.model_dump(include={"world_size", "incarnation_floor", "succeeds"})
        owner = principal_of(request).token_id
        mesh = await services.host.jobs.register(registration.job, owner=owner, **detail)
        await services.host.records.happened(principal_of(request), "job.register", detail, mesh)
        # One registration of a token at a time: many large ones do not delay other tokens'.
        async with signing[principal_of(request).token_id]:
            return await _registered(services, mesh, registration.rank_hosts, request)

    @routes.get("/jobs/{job}")
    async def get_job(
        job: str, request: Request, rank: OfRank = None, gather: Gather = False
    ) -> JobDocument:
        """A job, its sidecars, and a fresh ticket with the rights of the token.

        Each server takes it beside its own key alone, which is derived from the seed."""
        mesh, who = services.host.jobs.get(job), principal_of(request)
        found = await job_document(services.host, mesh, who)
        if gather:
            found.reads = handed(*await _ticket(services.host, mesh, who, "gather"))
        if rank is not None:
            if rank >= found.world_size:
                raise UsageError(f"rank: {rank}; the job has {found.world_size} ranks")
            both = handed(found.ticket, found.ticket_seed)
            found.ticket = await asyncio.to_thread(shown_of, both, rank, found.world_size)
            found.ticket_seed = ""
        return found

    @routes.post("/jobs/{job}/end")
    async def end_job(job: str, request: Request) -> JobSummary:
        """End the run of a job whose training is over; refused while a trainer is alive.

        An embedded control plane then ends, too. Sidecars that linger are asked on their own
        hosts (paramd cleanup). Idempotent."""
        mesh = services.host.jobs.get(job)
        who = principal_of(request)
        async with services.host.records.recorded(who, "job.end", {}, mesh):
            services.host.jobs.end(job, who.name)
        return summary_of(services.host, mesh, mesh.registry.view())

    @routes.get("/jobs/{job}/ranks", response_model=RankList)
    async def list_ranks(job: str) -> Response:
        """All ranks, with the reason for every state that is not ok."""
        mesh = services.host.jobs.get(job)
        chunks = rank_text.chunks(
            mesh.registry,
            world_size=mesh.bootstrap.world_size,
            incarnation=mesh.number,
            stall_budget_s=services.host.parts.stall_budget_s(),
        )
        return StreamingResponse(_yielded(chunks), media_type="application/json")

    @routes.get("/jobs/{job}/incarnations")
    async def list_incarnations(job: str) -> IncarnationList:
        """Incarnations of the job, the current one last."""
        return IncarnationList(incarnations=await services.host.jobs.incarnations(job))

    return routes


async def _yielded(chunks: Iterator[str]) -> AsyncIterator[str]:
    """Keep the iterator on the event loop: Starlette would run a plain one in a thread."""
    for chunk in chunks:
        yield chunk


async def _registered(
    services: Services, mesh: Incarnation, hosts: Sequence[str], request: Request
) -> RegisteredJob:
    """Sign what each rank needs, as long as the caller waits for the answer."""
    mine, who = mesh.bootstrap, principal_of(request)
    ttl_s = _ticket_ttl_s(RANK_TICKET_TTL_S, who, clock.now_s())

    def minted(role: Role, ranks: range) -> list[str]:
        of = {"job": mine.job, "incarnation": mine.incarnation, "token_id": who.token_id}
        return mint_of_ranks(mine.signer, role, ranks=ranks, ttl_s=ttl_s, **of)  # type: ignore[arg-type]

    tickets, copy_tickets, pems = [], [], []
    # The body has been read, so the next message means that the caller has left.
    leaving = asyncio.ensure_future(request.receive())
    try:
        for first in range(0, mine.world_size, MINTED_AT_ONCE):
            await asyncio.sleep(0)
            if leaving.done() or mesh.over is not None:
                raise UnreachableError(f"the client registering job {mine.job!r} has left")
            ranks = range(first, min(first + MINTED_AT_ONCE, mine.world_size))
            tickets += minted(Role.SIDECAR, ranks)
            copy_tickets += minted(Role.COPIER, ranks)
            if part := hosts[ranks.start : ranks.stop]:
                issue = mine.certificates.authority.issue_ranks
                pems += await asyncio.to_thread(issue, part, first)
    finally:
        leaving.cancel()
    return RegisteredJob(
        job=mine.job,
        incarnation=mine.incarnation,
        control_address=services.host.grpc_address,
        public_key=mine.signer.public_key.hex(),
        rank_tickets=tickets,
        copy_tickets=copy_tickets,
        rank_tls=[TlsDocument(**one.to_json()) for one in pems],
    )


def reason_of(mesh: Incarnation, view: MeshView) -> str:
    """Why the job's state is not ok."""
    return mesh.reason if mesh.over is not None else view.reason


def verdict_of_job(host: ControlHost, mesh: Incarnation) -> VerdictDocument:
    """The verdict on a job now."""
    return VerdictDocument.of(_health(host, mesh, mesh.registry.view()).verdict)


def _health(host: ControlHost, mesh: Incarnation, view: MeshView) -> Health:
    return host.health(mesh, Seen.of(view, reason_of(mesh, view)))


def summary_of(host: ControlHost, mesh: Incarnation, view: MeshView) -> JobSummary:
    joined, health = view.joined, _health(host, mesh, view)
    verdict = health.verdict
    return JobSummary(
        job=mesh.job,
        incarnation=mesh.number,
        world_size=mesh.bootstrap.world_size,
        joined_count=len(joined),
        alive_count=alive_count(view) if mesh.over is None else 0,
        step=min((report.step for report in joined), default=mesh.last_step),
        state=view.state.value,
        reason=reason_of(mesh, view),
        pause=pause_word(joined),
        health=verdict.word,
        why=verdict.why,
        cause=verdict.cause,
        verdict=VerdictDocument.of(verdict),
        critical_count=health.critical_count,
        warning_count=health.warning_count,
    )


async def _ticket(
    host: ControlHost, mesh: Incarnation, principal: Principal, use: str = ""
) -> tuple[str, str]:
    """A fresh ticket and the seed of its keys; with a `use`, one that can read alone."""
    mine, now_s = mesh.bootstrap, clock.now_s()
    return await asyncio.to_thread(
        mine.keyed_ticket,
        ticket_role(principal.role, readonly=host.config.readonly or bool(use)),
        ttl_s=_ticket_ttl_s(host.config.ticket_ttl_s, principal, now_s),
        now_s=now_s,
        token_id=principal.token_id,
        use=use,
    )


async def job_document(host: ControlHost, mesh: Incarnation, principal: Principal) -> JobDocument:
    """A job for one caller, with a ticket of the caller's rights. Raises as `check_job`."""
    check_job(principal, mesh.job)
    ticket, seed = await _ticket(host, mesh, principal)
    mine, view, now_s = mesh.bootstrap, mesh.registry.view(), clock.now_s()
    ttl_s = _ticket_ttl_s(host.config.ticket_ttl_s, principal, now_s)
    peers = mesh.registry.peers()
    pems = None
    if any(is_of_job(address) for address in (host.grpc_address, *(p.address for p in peers))):
        pems = mine.certificates.client(principal.token_id)
    return JobDocument(
        **summary_of(host, mesh, view).model_dump(),
        layout_digest=view.layout_digest,
        control_address=host.grpc_address,
        peers=peers,
        ticket=ticket,
        ticket_seed=seed,
        ticket_expires_s=now_s + ttl_s,
        tls=TlsDocument(**pems.to_json()) if pems is not None else None,
    )


def _ticket_ttl_s(ttl_s: float, principal: Principal, now_s: float) -> float:
    """No ticket outlives its token."""
    if principal.expires_s is None:
        return ttl_s
    # Positive even if the token expired after it was checked.
    return max(min(ttl_s, principal.expires_s - now_s), 0.001)
