"""Browser sessions: a cookie plus a key, both required, stand in for a token presented once.

The cookie is HttpOnly and SameSite=Strict, so no script can read it and no other site can use it.
But cookies ignore ports: the browser sends them to every server on the same host. So the page
also sends a key, kept in storage that only its own origin can read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

MAX_OF_TOKEN = 16
"""Sessions per token; past the cap, its least recently used one is dropped."""

MAX_SESSIONS = 256
"""Sessions in total; past the cap, the token with the most loses one."""

IDLE_S = 12 * 3600.0
"""Idle time after which a session expires."""

KEY_HEADER = "x-paramd-session"
_MAX_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The two halves of a new session."""

    cookie: str
    key: str


@dataclass(slots=True)
class _Session:
    key_digest: bytes
    token_digest: str
    used_s: float


class Sessions:
    """Open sessions, in memory only: after a restart users sign in again. Single event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: OrderedDict[bytes, _Session] = OrderedDict()

    def open(self, token_digest: str) -> Opened:
        """Open a session for the token with this digest, already checked to be valid."""
        opened = Opened(cookie=secrets.token_urlsafe(32), key=secrets.token_urlsafe(32))
        session = _Session(_digest(opened.key), token_digest, self._clock())
        self._open[_digest(opened.cookie)] = session
        counts = Counter(one.token_digest for one in self._open.values())
        if counts[token_digest] > MAX_OF_TOKEN:
            self._end_oldest(token_digest)
        elif len(self._open) > MAX_SESSIONS:
            self._end_oldest(counts.most_common(1)[0][0])
        return opened

    def token_digest(self, cookie: str, key: str) -> str:
        """Digest of the session's token; empty when there is no such session.

        Look the token up on each request: it may have been revoked.
        """
        if not cookie or not key:
            return ""
        name = _digest(cookie)
        session = self._open.get(name)
        if session is None or not hmac.compare_digest(session.key_digest, _digest(key)):
            return ""
        now_s = self._clock()
        if now_s - session.used_s >= IDLE_S:
            del self._open[name]
            return ""
        session.used_s = now_s
        self._open.move_to_end(name)
        return session.token_digest

    def _end_oldest(self, token_digest: str) -> None:
        of_token = (n for n, one in self._open.items() if one.token_digest == token_digest)
        del self._open[next(of_token)]

    def close(self, cookie: str) -> None:
        """End a session. Idempotent."""
        self._open.pop(_digest(cookie), None)


def cookie_name(host: str, *, is_tls: bool) -> str:
    """Name of an origin's cookie. It includes the port, which cookies ignore otherwise.

    Args:
        host: The request's Host header.
    """
    name, colon, port = host.rpartition(":")
    shown = port if colon and port.isdecimal() and not name.endswith(":") else "default"
    return f"{'__Host-' if is_tls else ''}paramd-{shown}"


def cookie_value(header: str, name: str) -> str:
    """The cookie's value in a Cookie header; empty when absent or malformed."""
    if len(header) > _MAX_CHARS:
        return ""
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
