"""Prometheus metrics, made from the mesh view when they are scraped. The label set is fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paramd_service.control.coordinator import Coordinator
from paramd_service.control.view import MeshView, RankView, Report

_NS = 1e9

_RANK_GAUGES: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
    ("paramd_rank_step", "Finished updates", lambda r: r.step),
    ("paramd_rank_step_time_seconds", "Smoothed step time", lambda r: r.state.step_time_ns / _NS),
    ("paramd_rank_arena_bytes", "Bytes of the arena", lambda r: r.state.arena_bytes),
    ("paramd_rank_snapshot_bytes", "Bytes of snapshots", lambda r: r.state.snapshot_bytes),
    ("paramd_rank_snapshots", "Snapshots under lease", lambda r: r.state.snapshot_count),
    ("paramd_rank_stall_max_seconds", "Longest wait", lambda r: r.state.stall_max_ns / _NS),
    ("paramd_rank_phase", "Phase by its number in paramd.v1", lambda r: r.state.phase),
    ("paramd_rank_agreement_works", "1 while agreeing", lambda r: r.state.agreement_works),
)
_RANK_COUNTERS: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
    ("paramd_rank_stalls", "Updates that waited", lambda r: r.state.stall_count),
    ("paramd_rank_stall_seconds", "Time waited", lambda r: r.state.stall_total_ns / _NS),
    ("paramd_rank_abandoned_copies", "Given up", lambda r: r.state.abandoned_copy_count),
)


class LoopLag:
    """How late the event loop's once-a-second tick came."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self.max_s = 0.0

    def saw(self, lag_s: float) -> None:
        """Takes in one tick's lag."""
        self.last_s = max(lag_s, 0.0)
        self.max_s = max(self.max_s, self.last_s)


class _MeshCollector(Collector):
    def __init__(
        self, view: Callable[[], MeshView], coordinator: Coordinator, lag: LoopLag
    ) -> None:
        self._view = view
        self._coordinator = coordinator
        self._lag = lag

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield _gauge("paramd_world_size", "Ranks of the mesh", len(view.ranks))
        yield _gauge("paramd_joined_ranks", "Ranks that are joined", len(view.joined))
        yield from _rank_metrics(view.ranks)
        rounds = CounterMetricFamily(
            "paramd_boundary_rounds", "Boundary rounds by their end", labels=["captured"]
        )
        captured = self._coordinator.captured_count
        rounds.add_metric(["true"], captured)
        rounds.add_metric(["false"], self._coordinator.round_count - captured)
        yield rounds
        waiting = self._coordinator.waiting_count
        yield _gauge("paramd_boundary_waiting", "Requests for the next round", waiting)
        yield _gauge("paramd_loop_lag_seconds", "Event loop's last lag", self._lag.last_s)
        yield _gauge("paramd_loop_lag_max_seconds", "Event loop's longest lag", self._lag.max_s)


class Metrics:
    """Renders the metrics of one control plane."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self, view: Callable[[], MeshView], coordinator: Coordinator, lag: LoopLag
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_MeshCollector(view, coordinator, lag))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _rank_metrics(ranks: tuple[RankView, ...]) -> Iterator[Metric]:
    joined = GaugeMetricFamily("paramd_rank_joined", "1 while joined", labels=["rank"])
    age = GaugeMetricFamily("paramd_rank_report_age_seconds", "Last report", labels=["rank"])
    for rank in ranks:
        joined.add_metric([str(rank.rank)], rank.connected)
        if rank.report is not None:
            age.add_metric([str(rank.rank)], rank.age_s)
    yield joined
    yield age
    for name, text, read in _RANK_GAUGES:
        yield _filled(GaugeMetricFamily(name, text, labels=["rank"]), ranks, read)
    for name, text, read in _RANK_COUNTERS:
        yield _filled(CounterMetricFamily(name, text, labels=["rank"]), ranks, read)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    ranks: tuple[RankView, ...],
    read: Callable[[Report], float],
) -> Metric:
    for rank in ranks:
        if rank.report is not None:
            family.add_metric([str(rank.rank)], read(rank.report))
    return family
