"""Brings a store up to date, one process at a time."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from paramd.errors import ConflictError
from paramd_service.control.store.address import StoreAddress
from paramd_service.control.store.engine import WRITES, create_file
from paramd_service.control.store.schema import REVISION, metadata

LOCK_KEY = 0x70617261_6D640001
"""PostgreSQL's advisory lock of whoever migrates."""

MIGRATIONS = Path(__file__).with_name("migrations")


def migrate(engine: Engine, address: StoreAddress) -> str:
    """Makes or upgrades the tables; says from which revision ("" for a new store).

    All or nothing. Whoever comes second waits for the first and finds it done.

    Raises:
        ConflictError: a newer paramd has made or upgraded this store.
        SQLAlchemyError, OSError: it cannot be used.
    """
    with _alone(address):
        if address.path is not None:
            create_file(address)
            _use_wal(engine)
        with engine.execution_options(**{WRITES: True}).begin() as connection:
            if address.path is None:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
            found = _revision(connection)
            if found is None:
                _create(connection)
            elif found != REVISION:
                _upgrade(connection, found, address)
    return found if found is not None else ""


def _revision(connection: Connection) -> str | None:
    """The store's revision: None when it is new, empty before the first one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    rows = connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
    return str(rows[0]) if rows else ""


def _create(connection: Connection) -> None:
    """What all migrations together make; without Alembic, which takes a second to load."""
    metadata.create_all(connection, checkfirst=False)
    connection.execute(
        text(
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
            "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
        )
    )
    connection.execute(
        text("INSERT INTO alembic_version (version_num) VALUES (:new)"), {"new": REVISION}
    )


def _upgrade(connection: Connection, found: str, address: StoreAddress) -> None:
    # Loaded only when there is something to do: it takes longer than the rest of a start,
    # and tells the log what it loads.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    script = ScriptDirectory.from_config(config)
    known = {revision.revision for revision in script.walk_revisions()}
    if found and found not in known:
        raise ConflictError(
            f"the store {address} is of revision {found[:64]!r}, which this paramd does not know "
            f"(it knows up to {REVISION!r}); a newer one has used it: run that one, or name "
            "another store with PARAMD_STORE_URL"
        )

    def steps(revision: object, _context: object) -> list[object]:
        return list(script._upgrade_revs("head", revision))  # type: ignore[arg-type]

    with EnvironmentContext(config, script, fn=steps) as environment:
        environment.configure(connection=connection, transactional_ddl=True)
        environment.run_migrations()


def _use_wal(engine: Engine) -> None:
    """Readers go on while one writes; the file remembers it."""
    raw = engine.raw_connection()
    try:
        cursor = raw.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.close()
    finally:
        raw.close()


@contextmanager
def _alone(address: StoreAddress) -> Iterator[None]:
    """One process at a time for a SQLite file; PostgreSQL locks within the transaction."""
    if address.path is None:
        yield
        return
    address.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(f"{address.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
