"""ComputeStats, PoolSnapshot and DigestSnapshot: check the items, then reduce them on a thread.

Torch is loaded on first use. Digests compare replicas: XXH3 detects accidents (a flipped bit, a
torn page, a stale shard), not deliberate forgery; only the trainer writes an arena.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import xxhash

from paramd.errors import UsageError
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.aio import uncancelled
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.auth import SpanMessage
from paramd_service.sidecar.snapshots.store import Snapshot

MAX_RANGES = 100_000
DIGEST_BYTES = 16
BLOCK_BYTES = 8 << 20
"""Bytes hashed at a time; a cancelled call ends between two blocks."""


async def digest_snapshot(
    rank: RankSidecar, snapshot: Snapshot, ranges: Sequence[SpanMessage]
) -> list[bytes]:
    """One digest of `DIGEST_BYTES` per range. The caller must hold the snapshot.

    Cancellation waits for the thread, which reads the snapshot's memory.

    Raises:
        UsageError: too many ranges, or one that leaves the snapshot.
    """
    parts = checked_ranges(ranges, snapshot.size_bytes)
    data = snapshot.view()
    return await on_stats_thread(rank, lambda stop: digest_all(data, parts, stop))


def checked_ranges(ranges: Sequence[SpanMessage], size_bytes: int) -> list[tuple[int, int]]:
    """The ranges as pairs, all within [0, size_bytes).

    Raises:
        UsageError: too many, or one that leaves the snapshot.
    """
    if len(ranges) > MAX_RANGES:
        raise UsageError(f"ranges: {len(ranges):,}; expected at most {MAX_RANGES:,}")
    for part in ranges:
        if not 0 <= part.begin <= part.end <= size_bytes:
            raise UsageError(
                f"ranges: [{part.begin}, {part.end}); expected one within the snapshot's "
                f"{size_bytes} bytes"
            )
    return [(part.begin, part.end) for part in ranges]


def digest_all(
    data: memoryview, parts: Sequence[tuple[int, int]], stop: Sequence[bool] = ()
) -> list[bytes]:
    """Digests of half-open byte ranges of `data`; ends early once `stop` is not empty."""
    digests: list[bytes] = []
    for begin, end in parts:
        state = xxhash.xxh3_128()
        for first in range(begin, end, BLOCK_BYTES):
            if stop:
                return digests
            state.update(data[first : min(first + BLOCK_BYTES, end)])
        digests.append(state.digest())
    return digests


MAX_POOL_ITEMS = 4096

_MODES = {
    pb.POOL_MODE_SUM: "sum",
    pb.POOL_MODE_MIN: "min",
    pb.POOL_MODE_MAX: "max",
    pb.POOL_MODE_ABSMAX: "absmax",
}

Answer = TypeVar("Answer")


async def compute_stats(
    rank: RankSidecar,
    snapshot: Snapshot,
    items: Sequence[pb.StatsItem],
    *,
    with_exponents: bool,
    edges: Sequence[float] = (),
    before: Snapshot | None = None,
) -> list[pb.Stats]:
    """One answer per item, in order. The caller must hold the snapshots until it returns.

    With `before`, of the differences to that snapshot.

    Cancellation takes effect between two items and waits for the thread, which reads the
    snapshot's memory.

    Raises:
        UsageError: an item leaves the snapshot, its dtype has no statistics, or the snapshots
            have different sizes.
    """
    data = snapshot.view()
    if before is not None and before.size_bytes != snapshot.size_bytes:
        raise UsageError(
            f"before_snapshot_id: a snapshot of {before.size_bytes} bytes; expected one of the "
            f"same spans, {snapshot.size_bytes} bytes"
        )
    subtracted = before.view() if before is not None else None
    return await on_stats_thread(
        rank, lambda stop: _reduce_all(rank, data, subtracted, items, with_exponents, edges, stop)
    )


async def pool_snapshot(
    rank: RankSidecar, snapshot: Snapshot, request: pb.PoolSnapshotRequest
) -> pb.PoolSnapshotResponse:
    """A heat map of the items, with an empty header. The caller must hold the snapshot.

    Raises:
        UsageError: an item leaves the snapshot or the matrix, or something is out of range.
    """
    if len(request.items) > MAX_POOL_ITEMS:
        raise UsageError(f"items: {len(request.items)}; expected at most {MAX_POOL_ITEMS}")
    data = snapshot.view()
    return await on_stats_thread(rank, lambda stop: _pool(rank, data, request, stop))


async def on_stats_thread(rank: RankSidecar, work: Callable[[Sequence[bool]], Answer]) -> Answer:
    """Run `work` off the event loop; it should end early once its argument is not empty."""
    stop: list[bool] = []
    running = asyncio.get_running_loop().run_in_executor(rank.stats_executor, work, stop)
    return await uncancelled(running, lambda: stop.append(True))


def _reduce_all(
    rank: RankSidecar,
    data: memoryview,
    before: memoryview | None,
    items: Sequence[pb.StatsItem],
    with_exponents: bool,
    edges: Sequence[float],
    stop: Sequence[bool],
) -> list[pb.Stats]:
    from paramd_service.sidecar.statistics import reduce

    reduce.set_up()
    between = reduce.make_edges(edges)
    sizes = [reduce.item_bytes(item.dtype) for item in items]
    runs = [_run_of(data, item, size) for item, size in zip(items, sizes, strict=True)]
    answers = []
    for item, run, size in zip(items, runs, sizes, strict=True):
        if stop:
            break
        reduced = reduce.reduce_run(
            run,
            item.dtype,
            with_exponents=with_exponents,
            edges=between,
            before=_run_of(before, item, size) if before is not None else None,
        )
        answers.append(reduce.stats_message(reduced))
        rank.faults.at("stats-item")
    return answers


def _pool(
    rank: RankSidecar, data: memoryview, request: pb.PoolSnapshotRequest, stop: Sequence[bool]
) -> pb.PoolSnapshotResponse:
    from paramd_service.sidecar.statistics import pooling, reduce

    reduce.set_up()
    reduce.item_bytes(request.dtype)
    mode = _MODES.get(request.mode)
    if mode is None:
        raise UsageError(f"mode: {request.mode}; expected one of {', '.join(_MODES.values())}")
    grid = pooling.Grid(
        mode, request.row_count, request.col_count, request.cell_row_count, request.cell_col_count
    )
    views = [
        pooling.make_view(
            item.begin_bytes,
            item.sizes,
            item.strides,
            item.steps,
            row_dims=item.row_dims,
            origin=(item.row_begin, item.col_begin),
            grid=grid,
            data_bytes=len(data),
            dtype=request.dtype,
        )
        for item in request.items
    ]
    rank.faults.at("pool")
    heatmap = pooling.pool(data, request.dtype, grid, views, lambda: bool(stop))
    height, width = heatmap.values.shape
    return pb.PoolSnapshotResponse(
        cell_row_begin=heatmap.begin[0],
        cell_col_begin=heatmap.begin[1],
        cell_row_count=height,
        cell_col_count=width,
        values=heatmap.values.flatten().tolist(),
        counts=heatmap.counts.flatten().tolist(),
        nonfinite_counts=heatmap.nonfinite.flatten().tolist() if heatmap.nonfinite.any() else (),
    )


def _run_of(data: memoryview, item: pb.StatsItem, itemsize: int) -> memoryview:
    size_bytes = item.numel * itemsize
    if not (0 <= item.begin_bytes <= len(data) and 0 <= size_bytes <= len(data) - item.begin_bytes):
        raise UsageError(
            f"items: {item.numel} elements of {item.dtype} from byte {item.begin_bytes} on leave "
            f"the snapshot of {len(data)} bytes"
        )
    return data[item.begin_bytes : item.begin_bytes + size_bytes]
