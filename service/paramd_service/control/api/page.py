"""The dashboard: static files that were built into the package, and nothing else.

They hold no secret, so they need no token; what they show, they ask of the API as whoever
signs in. No file is opened by a name that came from outside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

UNBUILT = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>paramd</title>
<h1>paramd control plane</h1>
<p>It runs, but its dashboard has not been built: this is a source install without npm.
Releases from the package index have it inside. In the checkout, with Node 20.19 or newer:
<pre>make web</pre>
<p>Then restart the control plane. Until then <code>paramd top</code> shows much the same in a
terminal, and the API is at <code>/api/v1</code>, described by <code>/api/v1/openapi.json</code>.
</html>
"""


BUILT = Path(__file__).parents[1] / "web"
"""Where `make web`, and the build of a wheel, leave the page."""

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
}
# The names of these hold a digest of what they contain.
_FOREVER = "public, max-age=31536000, immutable"
_ALWAYS_ASK = "no-cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """One file of the page."""

    media_type: str
    cache_control: str
    etag: str
    path: Path | None
    """None: `text` is the whole of it."""
    text: bytes = b""
    is_packed: bool = False
    """A gzipped copy lies beside it."""


def page_files(built: Path = BUILT) -> Mapping[str, PageFile]:
    """What the page consists of, by URL path. Not built: a page that says how to.

    Reads every file once, to name its content; they are opened again when they are served.
    """
    found: dict[str, PageFile] = {}
    if (built / "index.html").is_file():
        for path in sorted(built.rglob("*")):
            if path.is_file() and path.suffix in _TYPES:
                found[f"/{path.relative_to(built).as_posix()}"] = _file(path)
        found["/"] = found.pop("/index.html")
        return found
    found["/"] = PageFile(
        media_type=_TYPES[".html"],
        cache_control="no-store",
        etag=_etag(UNBUILT),
        path=None,
        text=UNBUILT,
    )
    return found


class Page:
    """ASGI middleware: answers for the page's own paths, and passes on all others."""

    def __init__(self, app: ASGIApp, *, files: Mapping[str, PageFile] | None = None) -> None:
        self._app = app
        self._files = files if files is not None else page_files()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = None
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            file = self._files.get(scope["path"])
        app = self._app if file is None else _answer(file, scope)
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
