"""Why a rank may be slow, as far as its host and its GPUs show it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paramd.v1 import common_pb2

OLD_MS = 60_000
"""Figures older than this say nothing about now."""

MOST_REASONS = 3

DELAY = 0.1
"""Share of the time waiting for a processor, from which it is a reason."""
STOLEN = 0.05
PRESSURE = 0.05
DISK_BUSY = 0.8
DISK_WAIT = 0.1
SWAP_BYTES_S = 1 << 20
RETRANSMITS_S = 10.0
LOST_S = 10.0
JUMP_MS = 1_000
CLOCK = 0.9
"""Share of its highest clock below which a throttled GPU's clock is told."""

_XID_TEXT = {
    48: "an uncorrectable memory error",
    63: "a memory row to be remapped",
    64: "a memory row that cannot be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
}


Document = dict[str, object]
"""Members of `HostDocument` and `DeviceDocument` (api/models.py)."""


def why_slow(state: common_pb2.RankState) -> str:
    """What on the rank's host may slow it, the likeliest first; a clause without a full stop, empty
    when nothing is to be seen."""
    if not state.HasField("host") or state.host.age_ms > OLD_MS:
        return ""
    reasons = [reason for one in state.host.devices for reason in _of_device(one)]
    reasons += _of_host(state.host)
    return "; ".join(reasons[:MOST_REASONS])


def clock_jump_s(state: common_pb2.RankState) -> float:
    """Seconds that the clock of the rank's host has jumped since its sidecar began; 0 for none."""
    jump_ms = state.host.clock_jump_ms
    return jump_ms / 1e3 if abs(jump_ms) >= JUMP_MS else 0.0


def host_document(state: common_pb2.RankState) -> Document | None:
    """The rank's `host` in REST; None before its sidecar has told any."""
    if not state.HasField("host"):
        return None
    host = state.host
    return {
        "age_ms": host.age_ms,
        "window_ms": host.window_ms,
        "processors": host.processors,
        "busy": _short(host.busy),
        "others": _short(host.others),
        "stolen": _short(host.stolen),
        "disk_wait": _short(host.disk_wait),
        "trainer_processors": _short(host.trainer_processors),
        "trainer_delay": _short(host.trainer_delay),
        "memory_available_bytes": host.memory_available_bytes,
        "memory_bytes": host.memory_bytes,
        "memory_pressure": _short(host.memory_pressure),
        "swap_in_bytes_s": _short(host.swap_in_bytes),
        "swap_out_bytes_s": _short(host.swap_out_bytes),
        "disk_busy": _short(host.disk_busy),
        "network_bytes_s": _short(host.network_bytes),
        "network_lost_s": _short(host.network_lost),
        "retransmits_s": _short(host.retransmits),
        "clock_jump_ms": host.clock_jump_ms,
        "why": why_slow(state),
        "devices": [_device(one) for one in host.devices],
    }


def _device(one: common_pb2.DeviceFacts) -> Document:
    return {
        "index": one.index,
        "name": one.name,
        "busy": _short(one.busy),
        "clock_mhz": one.clock_mhz,
        "most_clock_mhz": one.most_clock_mhz,
        "throttled": list(one.throttled),
        "celsius": one.celsius,
        "used_bytes": one.used_bytes,
        "memory_bytes": one.memory_bytes,
        "ecc_errors": one.ecc_errors,
        "xid": one.xid,
    }


def _of_device(one: common_pb2.DeviceFacts) -> Iterator[str]:
    if one.xid:
        text = _XID_TEXT.get(one.xid, "see NVIDIA's list of Xid errors")
        yield f"GPU {one.index} reported Xid {one.xid} ({text})"
    if one.ecc_errors > 0:
        yield f"GPU {one.index} has {one.ecc_errors:,} uncorrected memory errors"
    if one.throttled:
        clock = ""
        if 0 <= one.clock_mhz < CLOCK * one.most_clock_mhz:
            clock = f", at {one.clock_mhz:,} of {one.most_clock_mhz:,} MHz"
        heat = f" and {one.celsius} °C" if one.celsius >= 0 and "heat" in one.throttled else ""
        yield f"GPU {one.index} is throttled ({', '.join(one.throttled)}){clock}{heat}"


def _of_host(host: common_pb2.HostFacts) -> Iterator[str]:
    if host.trainer_delay >= DELAY:
        used = host.others * host.processors
        yield (
            f"its trainer waits {host.trainer_delay:.0%} of the time for a processor; other "
            f"processes use {used:.1f} of {host.processors}"
        )
    if host.stolen >= STOLEN:
        yield f"the hypervisor takes {host.stolen:.0%} of the processors"
    if max(host.swap_in_bytes, host.swap_out_bytes) >= SWAP_BYTES_S:
        moved = host.swap_in_bytes + host.swap_out_bytes
        yield f"memory is swapped, {moved / 1e6:,.0f} MB a second"
    if host.memory_pressure >= PRESSURE:
        yield (
            f"processes wait {host.memory_pressure:.0%} of the time for memory, of which "
            f"{host.memory_available_bytes / 1e9:.1f} GB are left"
        )
    if host.disk_busy >= DISK_BUSY or host.disk_wait >= DISK_WAIT:
        busy = f"the busiest disk is busy {host.disk_busy:.0%} of the time"
        wait = f"processors wait {host.disk_wait:.0%} of the time for disks"
        yield busy if host.disk_busy >= DISK_BUSY else wait
    if host.retransmits >= RETRANSMITS_S:
        yield f"TCP sends {host.retransmits:,.0f} segments a second again"
    if host.network_lost >= LOST_S:
        yield f"the network loses {host.network_lost:,.0f} packets a second"
    if abs(host.clock_jump_ms) >= JUMP_MS:
        way = "ahead" if host.clock_jump_ms > 0 else "back"
        yield f"the host's clock has jumped {abs(host.clock_jump_ms) / 1e3:,.0f} s {way}"


def _short(number: float) -> float:
    """Four digits are more than a sample knows, and save a third of the document. JSON has no NaN
    and no infinity: a sidecar that reports one does not know the number."""
    return float(f"{number:.4g}") if math.isfinite(number) else -1.0
