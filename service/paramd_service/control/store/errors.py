"""What the database says, in our words."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError

from paramd.errors import UnreachableError
from paramd_service.control.store.address import StoreAddress

MAX_TOLD_CHARS = 300


class StoreError(UnreachableError):
    """The store cannot be used now: away, full, read-only or behind. Nothing was written."""


@contextmanager
def store_errors(address: StoreAddress) -> Iterator[None]:
    """Turns errors of the database and its files into `StoreError`."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        # The driver's own text: SQLAlchemy's holds the statement.
        told = getattr(error, "orig", None) or error
        text = " ".join(str(told).split())[:MAX_TOLD_CHARS]
        raise StoreError(f"the store {address} cannot be used: {text}") from error
