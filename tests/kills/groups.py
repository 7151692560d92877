"""A memory group of the kernel (cgroup), v1 or v2: its limit, its use, and its kills."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

EMPTY_S = 60.0
"""How long the processes of a group may take to be gone once they are killed."""


class NoGroupError(Exception):
    """No memory group can be made there; the message says what was refused."""


class MemoryGroup:
    """One group that this program made, and what the kernel says of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_v2 = (folder / "memory.max").exists()

    @property
    def used_bytes(self) -> int:
        file = "memory.current" if self._is_v2 else "memory.usage_in_bytes"
        return int((self.folder / file).read_text())

    @property
    def killed_count(self) -> int:
        """How many of its processes the kernel has ended for memory."""
        file = "memory.events" if self._is_v2 else "memory.oom_control"
        for line in (self.folder / file).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        raise AssertionError(f"{self.folder} counts no kills")

    def limit(self, size_bytes: int | None) -> None:
        """Set the limit; None: there is none. The kernel ends processes here and now where a limit
        is below what cannot be given back."""
        if self._is_v2:
            (self.folder / "memory.max").write_text(
                "max" if size_bytes is None else str(size_bytes)
            )
        else:
            (self.folder / "memory.limit_in_bytes").write_text(str(size_bytes or -1))

    def remove(self) -> None:
        """Kill what is left in it, and take it away."""
        deadline_s = time.monotonic() + EMPTY_S
        while True:
            for text in (self.folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(text), signal.SIGKILL)
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
            else:
                return


@contextmanager
def memory_group(within: Path) -> Iterator[MemoryGroup]:
    """A new group without a limit; at the end its processes are killed and it is gone.

    Raises NoGroupError where none can be made.
    """
    folder = within / f"paramd-kills-{os.getpid()}"
    try:
        if (within / "cgroup.subtree_control").exists():
            (within / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as error:
        raise NoGroupError(f"no memory group can be made in {within}: {error}") from error
    group = MemoryGroup(folder)
    try:
        if not any((folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
            raise NoGroupError(f"{within} has no memory controller")
        yield group
    finally:
        group.remove()
