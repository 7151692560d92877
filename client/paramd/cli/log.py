"""`paramd log`: a job's statistics, alerts and edits into an experiment tracker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from paramd.cli.options import Target, with_target
from paramd.cli.shell import say


@with_target
def log(
    target: Target,
    to: Annotated[
        str,
        typer.Option("--to", metavar="TRACKER", help="tensorboard, wandb, mlflow or trackio."),
    ],
    glob: Annotated[
        list[str] | None, typer.Argument(metavar="[GLOB]", help="Parameters; all by default.")
    ] = None,
    every: Annotated[
        float, typer.Option("--every", min=0.2, max=3600.0, help="Seconds between two looks.")
    ] = 10.0,
    looks: Annotated[
        int, typer.Option("-n", "--looks", min=0, help="Exit after N looks; 0: with the job.")
    ] = 0,
    project: Annotated[
        str, typer.Option("--project", help="What the tracker sorts runs under.")
    ] = "paramd",
    directory: Annotated[
        Path, typer.Option("--dir", help="Where TensorBoard's files are written.")
    ] = Path("runs"),
) -> None:
    """Log statistics of parameters to an experiment tracker, with alerts and edits as notes.

    The sidecars compute the statistics; training is not involved. If more than
    200 tensors match, only their total is logged. Settings of the tracker
    itself apply, such as WANDB_MODE or MLFLOW_TRACKING_URI. Needs an extra:
    pip install 'paramd\\[trackers]'.
    """
    asyncio.run(_log(target, to, glob or ["*"], every, looks, project, directory))


async def _log(
    target: Target,
    to: str,
    patterns: list[str],
    every_s: float,
    looks: int,
    project: str,
    directory: Path,
) -> None:
    from paramd.integrations.trackers import Following, open_tracker
    from paramd.mesh.connect import async_connect

    chosen = target.settings
    async with async_connect(
        chosen.url, chosen.token, job=chosen.job, tls_ca=chosen.tls_ca
    ) as mesh:
        run = f"{mesh.job}-{mesh.incarnation}"
        tracker = open_tracker(to, project=project, run=run, directory=directory / run)
        try:
            ended = await Following(mesh, tracker, patterns).run(every_s, looks=looks)
        finally:
            tracker.close()
    if ended:
        say(f"the job no longer answers: {ended}")
