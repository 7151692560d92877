"""Tokens: random, kept as digests, good until they expire or are revoked."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from paramd.errors import ConflictError, NotFoundError, UnreachableError, UsageError
from paramd.security.tickets import MAX_TOKEN_CHARS, holds_token, new_token
from paramd_service.control.access.authority import (
    KEPT_S,
    MAX_NAME_CHARS,
    MAX_TTL_S,
    OWNER,
    Principal,
    Tokens,
)
from paramd_service.control.access.roles import Action, UserRole
from paramd_service.control.store.tokens import TokenRow
from tests.memory_stores import MemoryTokens

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
     {"ttl_s": -1.0}, {"ttl_s": float("inf")}, {"name": ""}, {"name": "a b"}, {"name": "owner"},
     {"name": "x" * 65}, {"name": ".x"}, {"name": "x\n"}, {"name": "pmd_" + "A" * 43}],
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


async def test_a_token_is_what_was_asked_for(tokens: Tokens, clock: Clock) -> None:
    for ttl_s in (0.5, MAX_TTL_S):
        row, token = await tokens.create(OWNER, role="editor", ttl_s=ttl_s)
        assert re.fullmatch(r"editor-[0-9a-f]{8}", row.name)
        assert (row.role, row.revoked_s) == ("editor", None)
        assert (row.created_s, row.expires_s) == (clock.now_s, clock.now_s + ttl_s)
        # Tickets name the token by its id, and end with it.
        for found in (
            await tokens.principal(token),
            await tokens.principal_of_digest(tokens.digest(token)),
        ):
            assert found == Principal(row.name, UserRole.EDITOR)
            assert (found.token_id, found.expires_s) == (row.digest[:16], row.expires_s)
    for name in ("x" * MAX_NAME_CHARS, "A.b_c@d-9"):
        assert (await tokens.create(OWNER, role="viewer", name=name))[0].name == name


@pytest.mark.parametrize(
    ("role", "permitted"),
    [
        (UserRole.VIEWER, {Action.VIEW}),
        (UserRole.READER, {Action.VIEW, Action.READ}),
        (UserRole.EDITOR, {Action.VIEW, Action.READ, Action.EDIT, Action.LOGS}),
        (UserRole.EXPORTER, {Action.VIEW, Action.READ, Action.EXPORT}),
        (UserRole.TRAINER, {Action.VIEW, Action.ATTACH}),
        (UserRole.ADMIN, set(Action)),
    ],
)
def test_a_caller_may_do_what_its_role_permits(role: UserRole, permitted: set[Action]) -> None:
    caller = Principal("n", role)
    assert {action for action in Action if caller.may(action)} == permitted


def test_tokens_are_known_as_secrets(tokens: Tokens) -> None:
    assert tokens.is_secret(OWN)
    assert tokens.is_secret(f"/x?y={new_token()}")
    assert not tokens.is_secret("")
    assert not tokens.is_secret("/api/v1/jobs")


@pytest.mark.parametrize(
    ("length", "known"), [(MAX_TOKEN_CHARS, OWNER), (MAX_TOKEN_CHARS + 1, None)]
)
async def test_too_long_a_token_is_not_even_looked_at(length: int, known: Principal | None) -> None:
    assert await Tokens("x" * length).principal("x" * length) == known


async def test_a_revoked_token_keeps_all_but_its_validity(
    store: MemoryTokens, clock: Clock
) -> None:
    told: list[TokenRow] = []
    tokens = Tokens(OWN, store, on_revoked=told.append, clock=clock)
    row, _ = await tokens.create(OWNER, role="admin", name="n")
    clock.now_s = 1001.0
    revoked = await tokens.revoke(OWNER, "n")
    assert revoked == replace(row, revoked_s=1001.0)
    clock.now_s = 1002.0
    assert await tokens.revoke(OWNER, "n") == revoked, "again changes nothing"
    assert await tokens.list() == [revoked]
    assert told == [revoked, revoked]


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


async def test_the_audit_has_who_did_what_before_it_is_done(
    store: MemoryTokens, clock: Clock
) -> None:
    audit, admin = Audit(store), Principal("a", UserRole.ADMIN)
    tokens = Tokens(OWN, store, recorded=audit, clock=clock)
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


async def test_the_audit_has_no_more_of_a_name_than_a_name_can_have(store: MemoryTokens) -> None:
    audit = Audit(store)
    with pytest.raises(NotFoundError, match=f"token '{'x' * MAX_NAME_CHARS}' does not exist"):
        await Tokens(OWN, store, recorded=audit).revoke(OWNER, "x" * 1000)
    assert audit.records == [(OWNER, "token.revoke", {"name": "x" * MAX_NAME_CHARS})]


async def test_a_store_that_is_away_for_a_moment_is_not_noticed(
    tokens: Tokens, store: MemoryTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(digest: str) -> TokenRow | None:
        raise UnreachableError("away")

    made = [await tokens.create(OWNER, role="reader", name=name) for name in "ab"]
    now_s = [100.0]
    monkeypatch.setattr("paramd_service.control.access.authority.time.monotonic", lambda: now_s[0])
    for row, token in made:
        assert await tokens.principal(token) == Principal(row.name, UserRole.READER)
    monkeypatch.setattr(store, "find", away)
    now_s[0] += KEPT_S - 0.1
    for row, token in made:
        assert await tokens.principal(token) == Principal(row.name, UserRole.READER)
    now_s[0] += 0.1
    with pytest.raises(UnreachableError):
        await tokens.principal(made[0][1])
