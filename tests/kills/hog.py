"""Another program of the host, which takes its memory until the kernel has ended a process for it.

It takes pages in parts, so that the kernel's kill is seen before much more is taken. Then it prints
a line. For each line of its stdin it takes or gives back until so many MiB are available, and
prints one again. It ends with its stdin.
"""

import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

from paramd.memory.left import kills_now, memory_now

PART_BYTES = 2 << 20


def part() -> mmap.mmap:
    taken = mmap.mmap(-1, PART_BYTES)
    # Each page has to be there.
    taken[:: mmap.PAGESIZE] = b"1" * (PART_BYTES // mmap.PAGESIZE)
    return taken


def settle(taken: list[mmap.mmap], left_bytes: int) -> None:
    """Take or give back until so much is left."""
    while (now_bytes := memory_now().left_bytes) >= left_bytes + PART_BYTES:
        taken.append(part())
    for _ in range(max(0, left_bytes - now_bytes) // PART_BYTES):
        taken.pop().close()


def main() -> None:
    # As a trainer's: it is a victim no sooner.
    assert Path("/proc/self/oom_score_adj").read_text().strip() == "0"
    with suppress(OSError):
        # Root: a small host has one core, which all others want, too.
        os.nice(-10)
    taken: list[mmap.mmap] = []
    kills = kills_now().host_count
    while kills_now().host_count == kills:
        taken.append(part())
    print(len(taken), flush=True)
    for line in sys.stdin:
        settle(taken, int(line) << 20)
        print(len(taken), flush=True)


if __name__ == "__main__":
    main()
