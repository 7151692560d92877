"""Tokens: random, kept as digests, good until they expire or are revoked."""

from __future__ import annotations

import hashlib

import pytest

from paramd.errors import ConflictError, NotFoundError, UnreachableError, UsageError
from paramd.security.tickets import holds_token, new_token
from paramd_service.control.access.authority import (
    KEPT_S,
    MAX_TTL_S,
    OWNER,
    MemoryTokens,
    Principal,
    Tokens,
)
from paramd_service.control.access.roles import UserRole
from paramd_service.control.store.tokens import TokenRow

OWN = "the-owners-own-token"


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> MemoryTokens:
    return MemoryTokens()


@pytest.fixture
def tokens(store: MemoryTokens, clock: Clock) -> Tokens:
    return Tokens(OWN, store, clock=clock)


def test_tokens_have_32_random_bytes_and_are_known_where_they_stand() -> None:
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    for token in made:
        assert token.startswith("pmd_")
        assert len(token) == 4 + 43
        assert holds_token(f"x={token}&y")
    assert not holds_token("pmd_short")


async def test_only_the_digest_is_kept(tokens: Tokens, store: MemoryTokens) -> None:
    row, token = await tokens.create(OWNER, role="reader", ttl_s=10.0, name="n")
    assert row.digest == hashlib.sha256(token.encode()).hexdigest()
    assert token not in repr(await store.list())
    assert await tokens.principal(token) == Principal("n", UserRole.READER)


async def test_the_owner_is_an_admin_without_a_store() -> None:
    alone = Tokens(OWN)
    assert await alone.principal(OWN) == OWNER
    assert await alone.principal(new_token()) is None
    with pytest.raises(UnreachableError, match="no store"):
        await alone.create(OWNER, role="reader")


@pytest.mark.parametrize("offered", ["", "x", OWN + "x", OWN[:-1], "pmd_" + "A" * 43, "ü", "\ud800",
                                     "x" * 10_000])  # fmt: skip
async def test_any_other_text_is_nobodys(tokens: Tokens, offered: str) -> None:
    await tokens.create(OWNER, role="admin")
    assert await tokens.principal(offered) is None


async def test_a_token_expires_to_the_second(tokens: Tokens, clock: Clock) -> None:
    _, token = await tokens.create(OWNER, role="viewer", ttl_s=10.0)
    clock.now_s = 1009.9
    assert await tokens.principal(token) is not None
    clock.now_s = 1010.0
    assert await tokens.principal(token) is None


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
    tokens: Tokens, store: MemoryTokens, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Tokens("other", store, clock=clock)
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
     {"name": ""}, {"name": "a b"}, {"name": "owner"}, {"name": "x" * 65}],
)  # fmt: skip
async def test_what_cannot_be_is_not_made(
    tokens: Tokens, store: MemoryTokens, wrong: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        await tokens.create(OWNER, **({"role": "reader"} | wrong))  # type: ignore[arg-type]
    assert await store.list() == []


async def test_names_are_used_once(tokens: Tokens) -> None:
    await tokens.create(OWNER, role="reader", name="n")
    with pytest.raises(ConflictError, match="has been used"):
        await tokens.create(OWNER, role="reader", name="n")
