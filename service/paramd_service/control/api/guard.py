"""What every HTTP request passes first: Host, Origin, query and body checks; headers; access log.

Browsers of the same machine reach a loopback server, so a foreign page must get nothing:
a rebound name shows in Host, a cross-site request in Origin and Sec-Fetch-Site, a form in
its content type.

ASGI middleware: every request has an id, and a client that does not read is let go.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable
from urllib.parse import parse_qsl, unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramd.errors import METADATA_KEY, request_id
from paramd_service.control.base.problems import problem

SEND_TIMEOUT_S = 20.0
"""How long a client may take no byte before its connection is ended."""

REQUEST_ID = METADATA_KEY.encode()

_RIGHT = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")


class RequestIdMiddleware:
    """Gives each request its own id, or keeps the caller's, and answers with it."""

    def __init__(self, app: ASGIApp, *, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._app = app
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        mine = _id_of(scope)
        token = request_id.set(mine.decode())

        async def send_in_time(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, mine)]
            # A slow reader must not hold a viewer's place, nor what its answer holds.
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        try:
            await self._app(scope, receive, send_in_time)
        except TimeoutError:
            return  # uvicorn closes the connection: the answer is not whole
        finally:
            request_id.reset(token)


def _id_of(scope: Scope) -> bytes:
    offered = [value for name, value in scope["headers"] if name == REQUEST_ID]
    if len(offered) == 1 and _RIGHT.match(offered[0]):
        found: bytes = offered[0]
        return found
    return secrets.token_hex(8).encode()


LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Any port goes with them: a forwarded one is not ours."""

MAX_QUERY_BYTES = 8192
MAX_BODY_BYTES = 1 << 20
_SECRET_NAMES = frozenset({"token", "access_token", "ticket", "authorization", "api_key", "bearer"})

SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)
"""On every answer, unless the route set one of them itself."""

_HSTS = (b"strict-transport-security", b"max-age=31536000")

log = logging.getLogger("paramd.control.access")


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        listen_host: str,
        is_token: Callable[[str], bool],
        names: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """`names` is asked for further names of this server: those of its certificate."""
        self._app = app
        self._names = LOOPBACK_NAMES | {_bracketed(listen_host)}
        self._more_names = names
        self._is_token = is_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # No lifespan, no websockets: what does not exist needs no guard.
            return
        began_s = time.monotonic()
        status = 0
        ours = _ours(scope)

        async def guarded_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ())]
                present = {name.lower() for name, _ in headers}
                message["headers"] = headers + [h for h in ours if h[0] not in present]
            await send(message)

        names = self._names | frozenset(map(_bracketed, self._more_names()))
        refusal = refused(scope, names, self._is_token)
        app = self._app if refusal is None else problem(refusal[0], "denied", refusal[1])
        try:
            await app(scope, receive, guarded_send)
        finally:
            level = logging.DEBUG if status < 400 else logging.INFO
            took_ms = (time.monotonic() - began_s) * 1000
            # The path without its query; %r keeps control characters out of the log.
            path = "(hidden)" if self._is_token(scope["path"]) else scope["path"][:200]
            log.log(level, "%s %r %d %.1f ms", scope["method"], path, status, took_ms)


def refused(
    scope: Scope, names: frozenset[str], is_token: Callable[[str], bool]
) -> tuple[int, str] | None:
    """HTTP status and reason when a request must not reach the app."""
    hosts = _values(scope, b"host")
    if len(hosts) != 1 or not _is_ours(_without_port(hosts[0]), names):
        return 400, "the Host header names another site than this server"
    origins = _values(scope, b"origin")
    if origins and origins != [f"{scope['scheme']}://{hosts[0]}"]:
        return 403, "the request comes from a page of another site"
    if _crosses_sites(scope):
        return 403, "the request comes from a page of another site"
    return _refused_url(scope, is_token) or _refused_body(scope)


def _refused_url(scope: Scope, is_token: Callable[[str], bool]) -> tuple[int, str] | None:
    query = scope["query_string"]
    if len(query) > MAX_QUERY_BYTES:
        return 400, f"the query is longer than {MAX_QUERY_BYTES} bytes"
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    named = any(name.lower() in _SECRET_NAMES for name, _ in pairs)
    parts = [*(text for pair in pairs for text in pair), *scope["path"].split("/")]
    if named or any(map(is_token, parts)) or is_token(unquote(query.decode("latin-1"))):
        return 400, (
            "credentials do not belong into a URL, where logs keep them; send "
            "'Authorization: Bearer <token>', and change this token"
        )
    return None


def _refused_body(scope: Scope) -> tuple[int, str] | None:
    """A page of another site can send forms and text, but JSON only when we allow it."""
    if _values(scope, b"transfer-encoding"):
        return 411, "the body has no length; send Content-Length"
    lengths = [int(value) for value in _values(scope, b"content-length") if value.isdecimal()]
    size_bytes = max(lengths, default=0)
    if size_bytes > MAX_BODY_BYTES:
        return 413, f"the body is longer than {MAX_BODY_BYTES} bytes"
    kinds = [value.partition(";")[0].strip() for value in _values(scope, b"content-type")]
    if (size_bytes or (kinds and scope["method"] != "GET")) and kinds != ["application/json"]:
        return 415, "the body must be JSON; send 'Content-Type: application/json'"
    return None


def _crosses_sites(scope: Scope) -> bool:
    """Whether a browser says that another site's page asks, other than by a link to us."""
    if not {"cross-site", "same-site"} & set(_values(scope, b"sec-fetch-site")):
        return False
    is_link = scope["method"] == "GET" and _values(scope, b"sec-fetch-mode") == ["navigate"]
    return not is_link


def _ours(scope: Scope) -> list[tuple[bytes, bytes]]:
    headers = list(SECURITY_HEADERS)
    hosts = _values(scope, b"host")
    # Not for loopback names: browsers would want TLS of every local server from then on.
    if scope["scheme"] == "https" and hosts and _without_port(hosts[0]) not in LOOPBACK_NAMES:
        headers.append(_HSTS)
    return headers


def _is_ours(host: str, names: frozenset[str]) -> bool:
    """`names` may hold a certificate's wildcard, which stands for one label."""
    return host in names or "*." + host.partition(".")[2] in names


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for key, value in scope["headers"] if key == name]


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host
