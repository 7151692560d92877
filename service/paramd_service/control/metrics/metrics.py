"""Prometheus metrics, computed from the mesh view on each scrape. The label set is fixed.

Only the values of job and rank come from outside; all other labels have a handful of values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paramd.layout.exports.files import EXPORT_ENDS
from paramd_service.control.alerts.config import Rule
from paramd_service.control.alerts.service import Watchers
from paramd_service.control.edits.service import EditRegistry
from paramd_service.control.exports.service import ExportService
from paramd_service.control.mesh.jobs import Jobs
from paramd_service.control.mesh.registry import MeshView, RankView, Report, State
from paramd_service.control.records.records import Records
from paramd_service.tls import ServerTls

_NS = 1e9


def _edit_metrics(edits: EditRegistry) -> Iterator[Metric]:
    """Edits and holds."""
    labels = ["job", "state"]
    open_now = GaugeMetricFamily("paramd_edits_open", "Edits in progress", labels=labels)
    for (job, state), count in sorted(edits.open_counts().items()):
        open_now.add_metric([job, state], count)
    ended = CounterMetricFamily("paramd_edits", "Edits that ended here", labels=labels)
    for (job, state), count in sorted(edits.ended.items()):
        ended.add_metric([job, state], count)
    seconds = CounterMetricFamily(
        "paramd_edit_seconds", "Total time from creation to APPLIED", labels=["job"]
    )
    for job, taken_s in sorted(edits.seconds.items()):
        seconds.add_metric([job], taken_s)
    holds = CounterMetricFamily("paramd_holds", "Holds begun here", labels=["job"])
    for job, count in sorted(edits.hold_counts().items()):
        holds.add_metric([job], count)
    yield from (open_now, ended, seconds, holds)


def _record_metrics(records: Records) -> Iterator[Metric]:
    """Health of audit, store and history; a scrape does not query the store."""
    yield _gauge(
        "paramd_audit_ok",
        "0 while the audit cannot be written and mutations are refused",
        not records.audit.failure,
    )
    waiting = records.store.waiting_count
    yield _gauge("paramd_store_writes_waiting", "Writes queued for the store", waiting)
    yield CounterMetricFamily(
        "paramd_history_dropped_samples",
        "Samples lost from the metric history",
        value=records.history.dropped_count,
    )


_RANK_GAUGES: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
    ("paramd_rank_step", "Finished updates", lambda r: r.step),
    ("paramd_rank_step_time_seconds", "Smoothed step time", lambda r: r.state.step_time_ns / _NS),
    ("paramd_rank_arena_bytes", "Bytes of the arena", lambda r: r.state.arena_bytes),
    ("paramd_rank_snapshot_bytes", "Bytes of snapshots", lambda r: r.state.snapshot_bytes),
    ("paramd_rank_snapshots", "Snapshots under lease", lambda r: r.state.snapshot_count),
    ("paramd_rank_stall_max_seconds", "Longest stall", lambda r: r.state.stall_max_ns / _NS),
    ("paramd_rank_phase", "Phase by its number in paramd.v1", lambda r: r.state.phase),
    ("paramd_rank_agreement_works", "1 while agreeing", lambda r: r.state.agreement_works),
)
_RANK_COUNTERS: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
    ("paramd_rank_stalls", "Updates that waited", lambda r: r.state.stall_count),
    ("paramd_rank_stall_seconds", "Total stall time", lambda r: r.state.stall_total_ns / _NS),
    ("paramd_rank_abandoned_copies", "Abandoned copies", lambda r: r.state.abandoned_copy_count),
)


class LoopLag:
    """Delay of the event loop's once-a-second tick."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self.max_s = 0.0

    def saw(self, lag_s: float) -> None:
        """Record one tick's lag."""
        self.last_s = max(lag_s, 0.0)
        self.max_s = max(self.max_s, self.last_s)


