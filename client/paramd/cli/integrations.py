"""`paramd track`, `follow`, `mcp`: a job in experiment trackers, inference engines and agents."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing, closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from paramd.accepting import AT_ONCE, Listener
from paramd.cli.exports import NameMapFile, read_name_map
from paramd.cli.mcp_tokens import doors_of
from paramd.cli.options import (
    Adapter,
    Dtype,
    Every,
    Followed,
    Merge,
    Target,
    with_output,
    with_target,
)
from paramd.cli.output import Format, seconds, size
from paramd.cli.parts import LOOK, RUN, CommandPart, Commands
from paramd.cli.shell import say
from paramd.errors import UsageError

if TYPE_CHECKING:
    from paramd.integrations.engines import Update

TOKEN_VARIABLE = "PARAMD_ENGINE_TOKEN"

Scope = MutableMapping[str, Any]
App = Callable[..., Awaitable[None]]


@with_target
def track(
    target: Target,
    to: Annotated[
        str,
        Option("--to", metavar="TRACKER", help="tensorboard, wandb, mlflow, trackio, prometheus."),
    ],
    glob: Followed = None,
    also: Annotated[
        list[str] | None,
        Option("--also", help="Log histograms, gradients or updates, too; repeatable."),
    ] = None,
    every: Every = 10.0,
    looks: Annotated[
        int, Option("-n", "--samples", min=0, help="Stop after N samples; 0: when the job ends.")
    ] = 0,
    project: Annotated[str, Option("--project", help="Project name in the tracker.")] = "paramd",
    directory: Annotated[
        Path, Option("--dir", help="Where TensorBoard's and Prometheus' files are written.")
    ] = Path("runs"),
) -> None:
    """Log statistics of parameters to an experiment tracker, with alerts and edits as notes.

    The sidecars compute the statistics; training is not involved. If more than
    200 tensors match, only their total is logged. Settings of the tracker
    itself apply, such as WANDB_MODE or MLFLOW_TRACKING_URI; for Prometheus a
    file is written that node_exporter's textfile collector reads. Needs an
    extra: pip install 'paramd\\[trackers]'.
    """

    async def run() -> None:
        from paramd.integrations.trackers import Following, open_tracker

        opened = partial(open_tracker, to, project=project, directory=directory)
        async with target.async_connect() as mesh:
            following = Following(mesh, opened, glob or ["*"], also or [])
            task, ended = asyncio.current_task(), ""
            assert task is not None
            # A training that detaches ends what it has started (trainer/helpers/control_link.py).
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            try:
                with suppress(asyncio.CancelledError):
                    ended = await following.run(every, looks=looks)
            finally:
                following.close()
        if ended:
            say(f"nothing more is logged: {ended}")

    asyncio.run(run())


@with_output
def follow(
    target: Target,
    engine: Annotated[str, Argument(metavar="URL", help="The engine, e.g. http://127.0.0.1:8000.")],
    to: Annotated[str, Option("--to", metavar="ENGINE", help="vllm or sglang.")],
    directory: Annotated[
        Path, Option("--dir", help="Directory that the engine reads under the same path.")
    ],
    glob: Followed = None,
    every: Annotated[int, Option("--every-steps", min=1, help="Publish every N updates.")] = 1,
    updates: Annotated[
        int, Option("-n", "--updates", min=0, help="Stop after N versions; 0: when the job ends.")
    ] = 0,
    pause: Annotated[
        str,
        Option(
            "--pause",
            metavar="wait|abort|keep",
            help="Running requests finish first, are aborted, or continue with the new weights.",
        ),
    ] = "wait",
    dtype: Dtype = None,
    deltas: Annotated[
        bool, Option("--deltas", help="Transfer only the elements that changed.")
    ] = False,
    name_map: NameMapFile = None,
    merge: Merge = False,
    adapter: Adapter = None,
) -> None:
    """Keep an inference engine at the weights of a running training.

    Each frame of parameters, all of one step, is written to a safetensors file
    in --dir, and the engine loads it. Its version is
    JOB-RUN-STEP. If the engine rejects the weights or crashes, the last
    good version is restored, and the newest is tried again. PARAMD_ENGINE_TOKEN is
    the engine's key, if it has one. vLLM has the routes with
    VLLM_SERVER_DEV_MODE=1.
    """
    from paramd.integrations.engines import EngineFollower, open_engine
    from paramd.layout.exports.settings import NameMap

    token = os.environ.get(TOKEN_VARIABLE, "")
    names = NameMap.of(read_name_map(name_map)) if name_map is not None else NameMap()
    follower = EngineFollower(
        engine=open_engine(to, engine, token=token, pause=pause), directory=directory, names=names
    )
    as_json = target.format in (Format.JSON, Format.JSONL)

    async def run() -> None:
        good = 0
        async with target.async_connect() as mesh:
            frames = mesh.follow(
                *(glob or ["*"]),
                every=every,
                dtype=dtype,
                deltas=deltas,
                merge=merge,
                adapter=adapter,
            )
            try:
                async with aclosing(follower.updates(frames)) as found:
                    async for update in found:
                        if as_json:
                            print(json.dumps(asdict(update)), flush=True)
                        else:
                            say(_line(update))
                        good += update.ok
                        if good == updates > 0:
                            break
            finally:
                await follower.engine.close()

    asyncio.run(run())


def _line(update: Update) -> str:
    came = f"{size(update.sent_bytes)} came from the training"
    if update.changed_bytes is not None:
        came += f", {size(update.changed_bytes)} changed"
    if update.ok:
        return f"step {update.step}: in force after {seconds(update.took_s)}; {came}"
    return (
        f"step {update.step}: not in force: {update.reason}. The engine has "
        f"{update.in_force or 'no version known; it generates once a load succeeds'}"
    )


@with_target
def mcp(
    target: Target,
    changes: Annotated[
        bool, Option("--changes", help="Offer edits, pauses and exports, too, if the role may.")
    ] = False,
    http_port: Annotated[
        int | None,
        Option(
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
    returns a code, and a second call with that code makes it. The
    token's role limits every call. Over HTTP a client sends a bearer token:
    yours, or, if that is an admin's, one that the server makes for itself,
    of role reader (with --changes editor) for this job, in a file that it
    names. Needs an extra: pip install 'paramd\\[mcp]'.
    """
    asyncio.run(_serve(target, changes=changes, port=http_port))


