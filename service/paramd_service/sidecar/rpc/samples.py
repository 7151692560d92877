"""The kernel's own metrics of a sidecar, and the text with those of its parts."""

from __future__ import annotations

import os
import resource
import time

from paramd.memory.device_arena import DeviceReader
from paramd.state_files import resident_bytes
from paramd.v1 import common_pb2
from paramd_service.sidecar.metrics import Row, render
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages

_NS = 1e9
_STARTED_S = time.time()


def sidecar_metrics(rank: RankSidecar) -> str:
    """This rank's current metrics as text."""
    rows = [*_rank_samples(rank), *rank.parts.samples()]
    return render(rows, job=rank.config.job, rank=rank.config.rank)


def _rank_samples(rank: RankSidecar) -> list[Row]:
    state = messages.rank_state(rank)
    age_ns = state.boundary_age_ns
    age_s = age_ns / _NS if age_ns >= 0 else -1
    budget_bytes = rank.budget_bytes(state.arena_bytes) if rank.has_pins else 0
    return [
        ("incarnation", "Run of the job, 0 before attach", rank.incarnation),
        ("step", "Finished updates, -1 before attach", rank.step),
        ("phase", "Phase by its number in paramd.v1", state.phase),
        ("step_time_seconds", "Smoothed", state.step_time_ns / _NS),
        ("boundary_age_seconds", "Since the last boundary, -1 before the first", age_s),
        ("stalls_total", "Updates that waited for a copy", state.stall_count),
        ("stall_seconds_total", "Time that updates waited for copies", state.stall_total_ns / _NS),
        ("stall_max_seconds", "Longest such wait", state.stall_max_ns / _NS),
        *_stand_samples(state),
        ("abandoned_copies_total", "Copies that an update cut short", state.abandoned_copy_count),
        ("arena_bytes", "Bytes of the arena", state.arena_bytes),
        *_device_samples(rank.attached.device if rank.attached is not None else None),
        ("snapshots", "Snapshots under lease", state.snapshot_count),
        ("snapshot_bytes", "Held by snapshots", state.snapshot_bytes),
        ("snapshot_budget_bytes", "Most that snapshots may hold", budget_bytes),
        ("agreement_works", "1 while agreeing", state.agreement_works),
        ("refused_calls_total", "Calls without a ticket that permits them", rank.refusals.count),
        *_tls_samples(rank),
        *_process_samples(),
    ]


def _stand_samples(state: common_pb2.RankState) -> list[Row]:
    counts = {stand.cause: stand.count for stand in state.stands}
    stood_s = {stand.cause: stand.total_ns / _NS for stand in state.stands}
    longest_s = {stand.cause: stand.max_ns / _NS for stand in state.stands}
    return [
        ("stands_total", "Updates that stood", counts),
        ("stand_seconds_total", "Time that updates stood because of paramd", stood_s),
        ("stand_max_seconds", "Longest such time", longest_s),
    ]


def _device_samples(device: DeviceReader | None) -> list[Row]:
    rows: list[Row] = [
        (
            "device_context",
            "1 once this sidecar has a context on a GPU, which takes memory there",
            int(device is not None and device.is_open),
        )
    ]
    context_bytes = device.context_bytes if device is not None else None
    if context_bytes is not None:
        text = "Device memory that this sidecar's context takes, by NVML"
        rows.append(("device_context_bytes", text, context_bytes))
    return rows


def _tls_samples(rank: RankSidecar) -> list[Row]:
    if rank.tls is None:
        return []
    return [
        ("tls_expiry_timestamp_seconds", "End of the certificate in force", rank.tls.expires_s),
        ("tls_files_ok", "0 while newer files of TLS cannot be used", not rank.tls.failure),
    ]


def _process_samples() -> list[Row]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return [
        ("cpu_seconds_total", "Processor time of the sidecar", usage.ru_utime + usage.ru_stime),
        ("resident_bytes", "Memory of the sidecar", resident_bytes(os.getpid())),
        ("open_descriptors", "Open files", len(os.listdir("/proc/self/fd"))),
        ("start_time_seconds", "Start, since the Unix epoch", _STARTED_S),
    ]
