"""`paramd mcp`: a job's parameters as tools for agents, over stdio or HTTP on loopback."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Annotated, Any

import typer

from paramd.cli.options import Target, with_target
from paramd.cli.shell import say

Scope = MutableMapping[str, Any]
App = Callable[..., Awaitable[None]]


@with_target
def mcp(
    target: Target,
    changes: Annotated[
        bool,
        typer.Option("--changes", help="Offer edits, holds and exports, too, if the role may."),
    ] = False,
    http_port: Annotated[
        int | None,
        typer.Option(
            "--http",
            metavar="PORT",
            min=1,
            max=65535,
            help="Serve streamable HTTP on 127.0.0.1 instead of stdio.",
        ),
    ] = None,
) -> None:
    """Serve the job to an agent, over the Model Context Protocol.

    Read-only by default. With --changes a first call describes the change and
    returns a code, and a second call with that code makes it. Whatever the
    token's role does not permit is refused. Over HTTP a client sends the job's
    token (PARAMD_TOKEN or the one in endpoint.json) as a bearer token. Needs
    an extra: pip install 'paramd\\[mcp]'.
    """
    asyncio.run(_serve(target, changes=changes, port=http_port))


async def _serve(target: Target, *, changes: bool, port: int | None) -> None:
    from paramd.integrations.mcp_server import build

    async with target.async_connect() as mesh:
        server = build(mesh, changes=changes)
        if port is None:
            await server.run_stdio_async()
            return
        say(f"serving {mesh.job!r} at http://127.0.0.1:{port}/mcp")
        await _serve_http(server, target, port)


async def _serve_http(server: Any, target: Target, port: int) -> None:
    import uvicorn

    from paramd.mesh.connect import resolve

    chosen = target.settings
    _, token, _ = resolve(chosen.url, chosen.token, chosen.job)
    app = guarded(server.streamable_http_app(host="127.0.0.1"), token)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", lifespan="on")
    await uvicorn.Server(config).serve()


def guarded(app: App, token: str) -> App:
    """The ASGI app, for requests with this bearer token alone."""
    wanted = f"Bearer {token}".encode()

    async def call(scope: Scope, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, wanted):
            await app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = [(b"www-authenticate", b"Bearer"), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"the job's token is needed\n"})

    return call