async def _serve(target: Target, *, changes: bool, port: int | None) -> None:
    from paramd.integrations.mcp_server import build

    async with target.async_connect() as mesh:
        if port is None:
            await build(mesh, changes=changes).run_stdio_async()
            return
        job = mesh.job
    doors = await asyncio.to_thread(doors_of, target, job, changes=changes)
    async with (
        target.holding(doors.looking, job).async_connect() as mesh,
        target.holding(doors.exporting, job).async_connect() as exporting,
    ):
        server = build(mesh, changes=changes, exporting=exporting)
        say(f"serving {job!r} at http://127.0.0.1:{port}/mcp; {doors.told}")
        import uvicorn

        app = guarded(server.streamable_http_app(host="127.0.0.1"), doors.password)
        waiting = _Waiting()
        with closing(_listening(port, waiting)) as listener:
            config = uvicorn.Config(
                app,
                log_level="warning",
                lifespan="on",
                http=waiting.protocol(),
                backlog=AT_ONCE,
            )

            class Server(uvicorn.Server):
                async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                    await super().startup(sockets=sockets)
                    listener.keep_backlog()

            await Server(config).serve(sockets=[listener])


HEAD_S = 10.0
"""Limit in seconds for a connection's first request, so that half-open ones are not kept."""

MAX_WAITING = 256
"""Most connections without a request; past them the oldest one goes."""


def _listening(port: int, waiting: _Waiting) -> Listener:
    listener = Listener(socket.AF_INET)
    listener.on_full = waiting.make_room
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.keep_backlog()
    except OSError as error:
        listener.close()
        raise UsageError(f"--http {port}: {error.strerror}; name another port") from error
    return listener


class _Waiting:
    """The connections that have sent no request yet. Event loop only.

    A quarter of all descriptors is for them, so that those who ask, and this program itself, always
    have some: without one left, not even an error could be told.
    """

    def __init__(self) -> None:
        self._open: dict[asyncio.BaseTransport, None] = {}
        self._most = min(MAX_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)

    def make_room(self) -> bool:
        """Close the oldest; return whether there was one."""
        if not self._open:
            return False
        oldest = next(iter(self._open))
        del self._open[oldest]
        assert isinstance(oldest, asyncio.Transport)
        oldest.abort()
        return True

    def protocol(self) -> Any:
        """Return a class of uvicorn's HTTP protocol that reports its connections to this object."""
        from uvicorn.protocols.http.h11_impl import H11Protocol

        waiting = self

        class Impatient(H11Protocol):
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                waiting._open[transport] = None
                self.loop.call_later(HEAD_S, self._late)
                if len(waiting._open) > waiting._most:
                    waiting.make_room()

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                if self.cycle is not None:
                    waiting._open.pop(self.transport, None)

            def connection_lost(self, exc: Exception | None) -> None:
                waiting._open.pop(self.transport, None)
                super().connection_lost(exc)

            def _late(self) -> None:
                if self.cycle is None:
                    self.transport.close()

        return Impatient


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
        headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"the token of this server is needed\n"})

    return call


class Integrations(CommandPart):
    """Trackers and inference engines."""

    name = "integrations"

    def add_to(self, commands: Commands) -> None:
        commands.add(LOOK, track, "--to tensorboard --dir runs", "--to wandb 'layers.*' --every 60")
        commands.add(
            LOOK,
            follow,
            "--to vllm http://127.0.0.1:8000 --dir /dev/shm/weights --every-steps 10",
            "--to sglang http://127.0.0.1:30000 --dir /dev/shm/weights --deltas",
        )


class Agents(CommandPart):
    """The way in for agents."""

    name = "agents"

    def add_to(self, commands: Commands) -> None:
        commands.add(RUN, mcp, "--job my-run", "--job my-run --changes --http 8765")
