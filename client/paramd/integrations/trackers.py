"""A job's statistics in experiment trackers, from the sidecars: the training is not involved.

Each tracker is the real package with its own settings (WANDB_MODE, MLFLOW_TRACKING_URI and so on),
imported when it is chosen.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paramd.errors import ConflictError, DeadlineError, UnreachableError, UsageError
from paramd.integrations.versions import require
from paramd.mesh.amesh import AsyncMesh

SHOWN = ("norm", "mean", "std", "min", "max", "zero_count", "nan_count", "inf_count")
MOST_TENSORS = 200
"""Most tensors with numbers of their own; with more, only the total over all is logged."""
PATIENCE_S = 60.0
"""How long a job may be unreachable before following it ends, in seconds."""


class Tracker(Protocol):
    """One run in a tracker; closed once nothing more comes."""

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        """Log finite numbers by name at a step that never falls."""

    def note(self, text: str, step: int) -> None:
        """Log a line about this step, such as an alert."""

    def close(self) -> None:
        """Write everything, and end the run."""


class _WandbLike:
    """wandb, and trackio, which has the same functions."""

    def __init__(self, package: Any, project: str, run: str) -> None:
        self._package = package
        package.init(project=project, name=run)

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self._package.log(dict(values), step=step)

    def note(self, text: str, step: int) -> None:
        self._package.log({"paramd/note": text}, step=step)

    def close(self) -> None:
        self._package.finish()


class _Mlflow:
    def __init__(self, package: Any, project: str, run: str) -> None:
        self._package = package
        package.set_experiment(project)
        package.start_run(run_name=run)
        self._notes = 0

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        # Slices have brackets and colons in their names, which mlflow does not take.
        named = {"".join(c if c.isalnum() or c in "_-./ " else "_" for c in n): values[n]
                 for n in values}  # fmt: skip
        self._package.log_metrics(named, step=step)

    def note(self, text: str, step: int) -> None:
        self._notes += 1
        self._package.set_tag(f"paramd.note.{self._notes}", f"step {step}: {text}"[:5000])

    def close(self) -> None:
        self._package.end_run()


class _TensorBoard:
    def __init__(self, package: Any, directory: Path) -> None:
        self._writer = package.Writer(str(directory))
        self._notes = 0

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def note(self, text: str, step: int) -> None:
        # Its writer has no texts without TensorFlow, and a tag keeps its first description.
        self._notes += 1
        tag = f"paramd/note-{self._notes}"
        self._writer.add_scalar(tag, float(self._notes), step, description=text)

    def close(self) -> None:
        self._writer.close()


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def open_tracker(kind: str, *, project: str, run: str, directory: Path) -> Tracker:
    """Begin a run.

    Args:
        kind: one of `TRACKERS`.
        project: what the tracker sorts runs under; TensorBoard has none.
        run: the run's name.
        directory: where TensorBoard's files are written.

    Raises:
        UsageError: there is no such tracker, or its package is missing or of another version.
    """
    if kind == "tensorboard":
        require("tensorboard", at_least="2.18", below="3", extra="trackers")
        from tensorboard import summary

        return _TensorBoard(summary, directory)
    if kind == "wandb":
        require("wandb", at_least="0.20", below="1", extra="trackers")
        import wandb

        return _WandbLike(wandb, project, run)
    if kind == "trackio":
        require("trackio", at_least="0.20", below="1", extra="trackers")
        import trackio

        return _WandbLike(trackio, project, run)
    if kind == "mlflow":
        require("mlflow-skinny", at_least="3.0", below="4", extra="trackers")
        import mlflow

        return _Mlflow(mlflow, project, run)
    raise UsageError(f"tracker: {kind!r}; expected one of {', '.join(TRACKERS)}")


class Following:
    """What of a job is in the tracker already, and what comes next."""

    def __init__(self, mesh: AsyncMesh, tracker: Tracker, patterns: Sequence[str]) -> None:
        self._mesh = mesh
        self._tracker = tracker
        self._patterns = patterns
        self._step = -1
        self._known: set[str] | None = None
        """Alerts and edits that have been told; those from before are not."""

    async def run(
        self, every_s: float, *, looks: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> str:
        """Log until the job has not answered for `PATIENCE_S`; why it ended.

        Args:
            every_s: Seconds between two looks.
            looks: End after so many; 0 means never.
        """
        answered_s, done = clock(), 0
        while True:
            try:
                await self.look()
                answered_s, done = clock(), done + 1
            except (UnreachableError, ConflictError, DeadlineError) as error:
                if clock() - answered_s > PATIENCE_S:
                    return str(error)
            if done == looks > 0:
                return ""
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Log the statistics of the present step, once, and what has happened since the last."""
        if self._known is None:
            # Before the first numbers: what happens from then on is told.
            await self._tell_new()
        found = await self._mesh.stats(*self._patterns)
        if found.step > self._step:
            rows = [*found] if len(found) <= MOST_TENSORS else []
            values = {
                f"{row.name}/{name}": value
                for row in (*rows, found.total)
                for name in SHOWN
                if math.isfinite(value := float(getattr(row.summary, name)))
            }
            self._tracker.numbers(values, found.step)
            self._step = found.step
        await self._tell_new()

    async def _tell_new(self) -> None:
        told = {
            **{one.id: f"alert {one.rule} on {one.subject}: {one.reason}"
               for one in await self._mesh.alerts(limit=1000)},
            **{one.id: f"edit {one.id[:8]} applied at step {one.step}: {one.note}"
               for one in await self._mesh.edits(state="APPLIED", limit=1000)},
        }  # fmt: skip
        if self._known is not None:
            for key in told.keys() - self._known:
                self._tracker.note(told[key], self._step)
        self._known = {*told, *(self._known or ())}
