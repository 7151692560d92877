"""Stores for tests: the same cases over a SQLite file and over a real PostgreSQL server."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from sqlalchemy import text

from paramd_service.control.store.engine import StoreAddress, parse_store
from paramd_service.control.store.store import Store
from tests.postgres import Postgres, postgres


@contextmanager
def server_of(kind: str) -> Iterator[Postgres | None]:
    """What a kind of store needs for as long as a module's tests run."""
    if kind == "sqlite":
        yield None
    else:
        with postgres() as server:
            yield server


def fresh_address(server: Postgres | None, directory: Path) -> StoreAddress:
    """A store that does not exist yet."""
    if server is None:
        return parse_store("", directory=directory)
    return parse_store(server.new_database(f"t{uuid.uuid4().hex}"), directory=directory)


@asynccontextmanager
async def started(address: StoreAddress) -> AsyncIterator[Store]:
    """A store from start to stop."""
    store = Store(address)
    try:
        await store.start()
        yield store
    finally:
        await store.stop()


async def execute(store: Store, statement: str) -> None:
    await store.write(lambda connection: connection.execute(text(statement)))
