"""ASGI middleware in front of the API: request ids, request checks, dashboard and manual.

From the outside: `RequestIdMiddleware`, `Guard`, `Page`, the token gate, `Gone`. Any web page open
on the same machine can reach a loopback server, so `Guard` refuses foreign requests. Host shows DNS
rebinding, Origin and Sec-Fetch-Site show cross-site requests, the content type shows forms.

`Page` serves the built dashboard and manual without a token: the files hold no secret, and their
data comes from the API under the user's session. Request paths never become file paths.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramd import gone
from paramd.errors import METADATA_KEY, request_id
from paramd_service.control.base.problems import problem
from paramd_service.control.http_server import SECURITY_HEADERS

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>paramd</title>
{}
</html>
"""

UNBUILT = _PAGE.format("""<h1>paramd control plane</h1>
<p>The control plane is running, but its dashboard has not been built: this is a source install
without npm. Releases on the package index include it. In a checkout, with Node 20.19 or newer:
<pre>make web</pre>
<p>Then restart the control plane. Until then <code>paramd status -w</code> shows the ranks in a
terminal, and the API is at <code>/api/v1</code>, described by <code>/api/v1/openapi.json</code>.\
""").encode()

UNBUILT_MANUAL = _PAGE.format("""<h1>The manual of paramd</h1>
<p>It has not been built: this is a source install. Releases on the package index include it. In a
checkout:
<pre>make manual</pre>
<p>Then restart the control plane. The same pages are in the folder <code>docs</code>.\
""").encode()

BUILT = Path(__file__).parents[1] / "web"
"""Output of `make web` and of a wheel build."""

MANUAL = Path(__file__).parents[1] / "manual"
"""Output of `make manual`."""

MANUAL_PATH = "/docs"

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types default"
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_FOREVER = "public, max-age=31536000, immutable"  # for names that contain a content hash
_ALWAYS_ASK = "no-cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """One file of the dashboard or manual."""

    media_type: str
    cache_control: str
    etag: str
    path: Path | None
    """None: serve `text` instead."""
    text: bytes = b""
    is_packed: bool = False
    """A gzipped copy exists next to it."""


def page_files(built: Path = BUILT) -> dict[str, PageFile]:
    """The dashboard's files by URL path; if it was not built, one page that says how. Reads every
    file once for its ETag; contents are read again when served."""
    return _files(built, "", UNBUILT)


def _files(built: Path, below: str, otherwise: bytes) -> dict[str, PageFile]:
    found: dict[str, PageFile] = {}
    if (built / "index.html").is_file():
        for path in sorted(built.rglob("*")):
            if path.is_file() and path.suffix in _TYPES:
                found[f"{below}/{path.relative_to(built).as_posix()}"] = _file(path)
        # The manual's own pages link to its index by name, the dashboard's do not.
        found[f"{below}/"] = found[f"{below}/index.html"]
        if not below:
            del found["/index.html"]
        return found
    found[f"{below}/"] = PageFile(
        media_type=_TYPES[".html"],
        cache_control="no-store",
        etag=_etag(otherwise),
        path=None,
        text=otherwise,
    )
    return found


class Page:
    """ASGI middleware: serves the paths of dashboard and manual, passes on all others."""

    def __init__(self, app: ASGIApp, *, files: Mapping[str, PageFile] | None = None) -> None:
        self._app = app
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = None
        is_get = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if is_get and not scope["path"].startswith("/api/"):
            if self._files is None:  # 4 MB: read for browsers, not for programs
                self._files = page_files() | _files(MANUAL, MANUAL_PATH, UNBUILT_MANUAL)
            file = self._files.get(scope["path"])
            if file is None and scope["path"] == MANUAL_PATH:
                # Links of the pages are relative.
                moved = Response(status_code=308, headers={"location": f"{MANUAL_PATH}/"})
                await moved(scope, receive, send)
                return
        app = self._app if file is None else _answer(file, scope)
        await app(scope, receive, send)


class Gone:
    """ASGI middleware: a removed operation answers with its replacement. Runs ahead of the routes,
    whose parameters could match such a path, and behind the token gate: strangers learn nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, row = self._app, gone.operation(scope["method"], scope["path"])
        if row is not None:
            app = problem(410, "gone", f"{row.name} is gone: {row.instead}", instead=row.instead)
        await app(scope, receive, send)


def _answer(file: PageFile, scope: Scope) -> Response:
    headers = {
        "content-security-policy": CSP,
        "cache-control": file.cache_control,
        "etag": file.etag,
        "vary": "accept-encoding",
    }
    if file.etag in _header(scope, b"if-none-match"):
        return Response(status_code=304, headers=headers)
    content = file.text
    if file.path is not None:
        path = file.path
        if file.is_packed and "gzip" in _header(scope, b"accept-encoding"):
            path = _packed(path)
            headers["content-encoding"] = "gzip"
        content = path.read_bytes()
    if scope["method"] == "HEAD":
        headers["content-length"] = str(len(content))
        content = b""
    return Response(content, headers=headers, media_type=file.media_type)


