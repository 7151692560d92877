"""What a context takes, by a management library that was built for the test."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from paramd.memory.device_usage import used_bytes
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
