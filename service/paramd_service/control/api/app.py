"""The REST side: /api/v1, health, metrics. Every route needs the token unless it is health."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute

from paramd.version import __version__
from paramd_service.control.access.doorway import TokenGate, permitted
from paramd_service.control.api import openapi
from paramd_service.control.api.guard import Guard, Page, RequestIdMiddleware
from paramd_service.control.api.routes import (
    alerts,
    audit,
    edits,
    events,
    exports,
    grads,
    health,
    history,
    holds,
    jobs,
    numbers,
    params,
    session,
    snapshots,
    tokens,
)
from paramd_service.control.api.services import Services
from paramd_service.control.base import problems

API = "/api/v1"


def build_app(services: Services) -> FastAPI:
    """The whole app. Whatever is added through FastAPI is denied without a token."""
    app = FastAPI(
        title="paramd control plane",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(permitted(services.denied, readonly=services.config.readonly))],
        generate_unique_id_function=_operation_id,
    )
    app.add_middleware(
        TokenGate,
        tokens=services.tokens,
        sessions=services.sessions,
        revocations=services.revocations,
        doorway=services.doorway,
        failures=services.failures,
        denied=services.denied,
    )
    # Before the gate: the page is no secret. Behind the guard: no other site gets it.
    app.add_middleware(Page)
    # Added last, so it comes first.
    app.add_middleware(
        Guard,
        listen_host=services.listen_host,
        is_token=services.tokens.is_secret,
        names=lambda: services.tls.names if services.tls is not None else frozenset(),
    )
    app.add_middleware(RequestIdMiddleware)
    problems.install(app)
    app.include_router(jobs.router(services), prefix=API)
    app.include_router(params.router(services), prefix=API)
    app.include_router(numbers.router(services), prefix=API)
    app.include_router(snapshots.router(services), prefix=API)
    app.include_router(edits.router(services), prefix=API)
    app.include_router(holds.router(services), prefix=API)
    app.include_router(events.router(services), prefix=API)
    app.include_router(grads.router(services), prefix=API)
    app.include_router(tokens.router(services), prefix=API)
    app.include_router(session.router(services), prefix=API)
    app.include_router(history.router(services), prefix=API)
    app.include_router(audit.router(services), prefix=API)
    app.include_router(alerts.router(services), prefix=API)
    app.include_router(exports.router(services), prefix=API)
    app.include_router(health.metrics_router(services))
    app.add_api_route(f"{API}/openapi.json", _openapi(app), include_in_schema=False)
    openapi.install(app)
    # Plain routes of Starlette: the dependency above does not reach them.
    app.router.routes.extend(health.open_routes(services))
    return app


def _openapi(app: FastAPI) -> Callable[[], Awaitable[dict[str, Any]]]:
    async def get_openapi() -> dict[str, Any]:
        return app.openapi()

    return get_openapi


def _operation_id(route: APIRoute) -> str:
    return route.name
