"""Tokens: random, kept as digests, good until they expire or are revoked."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pydantic import ValidationError

from paramd.errors import NotFoundError, UnreachableError, UsageError
from paramd.security import loopback
from paramd.security.tickets import new_token
from paramd_service.control.access.authority import KEPT_S, MAX_TTL_S, OWNER, Principal, Tokens
from paramd_service.control.access.roles import UserRole
from paramd_service.control.api.routes.access import TokenRequest
from paramd_service.control.store.tokens import TokenRow
from tests.memory_stores import MemoryTokens

OWN = "the-owners-own-token"


@pytest.fixture
def store() -> MemoryTokens:
    return MemoryTokens()


@pytest.fixture
def tokens(store: MemoryTokens) -> Tokens:
    return Tokens(OWN, store)


async def test_only_the_digest_is_kept(tokens: Tokens, store: MemoryTokens) -> None:
    row, token = await tokens.create(OWNER, role="reader", ttl_s=10.0, name="n")
    assert row.digest == hashlib.sha256(token.encode()).hexdigest()
    assert token not in repr(await store.list())
    assert await tokens.principal(token) == Principal("n", UserRole.READER)


async def test_the_owner_is_an_admin_whom_no_store_knows(tokens: Tokens) -> None:
    assert await tokens.principal(OWN) == OWNER
    assert await tokens.principal(new_token()) is None


@pytest.mark.parametrize("offered", ["", "x", OWN + "x", OWN[:-1], "pmd_" + "A" * 43, "ü", "\ud800",
                                     "x" * 10_000])  # fmt: skip
async def test_any_other_text_is_nobodys(tokens: Tokens, offered: str) -> None:
    await tokens.create(OWNER, role="admin")
    assert await tokens.principal(offered) is None


async def test_a_revoked_token_is_worthless_at_once(tokens: Tokens, store: MemoryTokens) -> None:
    _, token = await tokens.create(OWNER, role="admin", name="n")
    assert await tokens.principal(token) is not None
    await tokens.revoke(OWNER, "n")
    assert await tokens.principal(token) is None
    with pytest.raises(NotFoundError):
        await tokens.revoke(OWNER, "other")


async def test_a_lookup_that_a_revocation_overtakes_is_not_remembered(
    tokens: Tokens, store: MemoryTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tokens.create(OWNER, role="admin", name="earlier")
    await tokens.revoke(OWNER, "earlier")
    _, token = await tokens.create(OWNER, role="admin", name="n")
    find = store.find

    async def slow(digest: str) -> TokenRow | None:
        row = await find(digest)
        await tokens.revoke(OWNER, "n")
        return row

    monkeypatch.setattr(store, "find", slow)
    await tokens.principal(token)
    monkeypatch.setattr(store, "find", find)
    assert await tokens.principal(token) is None


async def test_another_control_planes_revocation_is_seen_within_seconds(
    tokens: Tokens, store: MemoryTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Tokens("other", store)
    _, token = await tokens.create(OWNER, role="admin", name="n")
    now_s = [0.0]
    monkeypatch.setattr("paramd_service.control.access.authority.time.monotonic", lambda: now_s[0])
    assert await tokens.principal(token) is not None
    await elsewhere.revoke(OWNER, "n")
    now_s[0] = KEPT_S
    assert await tokens.principal(token) is None


async def test_a_role_of_a_newer_version_lets_nobody_in(
    tokens: Tokens, store: MemoryTokens
) -> None:
    token = new_token()
    digest = hashlib.sha256(token.encode()).hexdigest()
    await store.create(TokenRow(name="n", digest=digest, role="emperor", created_s=0.0))
    assert await tokens.principal(token) is None


@pytest.mark.parametrize(
    "wrong",
    [{"role": "root"}, {"ttl_s": 0.0}, {"ttl_s": float("nan")}, {"ttl_s": MAX_TTL_S + 1},
     {"ttl_s": -1.0}, {"ttl_s": float("inf")}, {"name": ""}, {"name": "a b"}, {"name": "owner"},
     {"name": "x" * 65}, {"name": ".x"}, {"name": "x\n"}, {"name": "pmd_" + "A" * 43},
     {"jobs": ""}, {"jobs": "a b"}, {"jobs": "a,,b"}, {"jobs": "a" * 257},
     {"jobs": "a-*", "role": "admin"}],
)  # fmt: skip
async def test_what_cannot_be_is_not_made(
    tokens: Tokens, store: MemoryTokens, wrong: dict[str, object]
) -> None:
    async def made() -> None:
        asked = TokenRequest.model_validate({"role": "reader"} | wrong)
        await tokens.create(
            OWNER, role=asked.role, ttl_s=asked.ttl_s, name=asked.name, jobs=asked.jobs
        )

    with pytest.raises((UsageError, ValidationError)):
        await made()
    assert await store.list() == []


class Audit:
    """Takes a record of each change before its effect, or refuses while it cannot be written."""

    def __init__(self, store: MemoryTokens) -> None:
        self.store = store
        self.records: list[tuple[Principal, str, dict[str, object]]] = []
        self.before: list[list[TokenRow]] = []
        self.away = False

    @asynccontextmanager
    async def __call__(
        self, who: Principal, operation: str, detail: dict[str, object]
    ) -> AsyncIterator[None]:
        if self.away:
            raise UnreachableError("no audit")
        self.records.append((who, operation, detail))
        self.before.append(await self.store.list())
        yield


async def test_the_audit_has_who_did_what_before_it_is_done(store: MemoryTokens) -> None:
    audit, admin = Audit(store), Principal("a", UserRole.ADMIN)
    tokens = Tokens(OWN, store, recorded=audit)
    row, token = await tokens.create(admin, role="reader", ttl_s=60.0, name="n")
    await tokens.revoke(admin, "n")
    assert audit.records == [
        (admin, "token.create", {"name": "n", "role": "reader", "ttl_s": 60.0}),
        (admin, "token.revoke", {"name": "n"}),
    ]
    assert audit.before == [[], [row]]
    assert token not in repr(audit.records)
    audit.away = True
    for change in (tokens.create(admin, role="reader", name="m"), tokens.revoke(admin, "n")):
        with pytest.raises(UnreachableError, match="no audit"):
            await change
    assert [found.name for found in await store.list()] == ["n"]


async def proven(tokens: Tokens, token: str) -> bool:
    digest = loopback.token_digest(token)
    found = await tokens.proof(digest[: loopback.ID_CHARS], "a" * 32, "127.0.0.1", 8470)
    return found == loopback.proof_of(digest, "a" * 32, "127.0.0.1", 8470)


async def test_ids_that_no_token_has_cost_one_look_at_the_store_together(
    tokens: Tokens, store: MemoryTokens
) -> None:
    """Anybody may ask for a proof, of any id."""
    _, token = await tokens.create(OWNER, role="admin")
    assert await proven(tokens, token)
    flood = [
        asyncio.ensure_future(tokens.proof(f"{number:0{loopback.ID_CHARS}x}", "a", "127.0.0.1", 1))
        for number in range(1000)
    ]
    await asyncio.sleep(0)
    # A known one waits for none of them, nor does one that was just made.
    assert await proven(tokens, token)
    _, fresh = await tokens.create(OWNER, role="reader")
    assert await proven(tokens, fresh)
    assert await proven(tokens, OWN)
    assert await asyncio.gather(*flood) == [None] * 1000
    assert store.looks <= 4


async def test_a_token_that_has_ended_is_not_proven(tokens: Tokens) -> None:
    _, token = await tokens.create(OWNER, role="admin", name="n")
    assert await proven(tokens, token)
    await tokens.revoke(OWNER, "n")
    assert not await proven(tokens, token)
