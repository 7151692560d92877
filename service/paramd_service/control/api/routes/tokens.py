"""User tokens: create, list, revoke. For admins."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from paramd_service.control.access.authority import DEFAULT_TTL_S, MAX_NAME_CHARS, MAX_TTL_S
from paramd_service.control.access.doorway import principal_of
from paramd_service.control.access.roles import UserRole
from paramd_service.control.api.services import Services
from paramd_service.control.store.tokens import TokenRow


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


class TokenDocument(BaseModel):
    """A token without its secret."""

    name: str
    role: str
    created_s: float = Field(description="Seconds since the Unix epoch")
    expires_s: float | None = Field(description="Seconds since the Unix epoch; null: never")
    revoked_s: float | None = Field(description="When it was revoked; null: not revoked")


class NewToken(TokenDocument):
    """A token with its secret, which is shown only once."""

    token: str = Field(description="Send it as 'Authorization: Bearer <token>'")


class TokenList(BaseModel):
    """All tokens, expired and revoked ones too, ordered by name."""

    tokens: list[TokenDocument]


def router(services: Services) -> APIRouter:
    """/tokens, /tokens/{name}."""
    routes = APIRouter(tags=["tokens"])

    @routes.post("/tokens", status_code=201)
    async def create_token(wanted: TokenRequest, request: Request) -> NewToken:
        """Create a token. It is shown only in this response; only its hash is stored."""
        row, token = await services.tokens.create(
            principal_of(request), role=wanted.role, ttl_s=wanted.ttl_s, name=wanted.name
        )
        return NewToken(**_document(row).model_dump(), token=token)

    @routes.get("/tokens")
    async def list_tokens() -> TokenList:
        """All tokens, with name, role and validity."""
        return TokenList(tokens=[_document(row) for row in await services.tokens.list()])

    @routes.delete("/tokens/{name}")
    async def revoke_token(
        name: Annotated[str, Path(max_length=MAX_NAME_CHARS)], request: Request
    ) -> TokenDocument:
        """Revoke a token, at once and for good. Idempotent."""
        return _document(await services.tokens.revoke(principal_of(request), name))

    return routes


def _document(row: TokenRow) -> TokenDocument:
    return TokenDocument.model_validate(row, from_attributes=True)
