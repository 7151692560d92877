"""A job's statistics in experiment trackers, from the sidecars: the training is not involved.

Each tracker is the real package with its own settings (WANDB_MODE, MLFLOW_TRACKING_URI and so on),
imported when it is chosen.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from paramd.errors import ConflictError, DeadlineError, UnreachableError, UsageError
from paramd.extras import TRACKERS
from paramd.integrations.versions import require
from paramd.mesh.amesh import AsyncMesh
from paramd.mesh.results import StatsTable
from paramd.state import At

Histogram = Sequence[tuple[int, int]]
"""(e, count) of 2**e <= |x| < 2**(e+1), ascending and without gaps; zeros are not in it."""

SHOWN = ("norm", "mean", "std", "min", "max", "zero_count", "nan_count", "inf_count")
WANDB_STEP = "paramd/step"
MOST_TENSORS = 200
"""Most tensors logged one by one; with more, only the total over all is logged."""
PATIENCE_S = 60.0
"""How long a job may be unreachable before following it ends, in seconds."""


class Tracker(Protocol):
    """One run in a tracker; closed after the last call.

    Steps rise for each name, but not across names: gradients are of an update to come, and the
    statistics that follow may be of the step before it.
    """

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        """Log finite numbers by name."""

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        """Log histograms by name, none of them empty."""

    def note(self, text: str, step: int) -> None:
        """Log a line about this step, such as an alert."""

    def close(self) -> None:
        """Write everything, and end the run."""


class _Trackio:
    def __init__(self, package: Any, project: str, run: str) -> None:
        self._package = package
        package.init(project=project, name=run)

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self._log(dict(values), step)

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        made = {
            f"{name}/log2": self._package.Histogram(
                np_histogram=([count for _, count in one], [e for e, _ in one] + [one[-1][0] + 1])
            )
            for name, one in found.items()
        }
        self._log(made, step)

    def note(self, text: str, step: int) -> None:
        self._log({"paramd/note": text}, step)

    def close(self) -> None:
        self._package.finish()

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._package.log(values, step=step)


class _Wandb(_Trackio):
    """As trackio, which has its functions; but it drops values of an earlier step than the last.
    So the step is a number beside the others, which they are drawn over.
    """

    def __init__(self, package: Any, project: str, run: str) -> None:
        super().__init__(package, project, run)
        package.define_metric(WANDB_STEP, hidden=True)
        package.define_metric("*", step_metric=WANDB_STEP)

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._package.log({**values, WANDB_STEP: step})


def _mlflow_name(name: str) -> str:
    """Slices have brackets and colons in their names, which mlflow does not take."""
    return "".join(one if one.isalnum() or one in "_-./ " else "_" for one in name)


class _Mlflow:
    def __init__(self, package: Any, project: str, run: str) -> None:
        self._package = package
        package.set_experiment(project)
        package.start_run(run_name=run)
        self._notes = 0

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        named = {_mlflow_name(name): value for name, value in values.items()}
        self._package.log_metrics(named, step=step)

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        # MLflow has no histograms: a file of each step.
        document = {name: {str(e): count for e, count in one} for name, one in found.items()}
        self._package.log_dict(document, f"log2/step-{step:09}.json")

    def note(self, text: str, step: int) -> None:
        self._notes += 1
        self._package.set_tag(f"paramd.note.{self._notes}", f"step {step}: {text}"[:5000])

    def close(self) -> None:
        self._package.end_run()


class _TensorBoard:
    """Event files by TensorBoard's own writer, which has more than its `summary.Writer` offers."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))
        self._notes = 0

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.plugins.scalar.metadata import create_summary_metadata

        about = create_summary_metadata(None, None)
        self._add({name: (float(value), about) for name, value in values.items()}, step)

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        from tensorboard.plugins.histogram.metadata import create_summary_metadata

        about = create_summary_metadata(None, None)
        rows = {name: [(e, e + 1, count) for e, count in one] for name, one in found.items()}
        self._add({f"{name}/log2": (one, about) for name, one in rows.items()}, step)

    def note(self, text: str, step: int) -> None:
        from tensorboard.plugins.text.metadata import create_summary_metadata

        # A tag keeps one text of each step.
        self._notes += 1
        self._add({f"paramd/note-{self._notes}": (text, create_summary_metadata(None, None))}, step)

    def _add(self, values: Mapping[str, tuple[Any, Any]], step: int) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.util.tensor_util import make_tensor_proto

        event = event_pb2.Event(wall_time=time.time(), step=step)
        for tag, (value, about) in values.items():
            event.summary.value.add(tag=tag, tensor=make_tensor_proto(value), metadata=about)
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Prometheus:
    """One file in the text format, as node_exporter's textfile collector reads it."""

    def __init__(self, path: Path, job: str) -> None:
        import prometheus_client as client
        from prometheus_client import core

        path.parent.mkdir(parents=True, exist_ok=True)
        self._client, self._core, self._path, self._job = client, core, path, job
        self._notes = 0
        self._step = 0
        self._values: Mapping[str, float] = {}
        self._histograms: Mapping[str, Histogram] = {}

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        self._values, self._step = {**self._values, **values}, step
        self._write()

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        self._histograms, self._step = found, step
        self._write()

    def note(self, text: str, step: int) -> None:
        # Prometheus keeps no text; that there was something can be drawn and alerted on.
        self._notes += 1
        self._write()

    def close(self) -> None:
        self._write()

    def collect(self) -> Sequence[Any]:
        core = self._core
        steps = core.GaugeMetricFamily("paramd_log_step", "Last step logged.", labels=["job"])
        steps.add_metric([self._job], self._step)
        notes = core.CounterMetricFamily("paramd_log_notes", "Alerts and edits.", labels=["job"])
        notes.add_metric([self._job], self._notes)
        labels = ["job", "name"]
        families: dict[str, Any] = {}
        for key, value in self._values.items():
            name, _, statistic = key.rpartition("/")
            about = f"{statistic} of a tensor, or of all together (total)."
            if statistic not in families:
                found = core.GaugeMetricFamily(f"paramd_log_{statistic}", about, labels=labels)
                families[statistic] = found
            families[statistic].add_metric([self._job, name], value)
        sizes = core.HistogramMetricFamily(
            "paramd_log_magnitude", "Nonzero elements by their magnitude.", labels=labels
        )
        for name, one in self._histograms.items():
            total, buckets = 0, []
            for e, count in one:
                total += count
                buckets.append((repr(2.0 ** (e + 1)), total))
            sizes.add_metric([self._job, name], [*buckets, ("+Inf", total)], sum_value=None)
        return [steps, notes, *families.values(), *([sizes] if self._histograms else [])]

    def _write(self) -> None:
        registry = self._client.CollectorRegistry()
        registry.register(self)
        # It writes beside the file, and renames.
        self._client.write_to_textfile(str(self._path), registry)


