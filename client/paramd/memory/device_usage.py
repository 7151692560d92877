"""How much memory of a device this process takes, by NVIDIA's management library.

The driver itself tells what is free only within a context, and of all processes together.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_uint, c_ulonglong, c_void_p
from functools import cache
from uuid import UUID

LIBRARY = "libnvidia-ml.so.1"
_NOT_AVAILABLE = (1 << 64) - 1
_MOST_PROCESSES = 256


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = [
        ("pid", c_uint),
        ("used_bytes", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    ]


def used_bytes(uuid: bytes, library: str = LIBRARY) -> int | None:
    """What this process takes of the device; 0 while it is not known there.

    None where the library is missing or does not tell. In a container that numbers processes for
    itself it is always 0.
    """
    nvml = _loaded(library)
    if nvml is None:
        return None
    device, count = c_void_p(), c_uint(_MOST_PROCESSES)
    found = (_Process * _MOST_PROCESSES)()
    if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{UUID(bytes=uuid)}".encode(), byref(device)):
        return None
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, byref(count), found):
        return None
    used = [one.used_bytes for one in found[: count.value] if one.pid == os.getpid()]
    return sum(used) if _NOT_AVAILABLE not in used else None


@cache
def _loaded(library: str) -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL(library)
        nvml.nvmlDeviceGetHandleByUUID.argtypes = (c_char_p, POINTER(c_void_p))
        nvml.nvmlDeviceGetComputeRunningProcesses_v3.argtypes = (
            c_void_p, POINTER(c_uint), POINTER(_Process),
        )  # fmt: skip
        return nvml if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None
