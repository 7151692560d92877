"""Tokens, for admins; the identity of a caller and what it may do; browser sessions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from paramd.errors import ConflictError, UsageError
from paramd.version import __version__
from paramd_service.control.access.authority import (
    CODE_S,
    DEFAULT_TTL_S,
    KEY_HEADER,
    MAX_CODE_S,
    MAX_JOBS_CHARS,
    MAX_NAME_CHARS,
    MAX_TTL_S,
    cookie_name,
)
from paramd_service.control.access.doorway import (
    bearer_of,
    cookie_of,
    principal_of,
    sign_in_code,
    sign_in_digest,
)
from paramd_service.control.access.roles import UserRole, allowed
from paramd_service.control.api.services import Services
from paramd_service.control.store.tokens import TokenRow

_EXAMPLE: JsonDict = {
    "name": "owner",
    "role": "admin",
    "actions": ["view", "read"],
    "readonly": False,
    "version": "0.1.0",
}


class TokenRequest(BaseModel):
    """A token to create."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"role": "reader", "ttl_s": 86400, "name": "notebook"}]},
    )

    role: UserRole = Field(description="What it may do")
    ttl_s: float = Field(
        DEFAULT_TTL_S, gt=0, le=MAX_TTL_S, allow_inf_nan=False, description="Validity in seconds"
    )
    name: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_NAME_CHARS,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]*$",
        description="Its owner or purpose; appears in the audit. Never reusable; generated when "
        "absent",
    )
    jobs: str | None = Field(
        None,
        max_length=MAX_JOBS_CHARS,
        description="Patterns of the jobs that it is for, such as team-a-*, separated by commas; "
        "all when absent",
    )


class TokenDocument(BaseModel):
    """A token without its secret."""

    name: str
    role: str
    created_s: float = Field(description="Seconds since the Unix epoch")
    expires_s: float | None = Field(description="Seconds since the Unix epoch; null: never")
    revoked_s: float | None = Field(description="When it was revoked; null: not revoked")
    jobs: str | None = Field(description="Patterns of the jobs that it is for; null: all")


class NewToken(TokenDocument):
    """A token with its secret, which is shown only once."""

    token: str = Field(description="Send it as 'Authorization: Bearer <token>'")


class TokenList(BaseModel):
    """All tokens, expired and revoked ones too, ordered by name."""

    tokens: list[TokenDocument]


def tokens_router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["tokens"])

    @routes.post("/tokens", status_code=201)
    async def create_token(wanted: TokenRequest, request: Request) -> NewToken:
        """Create a token. It is shown only in this response; only its hash is stored."""
        row, token = await services.tokens.create(principal_of(request), **wanted.model_dump())
        return NewToken(**_token_document(row).model_dump(), token=token)

    @routes.get("/tokens")
    async def list_tokens() -> TokenList:
        """All tokens, with name, role and validity."""
        return TokenList(tokens=[_token_document(row) for row in await services.tokens.list()])

    @routes.delete("/tokens/{name}")
    async def revoke_token(
        name: Annotated[str, Path(max_length=MAX_NAME_CHARS)], request: Request
    ) -> TokenDocument:
        """Revoke a token, at once and for good. Idempotent."""
        return _token_document(await services.tokens.revoke(principal_of(request), name))

    return routes


def _token_document(row: TokenRow) -> TokenDocument:
    return TokenDocument.model_validate(row, from_attributes=True)


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
        description="Send it as 'Authorization: Paramd-Code <code>' to create_session; good for "
        "one use"
    )
    ttl_s: float = Field(description="Seconds until it expires unused")


def session_router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["session"])

    @routes.get("/session")
    async def get_session(request: Request) -> SessionDocument:
        """The identity of the token or session, and what it may do here."""
        return _session_document(services, request)

    @routes.post("/session", status_code=201)
    async def create_session(
        request: Request,
        response: Response,
        replace: Annotated[
            bool, Query(description="Replace another token's open session in this browser")
        ] = False,
    ) -> NewSession:
        """Sign in with the Authorization header; the response sets a cookie and has its key.

        The header holds a token (Bearer) or a code from create_sign_in_code (Paramd-Code).
        The cookie is HttpOnly and SameSite=Strict. Later requests need both; they carry the
        token's rights and end when it is revoked. Over an open session of another token it is
        refused (409) unless `replace` is given, and the code stays good: a link of somebody else's
        must not sign anybody in as them unasked.
        """
        digest = sign_in_digest(request) or _own_digest(services, request)
        if not replace:
            await _check_no_other(services, request, digest)
        opened = services.sessions.open(digest)
        response.set_cookie(value=opened.cookie, **_cookie_of(request))
        return NewSession(**_session_document(services, request).model_dump(), key=opened.key)

    @routes.post("/session/codes", status_code=201)
    async def create_sign_in_code(
        request: Request, ttl_s: Annotated[float, Query(gt=0, le=MAX_CODE_S)] = CODE_S
    ) -> SignInCode:
        """A code for a link that signs a browser in: good once, with the rights of the token that
        asks. A session cannot ask for one. An hour is for a link that is sent to somebody."""
        code = services.sessions.invite(_own_digest(services, request), ttl_s)
        return SignInCode(code=code, ttl_s=ttl_s)

    @routes.delete("/session", status_code=204)
    async def delete_session(request: Request) -> Response:
        """Sign out: the session ends here and the cookie is removed. Idempotent."""
        services.sessions.close(cookie_of(request.scope))
        response = Response(status_code=204)
        response.delete_cookie(**_cookie_of(request))
        return response

    return routes


async def _check_no_other(services: Services, request: Request, digest: str) -> None:
    """Raise ConflictError if the request comes with an open session of another token."""
    key = request.headers.get(KEY_HEADER, "")
    there = services.sessions.token_digest(cookie_of(request.scope), key)
    if not there or there == digest:
        return
    open_for = await services.tokens.principal_of_digest(there)
    if open_for is None:
        return  # its token has ended, and the session with it
    if code := sign_in_code(request):
        services.sessions.take_back(code, digest)
    asks = principal_of(request)
    raise ConflictError(
        f"this browser is signed in as {open_for.name} ({open_for.role}), and this would sign it "
        f"in as {asks.name} ({asks.role}); sign out first, or send it with replace=true"
    )


def _cookie_of(request: Request) -> dict[str, Any]:
    """Name and attributes of the session's cookie, which is removed by the same ones."""
    is_tls = request.url.scheme == "https"
    name = cookie_name(request.headers["host"], is_tls=is_tls)
    return {"key": name, "path": "/", "secure": is_tls, "httponly": True, "samesite": "strict"}


def _own_digest(services: Services, request: Request) -> str:
    token = bearer_of(request.scope)
    if not token:
        raise UsageError("sign in with 'Authorization: Bearer <token>', not with a session")
    return services.tokens.digest(token)


def _session_document(services: Services, request: Request) -> SessionDocument:
    principal = principal_of(request)
    actions = allowed(principal.role, readonly=services.host.config.readonly)
    return SessionDocument(
        name=principal.name,
        role=principal.role.value,
        actions=[action.value for action in actions],
        readonly=services.host.config.readonly,
        version=__version__,
    )
