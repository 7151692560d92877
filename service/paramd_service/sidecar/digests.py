"""Digests of a snapshot's bytes, by which replicas and states are compared.

XXH3 detects accidents (a flipped bit, a torn page, a stale shard), not deliberate forgery.
"""

from collections.abc import Sequence

import xxhash

BLOCK_BYTES = 8 << 20
"""Bytes hashed at a time; a cancelled call ends between two blocks."""


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
