"""The audit over SQLite and over PostgreSQL: recorded before the effect, or no effect at all."""

import asyncio
import json
import resource
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from paramd.chain import ChainCheck
from paramd_service.control.records.audit import Action, Audit, AuditUnavailableError, Denials
from paramd_service.control.store.engine import StoreAddress, parse_store
from paramd_service.control.store.store import Store
from paramd_service.control.store.tokens import TokenRow, TokenStore
from tests.integration.store_process import started

CREATE = Action(actor="ops", role="admin", method="token.create", job="run", incarnation=3)


@asynccontextmanager
async def alone(directory: Path) -> AsyncIterator[Audit]:
    """An audit over a SQLite store of its own."""
    async with started(parse_store("", directory=directory)) as store:
        yield Audit(store)


async def check(address: StoreAddress, job: str) -> ChainCheck:
    """What a reader with a connection of its own says of a chain."""
    async with started(address) as store:
        checking = ChainCheck(job)
        for link in await Audit(store).page(job, order="oldest", limit=1000):
            checking.take(link)
        return checking


async def bodies(audit: Audit, job: str = "run") -> list[dict[str, Any]]:
    """All records, oldest first."""
    return [json.loads(link.body) for link in reversed(await audit.page(job, limit=1000))]


async def some(audit: Audit, count: int) -> None:
    for _ in range(count):
        await audit.event(CREATE)


async def test_the_intent_is_durable_before_the_effect_and_the_outcome_follows(
    address: StoreAddress,
) -> None:
    async with started(address) as store:
        audit = Audit(store, clock=lambda: 1.5)
        async with audit.mutation(CREATE) as entry:
            # Another connection sees it: it is committed.
            assert (await check(address, "run")).count == 1
            entry.outcome("created", name="ci")
        intent, outcome = await bodies(audit)
        assert intent == {
            "kind": "intent", "time_ms": 1500, "actor": "ops", "role": "admin", "incarnation": 3,
            "method": "token.create", "step": -1, "detail": {}, "job": "run", "seq": 1,
            "prev": "0" * 64,
        }  # fmt: skip
        assert (outcome["kind"], outcome["of"], outcome["result"]) == ("outcome", 1, "created")
        assert outcome["detail"] == {"name": "ci"}


async def test_many_at_once_from_two_control_planes_are_one_chain_without_gaps(
    address: StoreAddress,
) -> None:
    async with started(address) as one, started(address) as two:
        here, there = Audit(one), Audit(two)
        await asyncio.gather(*(audit.event(CREATE) for audit in (here, there) for _ in range(40)))
        assert here.failure == there.failure == ""
    verdict = await check(address, "run")
    assert (verdict.count, verdict.bad_seq) == (80, None)


@contextmanager
def no_file_grows_beyond(size_bytes: int) -> Iterator[None]:
    """What a full disk does, for this process alone: writing further fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@asynccontextmanager
async def a_full_disk(store: Store) -> AsyncIterator[None]:
    with no_file_grows_beyond(1):
        yield


@asynccontextmanager
async def a_file_that_may_not_be_written(store: Store) -> AsyncIterator[None]:
    on_every_connection(store, "PRAGMA query_only=ON")
    try:
        yield
    finally:
        on_every_connection(store, "PRAGMA query_only=OFF")


@asynccontextmanager
async def another_that_never_lets_go(store: Store) -> AsyncIterator[None]:
    """Somebody opened the file by hand and left a transaction open."""
    on_every_connection(store, "PRAGMA busy_timeout=50")
    assert store.address.path is not None
    other = sqlite3.connect(store.address.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


def on_every_connection(store: Store, pragma: str) -> None:
    """Which connection of the pool the next write takes is not ours to know."""
    engine = store._engine
    assert engine is not None
    raws = [engine.raw_connection() for _ in range(5)]
    for raw in raws:
        raw.cursor().execute(pragma).close()
    for raw in raws:
        raw.close()


@pytest.mark.parametrize(
    "fault", [a_full_disk, a_file_that_may_not_be_written, another_that_never_lets_go]
)
async def test_when_the_audit_cannot_be_written_mutations_are_refused_and_reads_go_on(
    tmp_path: Path, fault: Callable[[Store], AbstractAsyncContextManager[None]]
) -> None:
    address = parse_store("", directory=tmp_path)
    async with started(address) as store:
        audit = Audit(store)
        await TokenStore(store).create(TokenRow(name="a", digest="0" * 64, role="x", created_s=1.0))
        await some(audit, 2)
        async with fault(store):
            for _ in range(3):
                with pytest.raises(AuditUnavailableError, match=r"^audit: it cannot be written"):
                    async with audit.mutation(CREATE):
                        pytest.fail("the body must not run")
            assert audit.failure
            assert [row.name for row in await TokenStore(store).list()] == ["a"]
            assert len(await audit.page("run", limit=9)) == 2
        async with audit.mutation(CREATE):
            pass
        assert audit.failure == ""
        kinds = [body["kind"] for body in await bodies(audit)]
        assert kinds == ["event", "event", "intent", "outcome"]
    assert (await check(address, "run")).good


async def test_an_outcome_that_cannot_be_recorded_does_not_undo_the_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with alone(tmp_path) as audit:
        with no_file_grows_beyond(1 << 40):
            async with audit.mutation(CREATE):
                resource.setrlimit(
                    resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
                )
        assert [body["kind"] for body in await bodies(audit)] == ["intent"]
    assert "the outcome of record 1 (token.create) is not in the audit: 'done'" in caplog.text


async def test_refusals_are_recorded_up_to_a_rate_and_the_rest_counted(tmp_path: Path) -> None:
    now = [0.0]
    async with alone(tmp_path) as audit:
        denials = Denials(audit, "run", burst=3, per_s=0.1, clock=lambda: now[0])

        def refuse() -> None:
            denials.saw(actor="", role="", method="GET /" + "x" * 900, reason="wrong token")

        for _ in range(100):
            refuse()
        now[0] = 10.0
        refuse()
        refuse()
        await denials.close()
        found = [body["detail"] for body in await bodies(audit)]
    assert [detail.get("unrecorded_before") for detail in found] == [None, None, None, 97, 1]
    assert max(len(detail.get("method", "")) for detail in found) == 200
