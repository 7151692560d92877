"""Revoked tokens: who is told, for how long, and what ends with them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paramd.errors import DeniedError, UnreachableError
from paramd.security.tickets import Claims, Role, Signer, Verifier
from paramd.v1 import control_pb2
from paramd_service import admission
from paramd_service.admission import Notice, RevokedTokens, TokenRevokedError
from paramd_service.control.access.join import TicketInterceptor
from paramd_service.control.access.revocations import Revocations
from paramd_service.control.store.tokens import TokenRow
from paramd_service.sidecar.revocations import Revocations as SidecarRevocations
from tests.orders import bound

NOW_S = 1_000_000.0
TTL_S = 600.0
DEADLINE_S = 60.0


class Clock:
    def __init__(self, now_s: float = NOW_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def claims(token: str | None, issued_s: float = NOW_S) -> Claims:
    return Claims(
        job="run", incarnation=1, role=Role.READER, expires_s=NOW_S + TTL_S, issued_s=issued_s,
        ticket_id="x", token_id=token,
    )  # fmt: skip


def row(name: str, *, expires_s: float | None = None, revoked_s: float | None = None) -> TokenRow:
    return TokenRow(
        name=name,
        digest=name * (64 // len(name)),
        role="reader",
        created_s=0.0,
        expires_s=expires_s,
        revoked_s=revoked_s,
    )


class Store:
    """What the store answers, and what it was asked."""

    def __init__(self, *rows: TokenRow) -> None:
        self.rows = list(rows)
        self.since_s: list[float] = []
        self.away = False

    async def ended(self, *, since_s: float, now_s: float, limit: int) -> list[TokenRow]:
        self.since_s.append(since_s)
        if self.away:
            raise UnreachableError("away")
        return [found for found in self.rows if since_s < found.ended_s <= now_s][-limit:]


def test_a_revoked_tokens_tickets_are_refused_for_as_long_as_they_can_be_valid() -> None:
    clock = Clock(0.0)
    tokens = RevokedTokens(clock=clock)
    assert tokens.learn({"a": 10.0})
    assert not tokens.learn({"a": 5.0}), "known already"
    with pytest.raises(TokenRevokedError, match="revoked or has expired; ask an admin"):
        tokens.check(claims("a"))
    tokens.check(claims("b"))
    tokens.check(claims(None))
    clock.now_s = 9.9
    assert tokens.refuses(claims("a"))
    clock.now_s = 10.0
    assert not tokens.refuses(claims("a"))
    assert tokens.since(0).token_ids == ()
    tokens.learn({})
    assert len(tokens) == 0, "what is over takes no memory"


def test_beyond_the_bound_every_earlier_ticket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_REVOKED", 3)
    tokens = RevokedTokens(clock=Clock(0.0), wall_clock=Clock())
    tokens.learn(dict.fromkeys("abcd", 10.0))
    assert len(tokens) == 3
    assert tokens.refuses(claims("a", NOW_S - 1)), "whose id was given up"
    assert tokens.refuses(claims("z", NOW_S - 1)), "who must ask for another ticket"
    assert not tokens.refuses(claims("z", NOW_S)), "and has it"
    assert tokens.refuses(claims("d", NOW_S))
    assert not tokens.refuses(claims(None, 0.0)), "the control plane's own"
    other = RevokedTokens(clock=Clock(0.0))
    other.learn({}, refused_before_s=tokens.since(0).refused_before_s)
    assert other.refuses(claims("a", NOW_S - 1))


async def listening(revocations: Revocations) -> tuple[Any, asyncio.Queue[Notice]]:
    told: asyncio.Queue[Notice] = asyncio.Queue()
    manager = revocations.telling(told.put)
    await manager.__aenter__()
    return manager, told


async def test_what_expires_or_is_revoked_elsewhere_is_seen_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paramd_service.control.access.revocations.LOOK_S", 0.005)
    clock, store = Clock(), Store(row("e", expires_s=NOW_S + 5))
    store.away = True
    revocations = Revocations(ticket_ttl_s=TTL_S, clock=clock)
    await revocations.start(store)
    manager, told = await listening(revocations)
    assert told.get_nowait().token_ids == ()
    store.away = False
    store.rows.append(row("r", revoked_s=NOW_S))
    assert (await asyncio.wait_for(told.get(), DEADLINE_S)).token_ids == ("r" * 16,)
    clock.now_s = NOW_S + 5
    assert (await asyncio.wait_for(told.get(), DEADLINE_S)).token_ids == ("e" * 16,)
    looks = len(store.since_s)
    while len(store.since_s) < looks + 3:
        await asyncio.sleep(0.005)
    assert told.empty(), "each is told once"
    await manager.__aexit__(None, None, None)
    await revocations.stop()


async def test_a_stream_is_written_to_by_one_at_a_time_and_hears_what_came_meanwhile() -> None:
    revocations = Revocations(ticket_ttl_s=TTL_S, clock=Clock())
    written: list[tuple[str, ...]] = []
    writing, free = 0, asyncio.Event()
    free.set()

    async def write(notice: Notice) -> None:
        nonlocal writing
        writing += 1
        assert writing == 1
        await free.wait()
        writing -= 1
        written.append(notice.token_ids)

    async with asyncio.timeout(DEADLINE_S), revocations.telling(write):
        free.clear()
        for name in "abc":
            revocations.revoked(row(name, revoked_s=NOW_S))
            await asyncio.sleep(0)
        free.set()
        while sum(map(len, written)) < 3:
            await asyncio.sleep(0)
    assert written == [(), ("a" * 16,), ("b" * 16, "c" * 16)]


async def test_a_call_whose_token_was_revoked_before_its_request_came_does_nothing() -> None:
    revocations = SidecarRevocations()
    revocations.update(control_pb2.Revocations(token_ids=["a"], keep_ms=60_000))
    with pytest.raises(TokenRevokedError):
        async with revocations.running(claims("a")):
            pytest.fail("the call was let in")
    async with revocations.running(claims("b")):
        pass


async def never() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


def test_grpc_looks_whether_a_tickets_token_was_revoked() -> None:
    signer = Signer(bytes(range(32)))
    asked: list[str | None] = []

    def check(claims: Claims) -> None:
        asked.append(claims.token_id)
        if claims.token_id == "gone":
            raise DeniedError("revoked")

    gate = TicketInterceptor(lambda job, incarnation: Verifier(signer.public_key), check, print)
    method = "/paramd.v1.ControlService/ScheduleBoundary"
    for name in ("kept", "gone"):
        ticket = bound(signer, Role.READER, None, job="j", token_id=name)
        metadata = [("authorization", f"Bearer {ticket}")]
        if name == "kept":
            assert gate._check(method, metadata).token_id == "kept"
            continue
        with pytest.raises(DeniedError, match="revoked"):
            gate._check(method, metadata)
    assert asked == ["kept", "gone"]