_PACKAGES = {
    "tensorboard": ("tensorboard", "2.18", "3"),
    "prometheus": ("prometheus-client", "0.21", "1"),
    "wandb": ("wandb", "0.20", "1"),
    "trackio": ("trackio", "0.20", "1"),
    "mlflow": ("mlflow-skinny", "3.0", "4"),
}


def open_tracker(
    kind: str, run: str, history: int = 0, *, project: str, directory: Path
) -> Tracker:
    """Begin a run.

    Args:
        kind: one of `TRACKERS`.
        run: the run's name.
        history: rollbacks before it: each begins a separate run, named RUN-rN; but Prometheus has
            only present values.
        project: the tracker's project of the run; TensorBoard has none.
        directory: directory for the files of TensorBoard and Prometheus.

    Raises:
        UsageError: there is no such tracker, or its package is missing or of another version.
    """
    if history and kind != "prometheus":
        run = f"{run}-r{history}"
    if kind not in _PACKAGES:
        raise UsageError(f"tracker: {kind!r}; expected one of {', '.join(TRACKERS)}")
    package, at_least, below = _PACKAGES[kind]
    require(package, at_least=at_least, below=below, extra="trackers")
    if kind == "tensorboard":
        return _TensorBoard(directory / run)
    if kind == "prometheus":
        return _Prometheus(directory / f"{run}.prom", run)
    if kind == "mlflow":
        return _Mlflow(import_module(kind), project, run)
    return (_Wandb if kind == "wandb" else _Trackio)(import_module(kind), project, run)


ALSO = ("histograms", "gradients", "updates")
"""Data that can be logged beside statistics, each at an additional cost."""
AWAITED_S = 20.0
"""How long, in seconds, to wait for gradients and updates: a training may pause, or evaluate."""


class _BegunAnewError(Exception):
    """The job is in another incarnation now, which has a tracker run of its own."""


