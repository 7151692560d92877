"""Stored user tokens: names, digests and roles, never the tokens themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, and_, func, insert, or_, select, update

from paramd.errors import ConflictError, NotFoundError
from paramd_service.control.store.schema import tokens
from paramd_service.control.store.store import Store, columns_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    name: str
    """Unique forever: a revoked token keeps its name. At most 64 characters."""
    digest: str
    """sha256 of the token, 64 hexadecimal digits."""
    role: str
    created_s: float
    """Seconds since the Unix epoch."""
    expires_s: float | None = None
    """None: never."""
    revoked_s: float | None = None
    """None: not revoked."""
    jobs: str | None = None
    """Patterns of the jobs that it is for, separated by commas; None: all."""

    @property
    def ended_s(self) -> float:
        """When it was revoked, else when it expires; infinite when neither."""
        ended_s = self.revoked_s if self.revoked_s is not None else self.expires_s
        return ended_s if ended_s is not None else math.inf


class TokenStore:
    """Reads and writes the table. All methods raise StoreError when it cannot be used."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(self, row: TokenRow) -> None:
        """Add a token.

        Raises:
            ConflictError: If the name has been used.
        """

        def work(connection: Connection) -> None:
            found = select(tokens.c.name).where(tokens.c.name == row.name)
            if connection.execute(found).first() is not None:
                raise ConflictError(f"token {row.name!r}: the name has been used; choose another")
            connection.execute(insert(tokens).values(columns_of(row)))

        await self._store.write(work)

    async def find(self, digest: str) -> TokenRow | None:
        """The token with this digest, even if revoked or expired; None when there is none."""
        chosen = select(tokens).where(tokens.c.digest == digest)
        row = await self._store.first(chosen)
        return _token(row) if row is not None else None

    async def of_id(self, token_id: str) -> TokenRow | None:
        """The token with this id in tickets, even if it has ended; None when there is none."""
        row = await self._store.first(select(tokens).where(tokens.c.digest.startswith(token_id)))
        return _token(row) if row is not None else None

    async def digests(self, *, now_s: float) -> list[str]:
        """Digests of all tokens that are good at this time."""
        good = or_(tokens.c.expires_s.is_(None), tokens.c.expires_s > now_s)
        rows = await self._store.all(
            select(tokens.c.digest).where(tokens.c.revoked_s.is_(None), good)
        )
        return [str(row.digest) for row in rows]

    async def get(self, name: str) -> TokenRow:
        """The token with this name. Raises NotFoundError."""
        chosen = select(tokens).where(tokens.c.name == name)
        row = await self._store.first(chosen)
        if row is None:
            raise NotFoundError(f"token {name[:64]!r} does not exist; see: paramd token list")
        return _token(row)

    async def list(self) -> list[TokenRow]:
        """All tokens, including revoked ones, ordered by name."""
        rows = await self._store.all(select(tokens).order_by(tokens.c.name))
        return [_token(row) for row in rows]

    async def ended(self, *, since_s: float, now_s: float, limit: int) -> Sequence[TokenRow]:
        """Tokens revoked or expired after `since_s`, in order of ending; the last `limit` of them.
        Times are in seconds since the Unix epoch."""
        revoked = tokens.c.revoked_s > since_s
        expires_s = tokens.c.expires_s
        expired = and_(tokens.c.revoked_s.is_(None), expires_s > since_s, expires_s <= now_s)
        ended_s = func.coalesce(tokens.c.revoked_s, expires_s)
        chosen = select(tokens).where(or_(revoked, expired)).order_by(ended_s.desc()).limit(limit)
        rows = await self._store.all(chosen)
        return [_token(row) for row in reversed(rows)]

    async def revoke(self, name: str, *, now_s: float) -> TokenRow:
        """Revoke a token permanently. Idempotent: the first time is kept. Raises NotFoundError."""

        def work(connection: Connection) -> None:
            connection.execute(
                update(tokens)
                .where(tokens.c.name == name, tokens.c.revoked_s.is_(None))
                .values(revoked_s=now_s)
            )

        await self._store.write(work)
        return await self.get(name)


def _token(row: Row[Any]) -> TokenRow:
    return TokenRow(**row._mapping)
