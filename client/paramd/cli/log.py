"""`paramd log`: a job's statistics, alerts and edits into an experiment tracker."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paramd.cli.options import Target, with_target
from paramd.cli.shell import say

if TYPE_CHECKING:
    from paramd.integrations.trackers import Tracker


@with_target
def log(
    target: Target,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="TRACKER", help="tensorboard, wandb, mlflow, trackio, prometheus."
        ),
    ],
    glob: Annotated[
        list[str] | None, typer.Argument(metavar="[GLOB]", help="Parameters; all by default.")
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", help="Log histograms, gradients or updates, too; repeatable."),
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
        Path, typer.Option("--dir", help="Where TensorBoard's and Prometheus' files are written.")
    ] = Path("runs"),
) -> None:
    """Log statistics of parameters to an experiment tracker, with alerts and edits as notes.

    The sidecars compute the statistics; training is not involved. If more than
    200 tensors match, only their total is logged. Settings of the tracker
    itself apply, such as WANDB_MODE or MLFLOW_TRACKING_URI; for Prometheus a
    file is written that node_exporter's textfile collector reads. Needs an
    extra: pip install 'paramd\\[trackers]'.
    """
    opened = partial(_opened, to, project, directory)
    asyncio.run(_log(target, opened, glob or ["*"], also or [], every, looks))


def _opened(to: str, project: str, directory: Path, run: str, history: int) -> Tracker:
    from paramd.integrations.trackers import open_tracker

    return open_tracker(to, run, history, project=project, directory=directory)


async def _log(
    target: Target,
    opened: Callable[[str, int], Tracker],
    patterns: list[str],
    also: list[str],
    every_s: float,
    looks: int,
) -> None:
    from paramd.integrations.trackers import Following

    async with target.async_connect() as mesh:
        following = Following(mesh, opened, patterns, also)
        task, ended = asyncio.current_task(), ""
        assert task is not None
        # A training that detaches ends what it has started (trainer/helpers/control_link.py).
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            with suppress(asyncio.CancelledError):
                ended = await following.run(every_s, looks=looks)
        finally:
            following.close()
    if ended:
        say(f"nothing more is logged: {ended}")
