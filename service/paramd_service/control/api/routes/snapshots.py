"""Snapshots under lease: those pinned over REST at one step, and all leases at the sidecars."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from paramd.errors import ParamdError, UsageError
from paramd.filters import parse_filter
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.access.doorway import principal_of
from paramd_service.control.access.roles import Action
from paramd_service.control.api.choice import available, choose
from paramd_service.control.api.models import (
    HeldDocument,
    LeaseDocument,
    LeaseRequest,
    RankPinDocument,
    RankSnapshots,
    SnapshotList,
    SnapshotRequest,
)
from paramd_service.control.api.routes.paging import begin_of, make_token
from paramd_service.control.api.routes.params import PageToken
from paramd_service.control.api.services import Services
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import RankView
from paramd_service.control.mesh.statistics import LeasedSnapshot
from paramd_service.control.records.events import Kind

MAX_RANKS = 1024

_PAGE = "ranks"

SnapshotId = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="Id returned by create_snapshot")
]
Ranks = Annotated[int, Query(ge=1, le=MAX_RANKS, description="Ranks on a page")]


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["snapshots"])
    _add_reading(routes, services)
    _add_pinning(routes, services)
    _add_leases(routes, services)
    return routes


def _add_reading(routes: APIRouter, services: Services) -> None:
    @routes.get("/jobs/{job}/snapshots")
    async def list_snapshots(
        job: str, limit: Ranks = 256, page_token: PageToken = ""
    ) -> SnapshotList:
        """Snapshots held over REST, and the leases at every sidecar; silent ranks are marked."""
        mesh = services.host.jobs.get(job)
        begin = begin_of(page_token, _PAGE) or 0
        ranks = mesh.registry.view().ranks
        page = ranks[begin : begin + limit]
        end = begin + len(page)
        found = await asyncio.gather(*(_rank(mesh, rank) for rank in page))
        return SnapshotList(
            held=[_document(held) for held in mesh.statistics.held.all()],
            ranks=found,
            partial=any(rank.reason for rank in found),
            next_page_token=make_token(end, _PAGE) if end < len(ranks) else "",
        )

    @routes.get("/jobs/{job}/snapshots/{snapshot}")
    async def get_snapshot(job: str, snapshot: SnapshotId) -> HeldDocument:
        """One held snapshot."""
        return _document(services.host.jobs.get(job).statistics.held.get(snapshot))


def _add_pinning(routes: APIRouter, services: Services) -> None:
    @routes.post("/jobs/{job}/snapshots", status_code=201)
    async def create_snapshot(job: str, request: SnapshotRequest) -> HeldDocument:
        """Pin all matching tensors at one step, on every rank needed. Not idempotent."""
        mesh = services.host.jobs.get(job)
        wanted = parse_filter(request.filter)
        if wanted.statistics:
            raise UsageError(
                f"filter: {wanted.statistics[0]} is about statistics; select a snapshot by globs "
                "and facts"
            )
        _, index = await mesh.layouts.get(mesh.registry.view())
        chosen = choose(index, wanted, with_buffers=request.buffers)
        patterns = list(wanted.patterns)
        if wanted.facts:
            available(mesh.registry.view(), chosen)
            patterns = [item.pattern for item in chosen]
        held = await mesh.statistics.pin(
            patterns,
            with_buffers=request.buffers,
            filter_text=request.filter,
            lease_s=request.lease_s,
        )
        _publish(services, job, held, "pinned")
        return _document(held)


def _add_leases(routes: APIRouter, services: Services) -> None:
    @routes.post("/jobs/{job}/snapshots/{snapshot}/renew")
    async def renew_snapshot(
        job: str, snapshot: SnapshotId, wanted: LeaseRequest, request: Request
    ) -> HeldDocument:
        """Set the lease to end later (or sooner), counted from now. Idempotent.

        Needs the token that pinned it, or an admin's.
        """
        held = services.host.jobs.get(job).statistics.held
        return _document(held.renew(snapshot, wanted.lease_s, by_admin=_is_admin(request)))

    @routes.delete("/jobs/{job}/snapshots/{snapshot}", status_code=204)
    async def release_snapshot(job: str, snapshot: SnapshotId, request: Request) -> Response:
        """End the lease. Idempotent: a lease that has ended is no error.

        Needs the token that pinned it, or an admin's.
        """
        held = services.host.jobs.get(job).statistics.held.release(
            snapshot, by_admin=_is_admin(request)
        )
        if held is not None:
            _publish(services, job, held, "released")
        return Response(status_code=204)


def _is_admin(request: Request) -> bool:
    return principal_of(request).may(Action.ADMINISTER)


async def _rank(mesh: Incarnation, rank: RankView) -> RankSnapshots:
    found, reason = pb.ListSnapshotsResponse(), rank.reason
    if rank.report is not None and rank.connected:
        try:
            request = pb.ListSnapshotsRequest()
            found, reason = await mesh.calls.ask(rank.rank, rank.report.address, request), ""
        except ParamdError as error:
            reason = str(error)
    leases = [LeaseDocument.model_validate(one, from_attributes=True) for one in found.snapshots]
    return RankSnapshots(
        rank=rank.rank,
        reason=reason,
        snapshots=leases,
        lease_count=found.lease_count,
        used_bytes=found.used_bytes,
        budget_bytes=found.budget_bytes,
    )


def _document(held: LeasedSnapshot) -> HeldDocument:
    pins = [
        RankPinDocument(rank=rank, snapshot_id=pin[0], size_bytes=pin[1])
        for rank, pin in sorted(held.pins.items())
    ]
    return HeldDocument(
        id=held.id,
        filter=held.filter,
        incarnation=held.incarnation,
        step=held.step,
        unsettled=held.unsettled,
        lease_left_s=round(held.left_s, 3),
        size_bytes=sum(pin.size_bytes for pin in pins),
        pins=pins,
    )


def _publish(services: Services, job: str, held: LeasedSnapshot, what: str) -> None:
    # A prefix of the id: viewers of the stream have no use for the whole one.
    data = {"state": what, "name": held.id[:8], "incarnation": held.incarnation, "step": held.step}
    services.host.events.publish(Kind.SNAPSHOT, {**data, "filter": held.filter}, job=job)
