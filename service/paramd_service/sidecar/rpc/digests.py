"""DigestSnapshot: hashes ranges of a snapshot on a thread, so that replicas can be compared.

XXH3 detects accidents (a flipped bit, a torn page, a stale shard). It is no protection against
deliberate forgery; only the trainer writes an arena.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import xxhash

from paramd.errors import UsageError
from paramd_service.aio import uncancelled
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.limits import SpanMessage
from paramd_service.sidecar.snapshots.blocks import Snapshot

MAX_RANGES = 100_000
DIGEST_BYTES = 16
BLOCK_BYTES = 8 << 20
"""Hashed at a time; a cancelled call ends between two blocks."""


async def digest_snapshot(
    rank: RankSidecar, snapshot: Snapshot, ranges: Sequence[SpanMessage]
) -> list[bytes]:
    """One digest of `DIGEST_BYTES` per range. The caller must hold the snapshot.

    Cancellation waits for the thread, which reads the snapshot's memory.

    Raises:
        UsageError: too many ranges, or one that leaves the snapshot.
    """
    parts = checked_ranges(ranges, snapshot.size_bytes)
    stop: list[bool] = []
    work = asyncio.get_running_loop().run_in_executor(
        rank.stats_executor, digest_all, snapshot.view(), parts, stop
    )
    return await uncancelled(work, lambda: stop.append(True))


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
    """Digests of half-open byte ranges of `data`; what is left is skipped once `stop` is set."""
    digests: list[bytes] = []
    for begin, end in parts:
        state = xxhash.xxh3_128()
        for first in range(begin, end, BLOCK_BYTES):
            if stop:
                return digests
            state.update(data[first : min(first + BLOCK_BYTES, end)])
        digests.append(state.digest())
    return digests
