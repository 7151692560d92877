"""The store's database address. No text made here ever contains its password."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from paramd.errors import UsageError

FILE_NAME = "control.sqlite"
EXPECTED = "expected sqlite:////absolute/path or postgresql://user@host:5432/database"

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
    """The SQLite store at `path`."""
    return StoreAddress(URL.create("sqlite", database=str(path.absolute())), path.absolute())


def parse_store(text: str, *, directory: Path) -> StoreAddress:
    """The store that a setting names; when empty, `control.sqlite` in `directory`.

    Raises:
        UsageError: not a supported URL. The text never quotes it, as it may hold a password.
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
