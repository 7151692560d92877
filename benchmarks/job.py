"""Two training ranks and a client that the trainer-side benchmarks share."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.ranks import ObedientRanks

WORLD_SIZE = 2


@contextmanager
def reading(
    client: ObedientRanks, *, transport: str, bytes_per_s: float = 0.0
) -> Iterator[dict[str, float]]:
    """A client reads everything again and again while the block runs.

    The dict that is yielded is filled at the end: `count` of reads and `bytes_per_s`.
    """
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="paramd-bench-") as directory:
        stop = Path(directory) / "stop"
        client.tell("read_until", str(stop), transport, bytes_per_s)
        try:
            yield found
        finally:
            stop.touch()
            found |= client.update()[0]


def train_for(
    ranks: ObedientRanks, order: Sequence[int], *, seconds: float
) -> list[list[list[float]]]:
    """Steps in `order`, again and again for about `seconds`; for each rank what `train` says."""
    found: list[list[list[float]]] = [[] for _ in ranks.pids]
    end_s = time.perf_counter() + seconds
    while not found[0] or time.perf_counter() < end_s:
        for rank, steps in enumerate(ranks.call("train", list(order))):
            found[rank] += steps
    return found
