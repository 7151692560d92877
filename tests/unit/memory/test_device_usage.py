"""What a context takes, by a management library that was built for the test."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from paramd.memory.device_arena import DeviceReader
from paramd.memory.device_driver import used_bytes
from paramd_service.sidecar.rpc.service import _context_samples
from tests.needs import program

UUID = bytes(range(16))
SOURCE = """
#include <string.h>
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } Process;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  *device = &nvmlInit_v2;
  return strcmp(uuid, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f") != 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *found) {
  if (device != &nvmlInit_v2 || *count < 2) return 7;
  found[0] = (Process){1, 5, -1, -1};
  found[1] = (Process){OURS, USED, -1, -1};
  *count = 2;
  return 0;
}
"""


def built(folder: Path, ours: int, used: str) -> str:
    source, library = folder / "nvml.c", folder / f"libnvml-{ours}-{used}.so"
    source.write_text(SOURCE.replace("OURS", str(ours)).replace("USED", used))
    command = [program("cc"), "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    return str(library)


def test_what_this_process_takes_is_told_of_the_device_that_is_meant(tmp_path: Path) -> None:
    library = built(tmp_path, os.getpid(), "123456789012ULL")
    assert used_bytes(UUID, library) == 123_456_789_012
    assert used_bytes(bytes(16), library) is None


def test_a_process_that_is_not_listed_takes_nothing_and_one_without_a_number_is_not_told_of(
    tmp_path: Path,
) -> None:
    assert used_bytes(UUID, built(tmp_path, 2, "7")) == 0
    assert used_bytes(UUID, built(tmp_path, os.getpid(), "-1")) is None


def test_without_the_library_nothing_is_told() -> None:
    assert used_bytes(UUID, "/no/libnvidia-ml.so") is None


def test_a_metric_tells_of_a_context_and_is_absent_where_nobody_does() -> None:
    known, unknown = SimpleNamespace(context_bytes=300), SimpleNamespace(context_bytes=None)
    ((name, _, value),) = _context_samples(cast(DeviceReader, known))
    assert (name, value) == ("device_context_bytes", 300)
    assert _context_samples(cast(DeviceReader, unknown)) == _context_samples(None) == []
