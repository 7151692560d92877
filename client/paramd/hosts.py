"""Names of this host and of its processes."""

from __future__ import annotations

import socket
from pathlib import Path


def host_id() -> str:
    """Names the running kernel, so that programs of one host know each other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 when it has ended or never was.

    With the pid it names a process for ever, for pids are used again. A zombie has ended.
    """
    # The command name may hold spaces and brackets; what follows the last bracket is regular.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[19]) if fields[0] not in "ZX" else 0