def _file(path: Path) -> PageFile:
    return PageFile(
        media_type=_TYPES[path.suffix],
        cache_control=_FOREVER if path.parent.name == "assets" else _ALWAYS_ASK,
        etag=_etag(path.read_bytes()),
        path=path,
        is_packed=_packed(path).is_file(),
    )


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}.gz")


def _etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _header(scope: Scope, name: bytes) -> str:
    return ", ".join(value.decode("latin-1") for key, value in scope["headers"] if key == name)


SEND_TIMEOUT_S = 20.0
"""A client that reads nothing for this long is disconnected."""

REQUEST_ID = METADATA_KEY.encode()

_RIGHT = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")


class RequestIdMiddleware:
    """Give each request an id, or keep the caller's, and return it in the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own_id = _id_of(scope)
        token = request_id.set(own_id.decode())

        async def send_in_time(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, own_id)]
            # A stalled reader must not occupy a viewer slot or pin its response's data.
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        try:
            await self._app(scope, receive, send_in_time)
        except TimeoutError:
            return  # the response is incomplete, so uvicorn closes the connection
        finally:
            request_id.reset(token)


def _id_of(scope: Scope) -> bytes:
    offered = [value for name, value in scope["headers"] if name == REQUEST_ID]
    if len(offered) == 1 and _RIGHT.match(offered[0]):
        found: bytes = offered[0]
        return found
    return secrets.token_hex(8).encode()


LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Accepted with any port: a forwarded port differs from ours."""

MAX_QUERY_BYTES = 8192
MAX_BODY_BYTES = 1 << 20
_SECRET_NAMES = frozenset({"token", "access_token", "ticket", "authorization", "api_key", "bearer"})

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
        """`names` returns further host names of this server: those in its certificate."""
        self._app = app
        self._names = LOOPBACK_NAMES | {_bracketed(listen_host)}
        self._more_names = names
        self._is_token = is_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # the app has neither lifespan nor websockets
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
            if log.isEnabledFor(level):
                # No query; %r keeps control characters out of the log.
                path = "(hidden)" if self._is_token(scope["path"]) else scope["path"][:200]
                log.log(level, "%s %r %d %.1f ms", scope["method"], path, status, took_ms)


def refused(
    scope: Scope, names: frozenset[str], is_token: Callable[[str], bool]
) -> tuple[int, str] | None:
    """(HTTP status, reason) when the request must not reach the app, else None."""
    hosts = _values(scope, b"host")
    if len(hosts) != 1 or not _is_ours(_without_port(hosts[0]), names):
        return 400, "the Host header does not name this server"
    origins = _values(scope, b"origin")
    if (origins and origins != [f"{scope['scheme']}://{hosts[0]}"]) or _crosses_sites(scope):
        return 403, "the request comes from a page of another site"
    return _refused_url(scope, is_token) or _refused_body(scope)


def _refused_url(scope: Scope, is_token: Callable[[str], bool]) -> tuple[int, str] | None:
    query = scope["query_string"]
    if len(query) > MAX_QUERY_BYTES:
        return 400, f"the query is longer than {MAX_QUERY_BYTES} bytes"
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True) if query else []
    named = any(name.lower() in _SECRET_NAMES for name, _ in pairs)
    parts = [*(text for pair in pairs for text in pair), *scope["path"].split("/")]
    if query:
        parts.append(unquote(query.decode("latin-1")))
    if named or any(map(is_token, parts)):
        return 400, (
            "credentials must not be in a URL, which ends up in logs; send "
            "'Authorization: Bearer <token>' instead, and replace this token"
        )
    return None


def _refused_body(scope: Scope) -> tuple[int, str] | None:
    """Other sites can send forms and text; JSON needs a CORS preflight, which we refuse."""
    if _values(scope, b"transfer-encoding"):
        return 411, "the body's length is unknown; send Content-Length"
    lengths = [int(value) for value in _values(scope, b"content-length") if value.isdecimal()]
    size_bytes = max(lengths, default=0)
    if size_bytes > MAX_BODY_BYTES:
        return 413, f"the body is longer than {MAX_BODY_BYTES} bytes"
    kinds = [value.partition(";")[0].strip() for value in _values(scope, b"content-type")]
    if (size_bytes or (kinds and scope["method"] != "GET")) and kinds != ["application/json"]:
        return 415, "the body must be JSON; send 'Content-Type: application/json'"
    return None


def _crosses_sites(scope: Scope) -> bool:
    """Whether the browser reports a cross-site request that is not a plain link to us."""
    if not {"cross-site", "same-site"} & set(_values(scope, b"sec-fetch-site")):
        return False
    is_link = scope["method"] == "GET" and _values(scope, b"sec-fetch-mode") == ["navigate"]
    return not is_link


def _ours(scope: Scope) -> list[tuple[bytes, bytes]]:
    headers = list(SECURITY_HEADERS)
    hosts = _values(scope, b"host")
    # Not on loopback names: browsers would then require TLS of every local server.
    if scope["scheme"] == "https" and hosts and _without_port(hosts[0]) not in LOOPBACK_NAMES:
        headers.append(_HSTS)
    return headers


def _is_ours(host: str, names: frozenset[str]) -> bool:
    """`names` may contain a certificate's wildcard, which matches exactly one label."""
    return host in names or "*." + host.partition(".")[2] in names


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for key, value in scope["headers"] if key == name]


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host
