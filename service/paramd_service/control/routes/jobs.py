"""Jobs and their ranks. An embedded control plane has exactly one job."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from paramd.errors import NotFoundError
from paramd.tickets import Role, mint
from paramd.v1 import common_pb2
from paramd_service.control.models import (
    JobDocument,
    JobList,
    JobSummary,
    PeerDocument,
    Problem,
    RankDocument,
    RankList,
)
from paramd_service.control.services import Services
from paramd_service.control.view import MeshView, RankView

PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": Problem} for code in (400, 401, 403, 404, 422, 429, 500, 503)
}


def router(services: Services) -> APIRouter:
    """/jobs, /jobs/{job}, /jobs/{job}/ranks."""
    routes = APIRouter(tags=["jobs"], responses=PROBLEMS)

    @routes.get("/jobs")
    async def list_jobs() -> JobList:
        """Jobs that this control plane serves."""
        return JobList(jobs=[_summary(services, services.registry.view())])

    @routes.get("/jobs/{job}")
    async def get_job(job: str) -> JobDocument:
        """A job, its sidecars, and a fresh reader's ticket."""
        check_job(services, job)
        return _document(services, services.registry.view())

    @routes.get("/jobs/{job}/ranks")
    async def list_ranks(job: str) -> RankList:
        """Every rank, with the reason when something is not as it should be."""
        check_job(services, job)
        ranks = [_rank(rank) for rank in services.registry.view().ranks]
        return RankList(epoch=services.bootstrap.epoch, ranks=ranks)

    return routes


def check_job(services: Services, job: str) -> None:
    """Raises NotFoundError for any job but ours."""
    if job != services.bootstrap.job:
        raise NotFoundError(
            f"job {job[:64]!r} is not served here; this is job {services.bootstrap.job!r}"
        )


def _summary(services: Services, view: MeshView) -> JobSummary:
    return JobSummary(
        job=services.bootstrap.job,
        epoch=services.bootstrap.epoch,
        world_size=services.bootstrap.world_size,
        joined_count=len(view.joined),
        step=min((report.step for report in view.joined), default=-1),
        reason=view.reason,
    )


def _document(services: Services, view: MeshView) -> JobDocument:
    mine, ttl_s, now_s = services.bootstrap, services.config.ticket_ttl_s, time.time()
    ticket = mint(
        mine.secret, job=mine.job, epoch=mine.epoch, role=Role.READER, ttl_s=ttl_s, now_s=now_s
    )
    peers = [
        PeerDocument(
            rank=peer.rank,
            address=peer.address,
            socket_path=peer.socket_path,
            host_id=peer.host_id,
        )
        for peer in services.registry.peers()
    ]
    return JobDocument(
        **_summary(services, view).model_dump(),
        layout_digest=view.layout_digest,
        control_address=services.grpc_address,
        peers=peers,
        ticket=ticket,
        ticket_expires_s=now_s + ttl_s,
    )


def _rank(rank: RankView) -> RankDocument:
    report = rank.report
    state = report.state if report is not None else common_pb2.RankState()
    try:
        phase = common_pb2.Phase.Name(state.phase).removeprefix("PHASE_").lower()
    except ValueError:
        phase = "unspecified"  # a newer sidecar's word
    return RankDocument(
        rank=rank.rank,
        membership=rank.membership.value,
        reason=rank.reason,
        age_s=round(rank.age_s, 3),
        phase=phase,
        step=report.step if report is not None else -1,
        trainer_pid=state.trainer_pid,
        sidecar_pid=state.sidecar_pid,
        step_time_ns=state.step_time_ns,
        boundary_age_ns=state.boundary_age_ns if report is not None else -1,
        stall_count=state.stall_count,
        stall_total_ns=state.stall_total_ns,
        stall_max_ns=state.stall_max_ns,
        abandoned_copy_count=state.abandoned_copy_count,
        arena_bytes=state.arena_bytes,
        snapshot_bytes=state.snapshot_bytes,
        snapshot_count=state.snapshot_count,
        agreement_works=state.agreement_works,
        agreement_reason=state.agreement_reason,
        version=report.version if report is not None else "",
    )