class Following:
    """Logs a job to a tracker. Each rollback starts a new tracker run."""

    def __init__(
        self,
        mesh: AsyncMesh,
        opened: Callable[[str, int], Tracker],
        patterns: Sequence[str],
        also: Collection[str] = (),
    ) -> None:
        """`opened` begins a run of this name and history; the one before has been closed.

        Raises:
            UsageError: If `also` has a word that is none of `ALSO`.
        """
        for word in also:
            if word not in ALSO:
                raise UsageError(f"also: {word!r}; expected some of {', '.join(ALSO)}")
        self._mesh = mesh
        self._opened = opened
        self._patterns = patterns
        self._also = frozenset(also)
        self._run: Tracker | None = None
        self._looked = At(-1, -1)
        """Step of the last statistics; its history is the run's."""
        self._incarnation: int | None = None
        """The incarnation of these runs."""
        self._known: set[str] | None = None
        """Alerts and edits that have been noted; earlier ones are not."""

    async def run(
        self, every_s: float, *, looks: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> str:
        """Log until the job is restarted, or has not answered for `PATIENCE_S`; return the reason.

        `every_s` are seconds between two samples; `looks` ends after that many, 0 means never.
        """
        answered_s, done = clock(), 0
        while True:
            try:
                await self.look()
                answered_s, done = clock(), done + 1
            except _BegunAnewError as error:
                return str(error)
            except (UnreachableError, ConflictError, DeadlineError) as error:
                if clock() - answered_s > PATIENCE_S:
                    return str(error)
            if done == looks > 0:
                return ""
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Log the statistics of the present step, once, and what has happened since the last."""
        if self._known is None:
            # Before the first numbers: later alerts and edits are noted.
            await self._tell_new()
        stats = await self._mesh.stats(*self._patterns, histogram="histograms" in self._also)
        if self._incarnation is None:
            self._incarnation = stats.incarnation
        if stats.incarnation != self._incarnation:
            raise _BegunAnewError(f"{stats.job!r} was restarted, as run {stats.incarnation}")
        now = At(stats.history, stats.step)
        if now > self._looked:
            if self._run is None or now.history > self._looked.history:
                self.close()
                self._run = self._opened(f"{stats.job}-{stats.incarnation}", now.history)
            tracker, self._looked = self._run, now
            _log_statistics(tracker, stats)
            with suppress(ConflictError, DeadlineError):
                # Training that rests has none, and mirrored parameters have no updates to compare.
                await self._follow_training(tracker)
        await self._tell_new()

    def close(self) -> None:
        """Write everything, and end the run."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    async def _follow_training(self, tracker: Tracker) -> None:
        """Log the next gradients and updates, as far as wanted; not those after a rollback."""
        if "gradients" in self._also:
            frames = self._mesh.grads(*self._patterns, kind="stats")
            try:
                async with asyncio.timeout(AWAITED_S):
                    frame = await anext(frames)
            except (TimeoutError, StopAsyncIteration):
                return
            finally:
                await frames.aclose()  # type: ignore[attr-defined]
            if frame.history != self._looked.history:
                return
            norms = {name: one.norm for name, one in frame.items() if one is not None}
            tracker.numbers(_finite(_with_total(norms, "grad_norm")), frame.step)
        if "updates" in self._also:
            updates = await self._mesh.updates(*self._patterns, timeout=AWAITED_S)
            if updates.history != self._looked.history:
                return
            values = _with_total({row.name: row.norm for row in updates}, "update_norm")
            if len(updates) <= MOST_TENSORS:
                values |= {f"{row.name}/update_ratio": row.ratio for row in updates}
            # Updates of many parameters are of several consecutive steps.
            step = max((row.step for row in updates), default=self._looked.step)
            tracker.numbers(_finite(values), step)

    async def _tell_new(self) -> None:
        """Note alerts and edits at their steps."""
        notes = {
            **{
                alert.id: (f"alert {alert.rule} on {alert.subject}: {alert.reason}", alert.step)
                for alert in await self._mesh.alerts(limit=1000)
            },
            **{
                edit.id: (f"edit {edit.id[:8]} applied at step {edit.step}: {edit.note}", edit.step)
                for edit in await self._mesh.edits(state="APPLIED", limit=1000)
            },
        }
        if self._known is not None and self._run is not None:
            for key in notes.keys() - self._known:
                text, step = notes[key]
                self._run.note(text, max(step, 0))
        self._known = {*notes, *(self._known or ())}


def _log_statistics(tracker: Tracker, stats: StatsTable) -> None:
    """Log the total, and each tensor if there are not too many."""
    rows = {row.name: row.summary for row in stats} if len(stats) <= MOST_TENSORS else {}
    rows["total"] = stats.total.summary
    numbers = {
        f"{row}/{name}": float(number)
        for row, summary in rows.items()
        for name, number in summary.numbers().items()
        if name in SHOWN
    }
    tracker.numbers(_finite(numbers), stats.step)
    exponents = {name: summary.exponents for name, summary in rows.items() if summary.exponents}
    if exponents:
        tracker.histograms(exponents, stats.step)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _with_total(norms: Mapping[str, float], name: str) -> dict[str, float]:
    """The norm of each, if they are not too many, and of all together."""
    shown = norms if len(norms) <= MOST_TENSORS else {}
    return {f"total/{name}": math.hypot(*norms.values())} | {
        f"{one}/{name}": value for one, value in shown.items()
    }
