"""Pages of long answers: a token says where the next one begins, and of what."""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paramd.errors import ConflictError, UsageError

KEPT = 32
"""Answers kept for their next pages."""

KEPT_S = 120.0

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Kept(Generic[Item]):
    """An answer that cost something to find, kept so that its pages belong together."""

    items: Sequence[Item]
    expires_s: float


class Pages(Generic[Item]):
    """Cuts answers into pages. Used on the event loop only."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept[Item]] = OrderedDict()

    def keep(self, items: Sequence[Item]) -> str:
        """Keeps an answer for its next pages; returns its name for `token`."""
        name = secrets.token_hex(8)
        self._kept[name] = Kept(items, time.monotonic() + KEPT_S)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return name

    def get(self, name: str) -> Sequence[Item]:
        """Raises ConflictError when it is not kept any more."""
        kept = self._kept.get(name)
        if kept is None or kept.expires_s < time.monotonic():
            raise ConflictError("page_token: too old; leave it out to begin anew")
        return kept.items


def make_token(begin: int, name: str) -> str:
    """The token of a page that begins at item `begin` of what `name` names."""
    return base64.urlsafe_b64encode(f"{begin}:{name}".encode()).decode()


def read_token(token: str) -> tuple[int, str]:
    """(begin, name) of a token.

    Raises:
        UsageError: it is none of ours.
    """
    try:
        begin, colon, name = base64.urlsafe_b64decode(token.encode()).decode().partition(":")
        if not colon or not begin.isdecimal() or len(begin) > 18:
            raise ValueError
        return int(begin), name
    except (ValueError, binascii.Error):
        raise UsageError("page_token: not one of ours; leave it out to begin anew") from None
