"""Health endpoints, which need no token and reveal only whether the server runs; metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from paramd.errors import NotFoundError
from paramd.security.tls import CA_PATH
from paramd_service.control.api.services import Services


def open_routes(services: Services) -> Sequence[BaseRoute]:
    """/healthz: the event loop runs. /readyz: serving, not draining. /ca.pem: a job's own CA."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        if services.stopping():
            return PlainTextResponse("stopping\n", 503)
        return PlainTextResponse("ok\n")

    async def ca(_: Request) -> Response:
        return PlainTextResponse(services.ca)

    shown = [Route(CA_PATH, ca)] if services.ca else []
    return [Route("/healthz", healthz), Route("/readyz", readyz), *shown]


def metrics_router(services: Services) -> APIRouter:
    """/metrics and, for the sidecar of one rank, /api/v1/jobs/{job}/ranks/{rank}/metrics.

    Both are for Prometheus, with a token. Sidecars have no scrape port; each scrape asks
    them over gRPC.
    """
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        """Prometheus text format."""
        return Response(services.metrics.render(), media_type=services.metrics.content_type)

    @router.get("/api/v1/jobs/{job}/ranks/{rank}/metrics", response_class=PlainTextResponse)
    async def get_rank_metrics(job: str, rank: Annotated[int, Path(ge=0)]) -> Response:
        """One sidecar's own metrics, fetched now; Prometheus text format."""
        mesh = services.jobs.get(job)
        for report in mesh.registry.view().joined:
            if report.rank == rank:
                text = await mesh.calls.metrics(rank, report.address)
                return Response(text, media_type=services.metrics.content_type)
        raise NotFoundError(f"rank {rank} of job {job[:64]!r} has no sidecar now")

    return router
