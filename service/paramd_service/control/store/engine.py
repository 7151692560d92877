"""The store's database: its address, engine and errors. SQLite or PostgreSQL.

No text produced here contains the password.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from paramd import extras
from paramd.errors import UnreachableError, UsageError

FILE_NAME = "control.sqlite"
EXPECTED = "expected sqlite:////absolute/path or postgresql://user@host:5432/database"

MAX_TOLD_CHARS = 300
BUSY_TIMEOUT_MS = 5_000
CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_MS = 30_000
READERS = 4
"""Reader threads, each with a connection."""

WRITES = "paramd_writes"
"""Execution option that marks a connection as writing."""

_POSTGRES = ("postgresql", "postgres", "postgresql+psycopg")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A database; `str` omits the password."""

    url: URL = field(repr=False)
    path: Path | None
    """The file of a SQLite store; None for PostgreSQL."""

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        shown = URL.create(
            "postgresql",
            username=self.url.username,
            host=self.url.host,
            port=self.url.port,
            database=self.url.database,
        )
        return shown.render_as_string(hide_password=True)


def sqlite_address(path: Path) -> StoreAddress:
    return StoreAddress(URL.create("sqlite", database=str(path.absolute())), path.absolute())


def parse_store(text: str, *, directory: Path) -> StoreAddress:
    """The store that a setting names; when empty, `control.sqlite` in `directory`.

    Raises:
        UsageError: If it is not a supported URL. The text never quotes it, as it may hold a
            password.
    """
    if not text:
        return sqlite_address(directory / FILE_NAME)
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise UsageError(f"store: not a database URL; {EXPECTED}") from None
    if url.drivername in _POSTGRES:
        return StoreAddress(url.set(drivername="postgresql+psycopg"), None)
    if url.drivername == "sqlite" and url.database and Path(url.database).is_absolute():
        if url.query:
            raise UsageError(f"store: a SQLite URL takes no options; {EXPECTED}")
        return sqlite_address(Path(url.database))
    raise UsageError(f"store: {url.drivername!r} with this path is not supported; {EXPECTED}")


def holds_password(text: str) -> bool:
    """Whether a setting contains a password, which must not appear on a command line."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        return "password" in text
    return url.password is not None or "password" in url.query


class StoreError(UnreachableError):
    """The store is unavailable: down, full, read-only or behind. Nothing was written."""


@contextmanager
def store_errors(address: StoreAddress) -> Iterator[None]:
    """Convert errors of the database and its files to `StoreError`."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        # The driver's text: SQLAlchemy's includes the statement.
        told = getattr(error, "orig", None) or error
        text = " ".join(str(told).split())[:MAX_TOLD_CHARS]
        raise StoreError(f"the store {address} cannot be used: {text}") from error


def make_engine(address: StoreAddress) -> Engine:
    """Make an engine without connecting.

    Raises:
        UsageError: PostgreSQL's driver is missing.
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
            f"store: PostgreSQL needs {error.name}; {extras.install('postgres')}"
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