class Metrics(Collector):
    """Collects and renders the metrics of one control plane."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self,
        jobs: Jobs,
        lag: LoopLag,
        watchers: Watchers,
        tls: ServerTls | None = None,
        *,
        exports: ExportService | None = None,
        edits: EditRegistry | None = None,
        records: Records | None = None,
    ) -> None:
        self._jobs = jobs
        self._lag = lag
        self._watchers = watchers
        self._tls = tls
        self._exports = exports
        self._edits = edits
        self._records = records
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        if self._records is not None:
            yield from _record_metrics(self._records)
        if self._edits is not None:
            yield from _edit_metrics(self._edits)
        yield from _job_metrics(self._jobs, self._watchers, self._exports)
        if self._tls is not None:
            yield from _tls_metrics(self._tls)
        yield _gauge("paramd_loop_lag_seconds", "Event loop's last lag", self._lag.last_s)
        yield _gauge("paramd_loop_lag_max_seconds", "Event loop's longest lag", self._lag.max_s)

    def render(self) -> bytes:
        """Metrics in the Prometheus text format."""
        return generate_latest(self._registry)


def _job_metrics(jobs: Jobs, watchers: Watchers, exports: ExportService | None) -> Iterator[Metric]:
    meshes = jobs.all()
    views = [(i.job, i.registry.view()) for i in meshes]
    yield from _mesh_metrics(views)
    yield from _rank_metrics([(job, rank) for job, view in views for rank in view.ranks])
    rounds = CounterMetricFamily(
        "paramd_boundary_rounds", "Boundary rounds by outcome", labels=["job", "captured"]
    )
    waiting = GaugeMetricFamily(
        "paramd_boundary_waiting", "Requests waiting for the next round", labels=["job"]
    )
    for mesh in meshes:
        job, coordinator = mesh.job, mesh.coordinator
        captured = coordinator.captured_count
        rounds.add_metric([job, "true"], captured)
        rounds.add_metric([job, "false"], coordinator.round_count - captured)
        waiting.add_metric([job], coordinator.waiting_count)
    yield rounds
    yield waiting
    yield from _alert_metrics(watchers)
    if exports is not None:
        yield from _export_metrics(exports, [job for job, _ in views])


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _tls_metrics(tls: ServerTls) -> Iterator[Metric]:
    yield _gauge(
        "paramd_tls_expiry_timestamp_seconds", "Expiry of the current certificate", tls.expires_s
    )
    yield _gauge("paramd_tls_files_ok", "0 while newer TLS files cannot be used", not tls.failure)


def _mesh_metrics(views: Sequence[tuple[str, MeshView]]) -> Iterator[Metric]:
    world = GaugeMetricFamily("paramd_world_size", "Ranks of the mesh", labels=["job"])
    joined = GaugeMetricFamily("paramd_joined_ranks", "Ranks that are joined", labels=["job"])
    ok = GaugeMetricFamily("paramd_mesh_ok", "1 while the mesh is OK", labels=["job"])
    for job, view in views:
        world.add_metric([job], len(view.ranks))
        joined.add_metric([job], len(view.joined))
        ok.add_metric([job], view.state is State.OK)
    yield world
    yield joined
    yield ok


def _export_metrics(exports: ExportService, jobs: Sequence[str]) -> Iterator[Metric]:
    running = GaugeMetricFamily(
        "paramd_exports_running", "Exports running or queued", labels=["job"]
    )
    ended = CounterMetricFamily("paramd_exports", "Exports by outcome", labels=["job", "state"])
    written = CounterMetricFamily("paramd_export_bytes", "Bytes exported", labels=["job"])
    counts = Counter(job.row.job for job in exports.running())
    for job in jobs:
        running.add_metric([job], counts[job])
        for state in EXPORT_ENDS:
            ended.add_metric([job, state.value], exports.ended_counts[job, state.value])
        written.add_metric([job], exports.written_bytes[job])
    yield running
    yield ended
    yield written


def _alert_metrics(watchers: Watchers) -> Iterator[Metric]:
    firing = GaugeMetricFamily("paramd_alerts_firing", "Firing alerts", labels=["job", "rule"])
    fired = CounterMetricFamily("paramd_alerts_fired", "Alerts that ever fired", labels=["job"])
    rounds = CounterMetricFamily(
        "paramd_watch_rounds", "Sampling rounds by outcome", labels=["job", "kind", "ok"]
    )
    for job, watcher in watchers.all():
        counts = Counter(alert.rule for alert in watcher.book.firing)
        for rule in Rule:
            firing.add_metric([job, rule.value], counts[rule])
        fired.add_metric([job], watcher.book.fired_count)
        for ok, found in (("true", watcher.round_counts), ("false", watcher.failed_counts)):
            for kind, count in found.items():
                rounds.add_metric([job, kind, ok], count)
    posts = CounterMetricFamily("paramd_webhook_posts", "Webhook posts by outcome", labels=["ok"])
    posts.add_metric(["true"], watchers.webhooks.posted_count)
    posts.add_metric(["false"], watchers.webhooks.failed_count)
    yield firing
    yield fired
    yield rounds
    yield posts


def _rank_metrics(ranks: Sequence[tuple[str, RankView]]) -> Iterator[Metric]:
    labels = ["job", "rank"]
    joined = GaugeMetricFamily("paramd_rank_joined", "1 while joined", labels=labels)
    age = GaugeMetricFamily(
        "paramd_rank_report_age_seconds", "Age of the last report", labels=labels
    )
    for job, rank in ranks:
        joined.add_metric([job, str(rank.rank)], rank.connected)
        if rank.report is not None:
            age.add_metric([job, str(rank.rank)], rank.age_s)
    yield joined
    yield age
    for name, text, read in _RANK_GAUGES:
        yield _filled(GaugeMetricFamily(name, text, labels=labels), ranks, read)
    for name, text, read in _RANK_COUNTERS:
        yield _filled(CounterMetricFamily(name, text, labels=labels), ranks, read)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    ranks: Sequence[tuple[str, RankView]],
    read: Callable[[Report], float],
) -> Metric:
    for job, rank in ranks:
        if rank.report is not None:
            family.add_metric([job, str(rank.rank)], read(rank.report))
    return family
