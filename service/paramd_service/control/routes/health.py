"""Health (open: the server is on loopback and says nothing but whether it serves); metrics."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from paramd_service.control.services import Services


def open_routes(services: Services) -> Sequence[BaseRoute]:
    """/healthz: the event loop runs. /readyz: it serves and does not drain."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        if services.stopping():
            return PlainTextResponse("stopping\n", 503)
        return PlainTextResponse("ok\n")

    return [Route("/healthz", healthz), Route("/readyz", readyz)]


def metrics_router(services: Services) -> APIRouter:
    """/metrics, for Prometheus with the job's token."""
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        """Prometheus text format."""
        return Response(services.metrics.render(), media_type=services.metrics.content_type)

    return router
