"""Errors over HTTP: RFC 9457 problem documents, from the one table of errors."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from paramd.errors import ParamdError, codes_of, exhausted_of, reason_of

MAX_DETAIL_CHARS = 2048
MAX_PATH_CHARS = 200


class Problem(BaseModel):
    """An error, after RFC 9457 (application/problem+json)."""

    type: str = Field(description="urn:paramd:error:<reason>; stable, for programs")
    title: str = Field(description="Phrase of the HTTP status")
    status: int = Field(description="HTTP status")
    detail: str = Field(description="What was wrong, what was expected, what to do next")


def problem(
    status: int, reason: str, detail: str, headers: dict[str, str] | None = None, **more: str
) -> JSONResponse:
    """The response for one error; `reason` is a stable word such as "not-found", and `more` has
    further members of the document."""
    document = Problem(
        type=f"urn:paramd:error:{reason}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail[:MAX_DETAIL_CHARS],
    )
    content = document.model_dump() | more
    return JSONResponse(content, status, headers, media_type="application/problem+json")


def install(app: FastAPI) -> None:
    """Turn every error of the app into a problem document."""
    app.add_exception_handler(ParamdError, _domain)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


async def _domain(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ParamdError)
    reason = reason_of(error).lower().replace("_", "-")
    return problem(codes_of(error).http, reason, str(error))


async def _validation(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    told = "; ".join(f"{item['loc'][-1]}: {item['msg']}" for item in error.errors()[:8])
    return problem(422, "usage", told)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    reason, detail = "usage", str(error.detail)
    if error.status_code == 404:
        # The router's own: no route has this path.
        reason, asked = "not-found", f"{request.method} {request.url.path[:MAX_PATH_CHARS]}"
        detail = f"{asked} is not served here: no such path, or no part of this server is for it"
    return problem(error.status_code, reason, detail, dict(error.headers or {}))


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    if (told := exhausted_of(error)) is not None:
        return await _domain(request, told)
    return problem(500, "paramd", "internal error; see the control plane's log")
