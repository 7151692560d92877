"""How we talk to the two databases."""

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
"""Threads and connections that read."""

WRITES = "paramd_writes"
"""Execution option of a connection that will write."""


def make_engine(address: StoreAddress) -> Engine:
    """An engine; nothing is opened yet.

    Raises:
        UsageError: PostgreSQL is named and its driver is not installed.
    """
    if address.path is not None:
        return _sqlite(address)
    try:
        return create_engine(
            address.url,
            hide_parameters=True,
            pool_size=READERS + 1,
            max_overflow=0,
            # A server that was restarted must not cost a failed write.
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
    """Makes the SQLite file, for its owner alone. Its companions (-wal, -shm) get its mode."""
    if address.path is not None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(address.path, flags, 0o600))


def _sqlite(address: StoreAddress) -> Engine:
    engine = create_engine(address.url, hide_parameters=True, pool_size=READERS + 1, max_overflow=0)

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        # Transactions begin where we say so, below, and not where the driver thinks.
        connection.isolation_level = None
        for pragma in (f"busy_timeout={BUSY_TIMEOUT_MS}", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A reader that turns into a writer may be refused; a writer says so from the start.
        writes = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
