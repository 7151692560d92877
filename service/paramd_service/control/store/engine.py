"""SQLAlchemy engines for SQLite and PostgreSQL."""

from __future__ import annotations

import os
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event

from paramd.errors import UsageError
from paramd_service.control.store.address import StoreAddress

BUSY_TIMEOUT_MS = 5_000
CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_MS = 30_000
READERS = 4
"""Reader threads, each with a connection."""

WRITES = "paramd_writes"
"""Execution option that marks a connection as writing."""


def make_engine(address: StoreAddress) -> Engine:
    """Make an engine without connecting.

    Raises:
        UsageError: the address is PostgreSQL's and its driver is not installed.
    """
    if address.path is not None:
        return _sqlite(address)
    try:
        return create_engine(
            address.url,
            hide_parameters=True,
            pool_size=READERS + 1,
            max_overflow=0,
            # Ping first: a server restart must not fail the next write.
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": CONNECT_TIMEOUT_S,
                "options": f"-c statement_timeout={STATEMENT_TIMEOUT_MS} -c synchronous_commit=on",
            },
        )
    except ModuleNotFoundError as error:
        raise UsageError(
            f"store: PostgreSQL needs {error.name}; run: pip install 'paramd[postgres]'"
        ) from error


def create_file(address: StoreAddress) -> None:
    """Create the SQLite file with mode 0600; its companions (-wal, -shm) inherit the mode."""
    if address.path is not None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(address.path, flags, 0o600))


def _sqlite(address: StoreAddress) -> Engine:
    engine = create_engine(address.url, hide_parameters=True, pool_size=READERS + 1, max_overflow=0)

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        # Autocommit mode: transactions begin in `begin` below, not where the driver guesses.
        connection.isolation_level = None
        for pragma in (f"busy_timeout={BUSY_TIMEOUT_MS}", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # IMMEDIATE takes the write lock up front: upgrading a read transaction can fail as busy.
        writes = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
