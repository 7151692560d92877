"""The caller's identity and permitted actions; browser sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from paramd.errors import UsageError
from paramd.version import __version__
from paramd_service.control.access.authority import CODE_S, cookie_name
from paramd_service.control.access.doorway import bearer_of, cookie_of, principal_of, sign_in_digest
from paramd_service.control.access.roles import allowed
from paramd_service.control.api.services import Services

_EXAMPLE: JsonDict = {
    "name": "owner",
    "role": "admin",
    "actions": ["view", "read"],
    "readonly": False,
    "version": "0.1.0",
}


class SessionDocument(BaseModel):
    """The caller, and what this control plane permits it."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    name: str = Field(description="Name of the token")
    role: str
    actions: Annotated[
        list[str], Field(description="Of view, read, edit, edit-any, export, attach, administer")
    ]
    readonly: bool = Field(description="Whether the control plane refuses all changes")
    version: str = Field(description="Version of the control plane's paramd")


class NewSession(SessionDocument):
    """A new session: its key; the cookie is set by the response."""

    key: str = Field(description="Send it as 'X-Paramd-Session' with the cookie; shown once")


class SignInCode(BaseModel):
    """A code that opens one session."""

    code: str = Field(
        description="Send it as 'Authorization: Paramd-Code <code>' to create_session; dead after "
        "its first use"
    )
    ttl_s: float = Field(description="Seconds until it is dead unused")


def router(services: Services) -> APIRouter:
    """/session."""
    routes = APIRouter(tags=["session"])

    @routes.get("/session")
    async def get_session(request: Request) -> SessionDocument:
        """The identity of the token or session, and what it may do here."""
        return _document(services, request)

    @routes.post("/session", status_code=201)
    async def create_session(request: Request, response: Response) -> NewSession:
        """Sign in with the Authorization header; the response sets a cookie and has its key.

        The header holds a token (Bearer) or a code from create_sign_in_code (Paramd-Code).
        The cookie is HttpOnly and SameSite=Strict. Later requests need both; they carry the
        token's rights and end when it is revoked.
        """
        digest = sign_in_digest(request) or _own_digest(services, request)
        opened = services.sessions.open(digest)
        is_tls = request.url.scheme == "https"
        response.set_cookie(
            cookie_name(request.headers["host"], is_tls=is_tls),
            opened.cookie,
            path="/",
            secure=is_tls,
            httponly=True,
            samesite="strict",
        )
        return NewSession(**_document(services, request).model_dump(), key=opened.key)

    @routes.post("/session/codes", status_code=201)
    async def create_sign_in_code(request: Request) -> SignInCode:
        """A code for a link that signs a browser in: good once, for 60 s, with the rights of the
        token that asks. A session cannot ask for one."""
        code = services.sessions.invite(_own_digest(services, request))
        return SignInCode(code=code, ttl_s=CODE_S)

    @routes.delete("/session", status_code=204)
    async def delete_session(request: Request) -> Response:
        """Sign out: the session ends here and the cookie is removed. Idempotent."""
        services.sessions.close(cookie_of(request.scope))
        response = Response(status_code=204)
        is_tls = request.url.scheme == "https"
        response.delete_cookie(
            cookie_name(request.headers["host"], is_tls=is_tls),
            path="/",
            secure=is_tls,
            httponly=True,
            samesite="strict",
        )
        return response

    return routes


def _own_digest(services: Services, request: Request) -> str:
    token = bearer_of(request.scope)
    if not token:
        raise UsageError("sign in with 'Authorization: Bearer <token>', not with a session")
    return services.tokens.digest(token)


def _document(services: Services, request: Request) -> SessionDocument:
    principal = principal_of(request)
    actions = allowed(principal.role, readonly=services.config.readonly)
    return SessionDocument(
        name=principal.name,
        role=principal.role.value,
        actions=[action.value for action in actions],
        readonly=services.config.readonly,
        version=__version__,
    )
