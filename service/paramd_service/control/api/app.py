"""The HTTP app: /api/v1, /metrics and the dashboard. Only health and the page need no token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute

from paramd.version import __version__
from paramd_service.control.access.doorway import TokenGate, permitted
from paramd_service.control.api import openapi
from paramd_service.control.api.guard import Gone, Guard, Page, RequestIdMiddleware
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
    insight,
    jobs,
    marks,
    numbers,
    params,
    session,
    snapshots,
    tokens,
    tunnels,
)
from paramd_service.control.api.services import Services
from paramd_service.control.base import problems

API = "/api/v1"
_ROUTES = (
    jobs,
    insight,
    params,
    numbers,
    snapshots,
    edits,
    holds,
    marks,
    events,
    grads,
    tokens,
    session,
    history,
    audit,
    alerts,
    exports,
    tunnels,
)


def build_app(services: Services) -> FastAPI:
    """The app with its middleware. Every FastAPI route needs a token and a permitted role."""
    app = FastAPI(
        title="paramd control plane",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(permitted(services.denied, readonly=services.config.readonly))],
        # openapi.py adds the other statuses; this one brings the schema.
        responses={422: {"model": problems.Problem}},
        generate_unique_id_function=_operation_id,
    )
    # The last one added runs first.
    app.add_middleware(Gone)
    app.add_middleware(
        TokenGate,
        tokens=services.tokens,
        sessions=services.sessions,
        revocations=services.revocations,
        doorway=services.doorway,
        failures=services.failures,
        denied=services.denied,
    )
    # The page needs no token, so it comes before the gate, but
    # after the guard: other sites must not load it.
    app.add_middleware(Page)
    app.add_middleware(
        Guard,
        listen_host=services.listen_host,
        is_token=services.tokens.is_secret,
        names=lambda: services.tls.names if services.tls is not None else frozenset(),
    )
    app.add_middleware(RequestIdMiddleware)
    problems.install(app)
    for routes in _ROUTES:
        app.include_router(routes.router(services), prefix=API)
    app.include_router(health.metrics_router(services))
    app.add_api_route(f"{API}/openapi.json", _openapi(app), include_in_schema=False)
    openapi.install(app)
    # Plain Starlette routes: the dependency above does not apply to them.
    app.router.routes.extend(health.open_routes(services))
    return app


def _openapi(app: FastAPI) -> Callable[[], Awaitable[dict[str, Any]]]:
    async def get_openapi() -> dict[str, Any]:
        return app.openapi()

    return get_openapi


def _operation_id(route: APIRoute) -> str:
    return route.name
