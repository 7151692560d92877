"""Database errors as domain errors."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError

from paramd.errors import UnreachableError
from paramd_service.control.store.address import StoreAddress

MAX_TOLD_CHARS = 300


class StoreError(UnreachableError):
    """The store is unavailable: down, full, read-only or behind. Nothing was written."""


@contextmanager
def store_errors(address: StoreAddress) -> Iterator[None]:
    """Convert errors of the database and its files to `StoreError`."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        # The driver's own text: SQLAlchemy's includes the statement.
        told = getattr(error, "orig", None) or error
        text = " ".join(str(told).split())[:MAX_TOLD_CHARS]
        raise StoreError(f"the store {address} cannot be used: {text}") from error
