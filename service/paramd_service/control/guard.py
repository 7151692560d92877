"""What every HTTP request passes first: Host, Origin and query checks; headers; access log.

Browsers of the same machine reach a loopback server, so a foreign page must get nothing:
a rebound name shows in Host, a cross-site request in Origin.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramd_service.control.problems import problem

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Any port goes with them: a forwarded one is not ours."""

MAX_QUERY_BYTES = 8192
_SECRET_NAMES = frozenset({"token", "access_token", "ticket", "authorization", "api_key", "bearer"})

SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)

log = logging.getLogger("paramd.control.access")


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, *, listen_host: str, is_token: Callable[[str], bool]) -> None:
        self._app = app
        name = f"[{listen_host}]" if ":" in listen_host else listen_host
        self._names = LOOPBACK_NAMES | {name}
        self._is_token = is_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # No lifespan, no websockets: what does not exist needs no guard.
            return
        began_s = time.monotonic()
        status = 0

        async def guarded_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        refusal = refused(scope, self._names, self._is_token)
        app = self._app if refusal is None else problem(refusal[0], "denied", refusal[1])
        try:
            await app(scope, receive, guarded_send)
        finally:
            level = logging.DEBUG if status < 400 else logging.INFO
            took_ms = (time.monotonic() - began_s) * 1000
            # The path without its query; %r keeps control characters out of the log.
            log.log(
                level, "%s %r %d %.1f ms", scope["method"], scope["path"][:200], status, took_ms
            )


def refused(
    scope: Scope, names: frozenset[str], is_token: Callable[[str], bool]
) -> tuple[int, str] | None:
    """HTTP status and reason when a request must not reach the app."""
    hosts = _values(scope, b"host")
    if len(hosts) != 1 or _without_port(hosts[0]) not in names:
        return 400, "the Host header names another site than this server"
    origins = _values(scope, b"origin")
    if origins and origins != [f"{scope['scheme']}://{hosts[0]}"]:
        return 403, "the request comes from a page of another site"
    query = scope["query_string"]
    if len(query) > MAX_QUERY_BYTES:
        return 400, f"the query is longer than {MAX_QUERY_BYTES} bytes"
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name.lower() in _SECRET_NAMES or is_token(value):
            return 400, (
                "credentials do not belong into a URL, where logs keep them; send "
                "'Authorization: Bearer <token>', and change this token"
            )
    return None


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for key, value in scope["headers"] if key == name]


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host
