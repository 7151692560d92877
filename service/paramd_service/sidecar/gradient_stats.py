"""Statistics of many runs of elements at once: small tensors cost calls, not bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar import stats
from paramd_service.sidecar.stats_answers import stats_message

Read = Callable[[int, int], memoryview]
"""Bytes [begin, end) of a room."""


def reduce_items(
    read: Read, items: Sequence[tuple[int, pb.StatsItem]], *, with_exponents: bool
) -> list[pb.Stats]:
    """One answer for each (first byte, item), in order."""
    found = []
    for begin, item in items:
        run = read(begin, begin + item.numel * stats.item_bytes(item.dtype))
        found.append(
            stats_message(stats.reduce_run(run, item.dtype, with_exponents=with_exponents))
        )
    return found


def warm_up() -> None:
    """The first reduction of a process takes tens of milliseconds."""
    stats.reduce_run(memoryview(bytearray(4096)), "float32", with_exponents=True)
