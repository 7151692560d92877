"""The OpenAPI document: FastAPI's own, plus what all operations share."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_PHRASES = {
    400: "The Host header does not name this server, or the URL contains credentials",
    401: "The token is missing or invalid",
    403: "The token's role does not permit this",
    404: "No such job, name or snapshot",
    405: "The path does not support this method",
    409: "The state does not allow it: another layout, incarnation or boundary",
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


def install(app: FastAPI) -> None:
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
    for methods in document["paths"].values():
        for operation in methods.values():
            _problems(operation["responses"])
            for parameter in operation.get("parameters", ()):
                if (parameter["in"], parameter["name"]) == ("path", "job"):
                    parameter.setdefault("example", "my-run")


def _problems(responses: dict[str, Any]) -> None:
    for status, phrase in _PHRASES.items():
        content: dict[str, Any] = {"schema": _PROBLEM}
        if status == 422:
            content["example"] = _EXAMPLE
        responses[str(status)] = {
            "description": phrase,
            "content": {"application/problem+json": content},
        }
