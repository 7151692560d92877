"""Prometheus metrics, computed from the mesh view on each scrape. The label set is fixed: only the
values of job and rank come from outside; all other labels have a handful of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counted
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from paramd.v1 import common_pb2
from paramd_service.control.base.families import Row, family
from paramd_service.control.mesh.health import WORDS, Seen, pause_word
from paramd_service.control.mesh.registry import MeshView, RankView, Report, State
from paramd_service.control.parts import ControlHost
from paramd_service.control.records.records import Records
from paramd_service.tls import ServerTls

_NS = 1e9

Numbers = tuple[str, str, Callable[[Report], float]]
"""Name, text, and the function that reads the number from a report."""


def _record_metrics(records: Records) -> Iterator[Metric]:
    """Health of audit, store and history; a scrape does not query the store."""
    yield Gauge(
        "paramd_audit_ok",
        "0 while the audit cannot be written and changes are refused",
        value=not records.audit.failure,
    )
    waiting = records.store.waiting_count
    yield Gauge("paramd_store_writes_waiting", "Writes queued for the store", value=waiting)
    yield Counted(
        "paramd_history_dropped_samples",
        "Samples lost from the metric history",
        value=records.history.dropped_count,
    )


_RANK_GAUGES: tuple[Numbers, ...] = (
    ("paramd_rank_step", "Finished updates", lambda r: r.step),
    ("paramd_rank_step_time_seconds", "Smoothed step time", lambda r: r.state.step_time_ns / _NS),
    ("paramd_rank_arena_bytes", "Bytes of the arena", lambda r: r.state.arena_bytes),
    ("paramd_rank_snapshot_bytes", "Bytes of snapshots", lambda r: r.state.snapshot_bytes),
    ("paramd_rank_snapshots", "Snapshots under lease", lambda r: r.state.snapshot_count),
    ("paramd_rank_stall_max_seconds", "Longest stall", lambda r: r.state.stall_max_ns / _NS),
    ("paramd_rank_phase", "Phase by its number in paramd.v1", lambda r: r.state.phase),
    ("paramd_rank_agreement_works", "1 while agreeing", lambda r: r.state.agreement_works),
)
_RANK_COUNTERS: tuple[Numbers, ...] = (
    ("paramd_rank_stalls", "Updates that waited", lambda r: r.state.stall_count),
    ("paramd_rank_stall_seconds", "Total stall time", lambda r: r.state.stall_total_ns / _NS),
    ("paramd_rank_abandoned_copies", "Abandoned copies", lambda r: r.state.abandoned_copy_count),
)


HostNumbers = tuple[str, str, Callable[[common_pb2.HostFacts], float]]
_HOST_GAUGES: tuple[HostNumbers, ...] = (
    ("busy_ratio", "Share of the host's processors in use", lambda h: h.busy),
    ("others_ratio", "Share of them that other processes use", lambda h: h.others),
    ("stolen_ratio", "Share of them that the hypervisor takes", lambda h: h.stolen),
    ("trainer_delay_ratio", "Share of time ready without a processor", lambda h: h.trainer_delay),
    ("memory_available_bytes", "Memory left", lambda h: h.memory_available_bytes),
    ("memory_pressure_ratio", "Share of time waiting for memory", lambda h: h.memory_pressure),
    (
        "swapped_bytes_per_second",
        "Swapped in and out",
        lambda h: h.swap_in_bytes + h.swap_out_bytes,
    ),
    ("disk_busy_ratio", "Share of time of the busiest disk", lambda h: h.disk_busy),
    ("disk_wait_ratio", "Share of processors waiting for disks", lambda h: h.disk_wait),
    ("network_bytes_per_second", "Sent and received", lambda h: h.network_bytes),
    ("retransmits_per_second", "TCP segments sent again", lambda h: h.retransmits),
    ("clock_jump_seconds", "Jump of the wall clock", lambda h: h.clock_jump_ms / 1e3),
)
"""Of the host that a rank is on, as its sidecar last saw it."""

DeviceNumbers = tuple[str, str, Callable[[common_pb2.DeviceFacts], float]]
_DEVICE_GAUGES: tuple[DeviceNumbers, ...] = (
    ("busy_ratio", "Share of time with a kernel", lambda d: d.busy),
    ("clock_hertz", "Clock of the processors", lambda d: 1e6 * d.clock_mhz),
    ("throttled", "1 while the clock is held down", lambda d: bool(d.throttled)),
    ("celsius", "Temperature", lambda d: d.celsius),
    ("memory_used_bytes", "Memory in use", lambda d: d.used_bytes),
    ("ecc_errors", "Uncorrected memory errors", lambda d: d.ecc_errors),
    ("xid", "Last Xid error, 0 for none", lambda d: d.xid),
)

_Stand = tuple[type[Gauge | Counted], str, str, Callable[[common_pb2.Stand], float]]
_STANDS: tuple[_Stand, ...] = (
    (Counted, "s", "Times that an update stood because of paramd", lambda one: one.count),
    (Counted, "_seconds", "How long, in all", lambda one: one.total_ns / _NS),
    (Gauge, "_max_seconds", "How long, at longest", lambda one: one.max_ns / _NS),
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


@dataclass(kw_only=True, eq=False)
class Metrics(Collector):
    """Collects and renders the metrics of one control plane."""

    content_type: ClassVar = "text/plain; version=0.0.4; charset=utf-8"

    host: ControlHost
    lag: LoopLag
    tls: ServerTls | None

    def __post_init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield from _record_metrics(self.host.records)
        yield from _job_metrics(self.host)
        yield from self.host.parts.metrics()
        if (tls := self.tls) is not None:
            text = "Expiry of the current certificate"
            yield Gauge("paramd_tls_expiry_timestamp_seconds", text, value=tls.expires_s)
            text = "0 while newer TLS files cannot be used"
            yield Gauge("paramd_tls_files_ok", text, value=not tls.failure)
        lag = self.lag
        yield Gauge("paramd_loop_lag_seconds", "Event loop's last lag", value=lag.last_s)
        yield Gauge("paramd_loop_lag_max_seconds", "Event loop's longest lag", value=lag.max_s)

    def render(self) -> bytes:
        """Metrics in the Prometheus text format."""
        return generate_latest(self._registry)


def _job_metrics(host: ControlHost) -> Iterator[Metric]:
    meshes = host.jobs.all()
    views = [(i.job, i.registry.view()) for i in meshes]
    yield from _mesh_metrics(views)
    yield from _rank_metrics([(job, rank) for job, view in views for rank in view.ranks])
    rounds: list[Row] = []
    for mesh in meshes:
        captured = mesh.coordinator.captured_count
        rounds.append(((mesh.job, "true"), captured))
        rounds.append(((mesh.job, "false"), mesh.coordinator.round_count - captured))
    yield family(
        Counted, "paramd_boundary_rounds", "Boundary rounds by outcome", "job captured", rounds
    )
    waiting = [((mesh.job,), mesh.coordinator.waiting_count) for mesh in meshes]
    text = "Requests waiting for the next round"
    yield family(Gauge, "paramd_boundary_waiting", text, "job", waiting)
    health: list[Row] = []
    for mesh, (job, view) in zip(meshes, views, strict=True):
        seen = Seen(
            state=view.state,
            reason=view.reason,
            pause=pause_word(view.joined),
            is_late=view.is_late,
        )
        word = host.health(mesh, seen).verdict.word
        health += [((job, one), one == word) for one in WORDS]
    yield family(Gauge, "paramd_job_health", "1 at a job's present health", "job health", health)


def _mesh_metrics(views: Sequence[tuple[str, MeshView]]) -> Iterator[Metric]:
    world = [((job,), len(view.ranks)) for job, view in views]
    yield family(Gauge, "paramd_world_size", "Ranks of the mesh", "job", world)
    joined = [((job,), len(view.joined)) for job, view in views]
    yield family(Gauge, "paramd_joined_ranks", "Ranks that are joined", "job", joined)
    ok = [((job,), view.state is State.OK) for job, view in views]
    yield family(Gauge, "paramd_mesh_ok", "1 while the mesh is OK", "job", ok)


def _rank_metrics(ranks: Sequence[tuple[str, RankView]]) -> Iterator[Metric]:
    joined = [((job, rank.rank), rank.connected) for job, rank in ranks]
    yield family(Gauge, "paramd_rank_joined", "1 while joined", "job rank", joined)
    told = [(job, rank, rank.report) for job, rank in ranks if rank.report is not None]
    ages = [((job, rank.rank), rank.age_s) for job, rank, _ in told]
    text = "Age of the last report"
    yield family(Gauge, "paramd_rank_report_age_seconds", text, "job rank", ages)
    reports = [((job, rank.rank), report) for job, rank, report in told]
    yield from (_of_ranks(Gauge, reports, one) for one in _RANK_GAUGES)
    yield from (_of_ranks(Counted, reports, one) for one in _RANK_COUNTERS)
    yield from _host_metrics(reports)
    stands = [((*key, one.cause), one) for key, report in reports for one in report.state.stands]
    for kind, name, text, read in _STANDS:
        rows = [(key, read(one)) for key, one in stands]
        yield family(kind, f"paramd_rank_stand{name}", text, "job rank cause", rows)


def _host_metrics(
    reports: Sequence[tuple[tuple[str, int], Report]],
) -> Iterator[Metric]:
    hosts = [(key, one.state.host) for key, one in reports if one.state.HasField("host")]
    for name, text, read in _HOST_GAUGES:
        rows: list[Row] = [(key, read(host)) for key, host in hosts]
        yield family(Gauge, f"paramd_rank_host_{name}", text, "job rank", rows)
    devices = [((*key, one.index), one) for key, host in hosts for one in host.devices]
    for name, text, of in _DEVICE_GAUGES:
        found: list[Row] = [(key, of(one)) for key, one in devices]
        yield family(Gauge, f"paramd_rank_gpu_{name}", text, "job rank gpu", found)


def _of_ranks(
    kind: type[Gauge | Counted], reports: Sequence[tuple[tuple[str, int], Report]], one: Numbers
) -> Metric:
    name, text, read = one
    return family(kind, name, text, "job rank", ((key, read(report)) for key, report in reports))
