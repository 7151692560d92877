"""GetMetrics: this sidecar's numbers as Prometheus text, written by hand.

prometheus-client costs 5 MiB, a sixth of the sidecar, for two dozen numbers. There is no
separate port either: the text goes out over the gRPC port, which requires tickets, and the
control plane serves it at /api/v1/jobs/{job}/ranks/{rank}/metrics.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass

from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages

_NS = 1e9
_STARTED_S = time.time()


@dataclass(frozen=True, slots=True)
class Sample:
    """A metric with a single value; a name that ends in _total is a counter."""

    name: str
    text: str
    value: float


def render(samples: Iterable[Sample], *, job: str, rank: int) -> str:
    """Text format 0.0.4. The labels are always job and rank."""
    labels = f'job="{_escaped(job)}",rank="{rank}"'
    lines: list[str] = []
    for sample in samples:
        kind = "counter" if sample.name.endswith("_total") else "gauge"
        lines.append(f"# HELP {sample.name} {sample.text}")
        lines.append(f"# TYPE {sample.name} {kind}")
        lines.append(f"{sample.name}{{{labels}}} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def sidecar_metrics(rank: RankSidecar) -> str:
    """This rank's current metrics as text."""
    return render(
        [*_rank_samples(rank), *_process_samples()], job=rank.config.job, rank=rank.config.rank
    )


def _rank_samples(rank: RankSidecar) -> list[Sample]:
    state = messages.rank_state(rank)
    store = rank.pins.store if rank.has_pins else None
    age_ns = state.boundary_age_ns
    return [
        Sample("paramd_sidecar_epoch", "Incarnation of the job, 0 before attach", rank.epoch),
        Sample("paramd_sidecar_step", "Finished updates, -1 before attach", rank.step),
        Sample("paramd_sidecar_phase", "Phase by its number in paramd.v1", state.phase),
        Sample("paramd_sidecar_step_time_seconds", "Smoothed", state.step_time_ns / _NS),
        Sample(
            "paramd_sidecar_boundary_age_seconds",
            "Time since the last boundary, -1 before the first",
            age_ns / _NS if age_ns >= 0 else -1,
        ),
        Sample("paramd_sidecar_stalls_total", "Updates that waited", state.stall_count),
        Sample(
            "paramd_sidecar_stall_seconds_total",
            "Time that updates waited for copies",
            state.stall_total_ns / _NS,
        ),
        Sample("paramd_sidecar_stall_max_seconds", "Longest such wait", state.stall_max_ns / _NS),
        Sample(
            "paramd_sidecar_abandoned_copies_total",
            "Copies given up because an update began",
            state.abandoned_copy_count,
        ),
        Sample("paramd_sidecar_arena_bytes", "Bytes of the arena", state.arena_bytes),
        Sample("paramd_sidecar_snapshots", "Snapshots under lease", state.snapshot_count),
        Sample("paramd_sidecar_snapshot_bytes", "Held by snapshots", state.snapshot_bytes),
        Sample(
            "paramd_sidecar_snapshot_budget_bytes",
            "Most that snapshots may hold",
            rank.budget_bytes(state.arena_bytes) if store is not None else 0,
        ),
        Sample("paramd_sidecar_agreement_works", "1 while agreeing", state.agreement_works),
        Sample(
            "paramd_sidecar_refused_calls_total",
            "Calls without a ticket that permits them",
            rank.refusals.count,
        ),
        *_edit_samples(rank),
        *_tls_samples(rank),
    ]


def _tls_samples(rank: RankSidecar) -> list[Sample]:
    if rank.tls is None:
        return []
    return [
        Sample(
            "paramd_sidecar_tls_expiry_timestamp_seconds",
            "End of the certificate in force",
            rank.tls.expires_s,
        ),
        Sample(
            "paramd_sidecar_tls_files_ok",
            "0 while newer files of TLS cannot be used",
            not rank.tls.failure,
        ),
    ]


def _edit_samples(rank: RankSidecar) -> list[Sample]:
    edits = rank.edits if rank.has_edits else None
    return [
        Sample(
            "paramd_sidecar_edits_applied_total",
            "Edits that this process saw applied",
            edits.applied_count if edits is not None else 0,
        ),
        Sample(
            "paramd_sidecar_edit_staged_bytes",
            "Memory of edits that are not applied",
            edits.staged_bytes if edits is not None else 0,
        ),
        Sample(
            "paramd_sidecar_edit_undo_bytes",
            "Memory kept to undo applied edits",
            edits.undo_bytes if edits is not None else 0,
        ),
    ]


def _process_samples() -> list[Sample]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return [
        Sample(
            "paramd_sidecar_cpu_seconds_total",
            "Processor time of the sidecar",
            usage.ru_utime + usage.ru_stime,
        ),
        Sample("paramd_sidecar_resident_bytes", "Memory of the sidecar", _resident_bytes()),
        Sample("paramd_sidecar_open_descriptors", "Open files", len(os.listdir("/proc/self/fd"))),
        Sample("paramd_sidecar_start_time_seconds", "Start, since the Unix epoch", _STARTED_S),
    ]


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _number(value: float) -> str:
    return repr(float(value)) if value != int(value) else str(int(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
