"""Records of one edit on several threads, where the machine has them and torch uses one.

Only for large edits: they are bound by memory, which one core does not fill. How many threads
torch uses is the user's own setting; torchrun makes it one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

LARGE_BYTES = 64 << 20
"""Below it the threads would not be worth their begin."""

MOST = 4

Work = TypeVar("Work")


def thread_count(size_bytes: int) -> int:
    """Threads for an edit that changes so much of this rank."""
    if size_bytes < LARGE_BYTES or torch.get_num_threads() > 1:
        return 1
    neighbours = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(neighbours) if neighbours.isdecimal() and int(neighbours) else 1
    return max(1, min(MOST, len(os.sched_getaffinity(0)) // ranks))


def run_on(threads: int, items: Iterable[Work], run: Callable[[Work], None]) -> None:
    """Runs all items, each once, on so many threads. Returns or raises when none runs any more.

    After one has raised no other is begun; that one's exception is raised.
    """
    left = deque(items)

    def work() -> None:
        # Gradient mode is each thread's own.
        with torch.no_grad():
            while left:
                try:
                    item = left.popleft()
                except IndexError:
                    return
                try:
                    run(item)
                except BaseException:
                    left.clear()
                    raise

    if threads == 1:
        work()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="paramd-edit") as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()
