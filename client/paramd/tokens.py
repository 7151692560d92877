"""Users' tokens as text: how they are made, and how one is known when it stands at a wrong place.

A token is `pmd_` and 32 random bytes, base64url. The prefix lets scanners of repositories and
our own logs find one that leaked.
"""

from __future__ import annotations

import re
import secrets

PREFIX = "pmd_"
RANDOM_BYTES = 32
MAX_TOKEN_CHARS = 512
"""Longer text is refused before anything is computed over it."""

_SHAPE = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]{43}")


def new_token() -> str:
    """A fresh token."""
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def holds_token(text: str) -> bool:
    """Whether a token stands anywhere in `text`, a valid one or not."""
    return _SHAPE.search(text) is not None
