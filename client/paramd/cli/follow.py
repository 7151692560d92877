"""`paramd follow`: an inference engine that has the weights of a running training."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paramd.cli.exports import NameMapFile, read_name_map
from paramd.cli.options import Format, Output, Target, with_target
from paramd.cli.output import seconds, size
from paramd.cli.shell import say
from paramd.cli.summon import load_torch

if TYPE_CHECKING:
    from paramd.integrations.engines import EngineFollower, Update

TOKEN_VARIABLE = "PARAMD_ENGINE_TOKEN"


@with_target
def follow(
    target: Target,
    engine: Annotated[
        str, typer.Argument(metavar="URL", help="The engine, e.g. http://127.0.0.1:8000.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="ENGINE", help="vllm or sglang.")],
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory that the engine reads under the same path.")
    ],
    glob: Annotated[
        list[str] | None, typer.Argument(metavar="[GLOB]", help="Parameters; all by default.")
    ] = None,
    every: Annotated[int, typer.Option("--every", min=1, help="Updates between two.")] = 1,
    updates: Annotated[
        int, typer.Option("-n", "--updates", min=0, help="Exit after N; 0: with the job.")
    ] = 0,
    pause: Annotated[
        str,
        typer.Option(
            "--pause",
            metavar="wait|abort|keep",
            help="Running requests end first, are aborted, or go on with the new weights.",
        ),
    ] = "wait",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="Cast floats, e.g. to bfloat16.")
    ] = None,
    deltas: Annotated[
        bool, typer.Option("--deltas", help="Have only changed elements sent by the training.")
    ] = False,
    name_map: NameMapFile = None,
    output: Output = None,
) -> None:
    """Keep an inference engine at the weights of a running training.

    Each frame of parameters, all of one step, is written to a safetensors file
    in --dir, and the engine is told to load it. Its version is
    JOB-INCARNATION-STEP. An engine that refuses or dies has the last good
    weights put back, and is tried again with the newest. PARAMD_ENGINE_TOKEN is
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
    found = _follow(target, follower, glob or ["*"], every, updates, dtype, deltas)
    asyncio.run(found)


async def _follow(
    target: Target,
    follower: EngineFollower,
    patterns: list[str],
    every: int,
    updates: int,
    dtype: str | None,
    deltas: bool,
) -> None:
    form, good = target.format, 0
    async with target.async_connect() as mesh:
        frames = mesh.follow(*patterns, every=every, dtype=load_torch(dtype), deltas=deltas)
        try:
            async with aclosing(follower.updates(frames)) as found:
                async for update in found:
                    if form in (Format.JSON, Format.JSONL):
                        print(json.dumps(asdict(update)), flush=True)
                    else:
                        say(line(update))
                    good += update.ok
                    if good == updates > 0:
                        break
        finally:
            await follower.engine.close()


def line(update: Update) -> str:
    """One update in words."""
    came = f"{size(update.sent_bytes)} came from the training"
    if update.changed_bytes is not None:
        came += f", {size(update.changed_bytes)} changed"
    if update.ok:
        return f"step {update.step}: in force after {seconds(update.took_s)}; {came}"
    return (
        f"step {update.step}: not in force: {update.reason}. The engine has "
        f"{update.in_force or 'no version known; it generates once a load succeeds'}"
    )
