"""The HTTP app: /api/v1, /metrics, health, the dashboard and the OpenAPI document. Only health and
the dashboard need no token; health reports only whether the server runs."""

import ast
import inspect
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from paramd.documents import Document, Record
from paramd.errors import NotFoundError, UnreachableError
from paramd.security.loopback import ID_CHARS, NONCE_CHARS, PROOF_PATH
from paramd.security.tls import CA_PATH
from paramd.v1 import sidecar_pb2 as pb
from paramd.version import __version__
from paramd_service.control.access.doorway import TokenGate, permitted, recorded
from paramd_service.control.api.guard import Gone, Guard, Page, RequestIdMiddleware
from paramd_service.control.api.routes import (
    access,
    jobs,
    numbers,
    params,
    snapshots,
    streams,
    tunnels,
)
from paramd_service.control.api.services import Services
from paramd_service.control.base import problems
from paramd_service.control.metrics.passed_on import own_series

API = "/api/v1"
_PROOF_ID = re.compile(f"[0-9a-f]{{{ID_CHARS}}}")
_PROOF_NONCE = re.compile(f"[0-9a-f]{{{NONCE_CHARS}}}")
_ROUTES = (
    jobs.router,
    params.router,
    numbers.router,
    snapshots.router,
    streams.events_router,
    streams.grads_router,
    access.tokens_router,
    access.session_router,
    tunnels.router,
)

_PHRASES = {
    400: "The Host header does not name this server, or the URL contains credentials",
    401: "The token is missing or invalid",
    403: "The token's role does not permit this",
    404: "No such job, name or snapshot",
    405: "The path does not support this method",
    409: "The state does not allow it: another layout, run or boundary",
    411: "The body has no Content-Length",
    413: "The body is too long",
    415: "The body is not JSON",
    422: "An argument is invalid",
    429: "A budget or rate limit is used up; try again later",
    500: "Internal error; see the control plane's log",
    503: "A required component does not answer",
    504: "The deadline passed",
}
"""Statuses with a problem document that any operation may return."""
_EXAMPLE = {
    "type": "urn:paramd:error:usage",
    "title": "Unprocessable Entity",
    "status": 422,
    "detail": "filter: at character 1, 'numl': expected one of name, ...",
}
_PROBLEM = {"$ref": "#/components/schemas/Problem"}


def build_app(services: Services) -> FastAPI:
    """The app with its middleware. Every FastAPI route needs a token and a permitted role."""
    app = FastAPI(
        title="paramd control plane",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[
            Depends(permitted(services.denied, readonly=services.host.config.readonly)),
            # Each dependency costs a tenth of a short request.
            *([Depends(recorded(services.refusal))] if services.refusal else []),
        ],
        # `install_openapi` adds the other statuses; this one brings the schema.
        responses={422: {"model": problems.Problem}},
        generate_unique_id_function=attrgetter("name"),
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
    for router in _ROUTES:
        app.include_router(router(services), prefix=API)
    for of_part in services.host.parts.routes():
        app.include_router(of_part, prefix=API)
    app.include_router(metrics_router(services))

    @app.get(f"{API}/openapi.json", include_in_schema=False)
    async def get_openapi() -> dict[str, Any]:
        return app.openapi()

    install_openapi(app)
    # Plain Starlette routes: the dependency above does not apply to them.
    app.router.routes.extend(open_routes(services))
    return app


def open_routes(services: Services) -> Sequence[BaseRoute]:
    """/healthz: the event loop runs. /readyz: serving, not draining. /ca.pem: a job's own CA.
    /proof: that we know a token, to who is about to send it."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        if services.stopping():
            return PlainTextResponse("stopping\n", 503)
        return PlainTextResponse("ok\n")

    async def ca(_: Request) -> Response:
        return PlainTextResponse(services.ca)

    async def proof(request: Request) -> Response:
        # Where the connection really ended, whatever the request says.
        host, port = request.scope["server"]
        if port is None:
            return problems.problem(
                404, "not-found", "there is no proof of a Unix socket's address"
            )
        token_id = request.query_params.get("id", "")
        nonce = request.query_params.get("nonce", "")
        if not _PROOF_ID.fullmatch(token_id) or not _PROOF_NONCE.fullmatch(nonce):
            return problems.problem(400, "usage", "expected id and nonce in hexadecimal digits")
        try:
            found = await services.tokens.proof(token_id, nonce, host, port)
        except UnreachableError as error:
            return problems.problem(503, "unreachable", str(error))
        if found is None:
            return problems.problem(404, "not-found", "no valid token has this id")
        return JSONResponse({"proof": found})

    shown = [Route(CA_PATH, ca)] if services.ca else []
    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route(PROOF_PATH, proof),
        *shown,
    ]


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
        mesh = services.host.jobs.get(job)
        for report in mesh.registry.view().joined:
            if report.rank == rank:
                found = await mesh.calls.ask(rank, report.address, pb.GetMetricsRequest())
                text = own_series(found.text, job=mesh.job, rank=rank)
                return Response(text, media_type=services.metrics.content_type)
        raise NotFoundError(f"rank {rank} of job {job[:64]!r} has no sidecar now")

    return router


def install_openapi(app: FastAPI) -> None:
    """Make `app.openapi()` return the completed document, built on first use."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        # FastAPI caches this very object, so it is completed only once.
        document = plain()
        if "security" not in document:
            _complete(document)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any]) -> None:
    components = document.setdefault("components", {})
    components["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "A token from `paramd token`, or the one in the job's endpoint.json",
        }
    }
    document["security"] = [{"token": []}]
    for name in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(name, None)
    _describe(components["schemas"])
    for methods in document["paths"].values():
        for operation in methods.values():
            _problems(operation["responses"])
            for parameter in operation.get("parameters", ()):
                if (parameter["in"], parameter["name"]) == ("path", "job"):
                    parameter.setdefault("example", "my-run")


def _describe(schemas: dict[str, Any]) -> None:
    """Say of a shape's fields what their docstrings do, which pydantic would seek at each start."""
    shapes = (*Document.__subclasses__(), *Record.__subclasses__())
    for module in {shape.__module__ for shape in shapes if shape.__name__ in schemas}:
        for found in ast.parse(inspect.getsource(sys.modules[module])).body:
            if not isinstance(found, ast.ClassDef) or found.name not in schemas:
                continue
            properties = schemas[found.name].get("properties", {})
            for field in pairwise(found.body):
                match field:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ) if name in properties:
                        properties[name].setdefault("description", inspect.cleandoc(text))


def _problems(responses: dict[str, Any]) -> None:
    for status, phrase in _PHRASES.items():
        content: dict[str, Any] = {"schema": _PROBLEM}
        if status == 422:
            content["example"] = _EXAMPLE
        responses[str(status)] = {
            "description": phrase,
            "content": {"application/problem+json": content},
        }
