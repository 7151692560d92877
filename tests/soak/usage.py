"""Memory and descriptors of a process over time; a leak shows as a rise that goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

import psutil

MIB = 1 << 20


@dataclass
class Usage:
    """Samples of one process, in order."""

    name: str
    rss_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def sample(self, process: psutil.Process) -> None:
        self.rss_bytes.append(process.memory_info().rss)
        self.descriptors.append(process.num_fds())

    def complaint(self, *, rss_bytes: int, descriptors: int) -> str:
        """What rose by more than that from the first to the second half; empty when nothing.

        The lowest value of each half counts, for whatever is under way only adds to it.
        """
        found = []
        for what, values, most in (
            ("resident memory", self.rss_bytes, rss_bytes),
            ("descriptors", self.descriptors, descriptors),
        ):
            half = len(values) // 2
            if half >= 2 and min(values[half:]) - min(values[:half]) > most:
                found.append(f"{what} of {self.name} rose: {values}")
        return "; ".join(found)
