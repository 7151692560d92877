"""The OpenAPI document: what FastAPI finds in the routes, and what holds for all of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

PROBLEM_STATUSES = (400, 401, 403, 404, 405, 409, 411, 413, 422, 429, 500, 503, 504)
"""Any operation may answer with a problem of these."""

_PHRASES = {
    400: "The request names another site, or holds credentials where logs keep them",
    401: "No token, or a wrong one",
    403: "The token's role does not permit it",
    404: "No such job, name or snapshot",
    405: "Not a method of this path",
    409: "The state does not allow it: another layout, incarnation or boundary",
    411: "The body comes without its length",
    413: "The body is too long",
    422: "An argument is wrong",
    429: "A budget is used up; try again later",
    500: "A fault of the control plane; its log says more",
    503: "A part that is needed does not answer",
    504: "It did not happen in time",
}
_EXAMPLE = {
    "type": "urn:paramd:error:usage",
    "title": "Unprocessable Entity",
    "status": 422,
    "detail": "filter: at character 1, 'numl': expected one of name, ...",
}
_PROBLEM = {"$ref": "#/components/schemas/Problem"}


def install(app: FastAPI) -> None:
    """Makes `app.openapi()` give the whole document, made when first asked for."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        # Kept by FastAPI: made once, and the very object that it keeps.
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
            "description": "A token of `paramd token`, or the one in the job's endpoint.json",
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
    for status in PROBLEM_STATUSES:
        content: dict[str, Any] = {"schema": _PROBLEM}
        if status == 422:
            content["example"] = _EXAMPLE
        responses[str(status)] = {
            "description": _PHRASES[status],
            "content": {"application/problem+json": content},
        }
