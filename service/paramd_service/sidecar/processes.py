"""What /proc says of a process of this host."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_state(pid: int) -> str:
    """Its state as one letter ("R", "S", "T", ...); empty when it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2][1:2]


def resident_bytes(pid: int) -> int:
    """Its resident memory; 0 when it cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0
