"""Paging: a page token encodes where the next page begins, and of which list."""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections import OrderedDict
from typing import Annotated, Generic, TypeVar

from fastapi import Query

from paramd.errors import ConflictError, UsageError

KEPT = 32
"""Results kept for their next pages."""

KEPT_S = 120.0

INVALID = "page_token: invalid; omit it to start over"

Item = TypeVar("Item")

PageToken = Annotated[str, Query(max_length=512, description="From the previous page")]
IncarnationNumber = Annotated[
    int | None, Query(ge=1, le=2**53, description="Default: the job's last one")
]


class Pages(Generic[Item]):
    """Costly results, kept so that their pages are consistent. Event loop only."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[Item, float]] = OrderedDict()

    def keep(self, item: Item, *, of: str, name: str = "") -> str:
        """Keep a result for its next pages; return its name for `make_token`. Equal results under
        the same `name` are kept once for all callers. `of`: whose result it is, such as a job's:
        its next pages are for the same alone."""
        now_s = time.monotonic()
        for old in [old for old, (_, expires_s) in self._kept.items() if expires_s < now_s]:
            del self._kept[old]
        name = name or secrets.token_hex(8)
        self._kept[of, name] = item, now_s + KEPT_S
        self._kept.move_to_end((of, name))
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return name

    def get(self, name: str, *, of: str) -> Item:
        """The result kept under this name `of` the same.

        Raises:
            ConflictError: It no longer is.
        """
        item, expires_s = self._kept.get((of, name), (None, 0.0))
        if item is None or expires_s < time.monotonic():
            raise ConflictError("page_token: expired; omit it to start over")
        return item


def make_token(begin: int, name: str) -> str:
    """Token of the page that begins at item `begin` of the list `name`."""
    return base64.urlsafe_b64encode(f"{begin}:{name}".encode()).decode()


def read_token(token: str) -> tuple[int, str]:
    """(begin, name) of a token.

    Raises:
        UsageError: The token is not ours.
    """
    try:
        begin, colon, name = base64.urlsafe_b64decode(token.encode()).decode().partition(":")
        if not colon or not begin.isdecimal() or len(begin) > 18:
            raise ValueError
        return int(begin), name
    except (ValueError, binascii.Error):
        raise UsageError(INVALID) from None


def begin_of(token: str, name: str) -> int | None:
    """Where the page begins in the list `name`; None without a token.

    Raises:
        UsageError: The token is of another list, or not ours.
    """
    if not token:
        return None
    begin, found = read_token(token)
    if found != name:
        raise UsageError(INVALID)
    return begin
