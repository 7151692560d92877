"""Bring a store's schema up to date, one process at a time."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from paramd.errors import ConflictError
from paramd_service.control.store.engine import WRITES, StoreAddress, create_file
from paramd_service.control.store.schema import REVISION, metadata

LOCK_KEY = 0x70617261_6D640001
"""PostgreSQL advisory lock held while migrating."""

MIGRATIONS = Path(__file__).with_name("migrations")


def migrate(engine: Engine, address: StoreAddress) -> str:
    """Create or upgrade the tables, all or nothing; return the previous revision ("" for a new
    store). Concurrent callers wait for the first, then find it done.

    Raises:
        ConflictError: The store was written by a newer paramd, or before 0.1.0.
        SQLAlchemyError, OSError: It cannot be used.
    """
    with _alone(address):
        if address.path is not None:
            create_file(address)
            _use_wal(engine)
        with engine.execution_options(**{WRITES: True}).begin() as connection:
            if address.path is None:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
            found = revision_of(connection)
            if found is None:
                _create(connection)
            elif found != REVISION:
                _upgrade(connection, found, address)
    return found if found is not None else ""


def check_current(connection: Connection, address: StoreAddress) -> None:
    """Raise ConflictError unless this version of paramd can read the store as it is."""
    revision = revision_of(connection)
    if revision != REVISION:
        raise ConflictError(
            f"the store {address} has revision {revision or 'none'!r}, this paramd reads "
            f"{REVISION!r}; a control plane of the job upgrades it when it next starts"
        )


def revision_of(connection: Connection) -> str | None:
    """The store's revision; None for a new store, empty before the first revision."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    rows = connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
    return str(rows[0]) if rows else ""


def _create(connection: Connection) -> None:
    """Create the current tables directly, without Alembic, which takes a second to load."""
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
    # Imported only when needed: it takes longer than the rest of startup, and logs what it loads.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    script = ScriptDirectory.from_config(config)
    known = {revision.revision for revision in script.walk_revisions()}
    if found not in known:
        wrote = "by a newer paramd" if found > REVISION else "before paramd 0.1.0"
        raise ConflictError(
            f"the store {address} has revision {found[:64]!r}, written {wrote} (this one supports "
            f"up to {REVISION!r}): run that version, or set PARAMD_STORE_URL to another store"
        )

    def steps(revision: object, _context: object) -> list[object]:
        return list(script._upgrade_revs("head", revision))  # type: ignore[arg-type]

    with EnvironmentContext(config, script, fn=steps) as environment:
        environment.configure(connection=connection, transactional_ddl=True)
        environment.run_migrations()


def _use_wal(engine: Engine) -> None:
    """Switch to WAL, so that readers do not block on the writer; the file remembers the mode."""
    # A raw connection: the journal mode cannot be changed inside a transaction.
    raw = engine.raw_connection()
    try:
        cursor = raw.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.close()
    finally:
        raw.close()


@contextmanager
def _alone(address: StoreAddress) -> Iterator[None]:
    """Exclude other processes from a SQLite file; PostgreSQL locks within the transaction."""
    if address.path is None:
        yield
        return
    address.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(f"{address.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        # Closing unlocks. The file stays: unlinked, a waiter would hold a lock on a dead inode.
        os.close(lock)
