"""An edit's incoming data: copied, digested and checked, in order, block by block.

The checks read the staged copy, shared only with the trainer, so a sender cannot change what was
checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import xxhash

from paramd.errors import UsageError
from paramd.layout.dtypes import DTYPES, item_bytes
from paramd.wire import Chunk

Fill = Callable[[int, int, int], None]
"""(address, begin, size) -> None: writes bytes [begin, begin + size) of a part to an address.

Called for the whole part, in blocks and in order; if the first call raises, nothing was written.
"""

Part: TypeAlias = tuple[int, int, Fill]
"""Offset and size in bytes, and the function that writes it."""

_GRAIN = 64
"""Blocks end at multiples of this, so that no element is split."""

_BLOCK_BYTES = 512 << 10
"""Bytes copied, checked and digested at a time: they stay in a core's cache."""

_EXPONENTS = {name: (one.item_bytes, one.exponent) for name, one in DTYPES.items() if one.exponent}
"""Element size in bytes, and the mask of exponent bits: all set in NaN and infinities."""


@dataclass(frozen=True, slots=True)
class DataRange:
    """Elements of one item: [begin, end) in bytes of the rank's data."""

    op: int
    begin: int
    end: int
    dtype: str
    fqn: str


class NonfiniteError(UsageError):
    """An edit's data holds NaN or infinities that were not explicitly allowed."""


class Intake:
    """The incoming data of one edit. Used by one thread at a time."""

    def __init__(
        self,
        memory: memoryview,
        address: int,
        ranges: Sequence[DataRange],
        *,
        op_count: int,
        allow_nonfinite: bool,
    ) -> None:
        """`memory`: the bytes at `address`, where the data goes; `ranges` are sorted."""
        self.size_bytes = memory.nbytes
        self.staged_bytes = 0
        """Bytes present without a gap from the start."""
        self._memory = memory
        self._address = address
        self._ranges = ranges
        self._allow_nonfinite = allow_nonfinite
        self._digests = [xxhash.xxh3_128() for _ in range(op_count)]
        self._verified = 0
        self._next = 0

    def take_all(self, parts: Iterable[Part]) -> None:
        """Take each part in order; see `take`."""
        for part in parts:
            self.take(*part)

    def take(self, offset_bytes: int, size_bytes: int, fill: Fill) -> None:
        """Take bytes [offset, offset + size); a part that is already there is ignored.

        Raises:
            UsageError: a gap, or beyond the end.
            NonfiniteError: numbers that are not finite; the intake is unusable afterwards.
        """
        end = offset_bytes + size_bytes
        if 0 <= offset_bytes <= end <= self.staged_bytes:
            return
        if offset_bytes != self.staged_bytes or not offset_bytes <= end <= self.size_bytes:
            raise UsageError(
                f"offset_bytes: {size_bytes} bytes from {offset_bytes} on; {self.staged_bytes} of "
                f"{self.size_bytes} are staged, so continue there"
            )
        for at in range(offset_bytes, end, _BLOCK_BYTES):
            block_end = min(at + _BLOCK_BYTES, end)
            fill(self._address + at, at - offset_bytes, block_end - at)
            whole = block_end == self.size_bytes
            self._verify(block_end if whole else block_end // _GRAIN * _GRAIN)
            self.staged_bytes = block_end

    def digests(self) -> list[bytes]:
        """XXH3 (128 bit, canonical) of each operation's data, once all of it is there."""
        assert self.staged_bytes == self.size_bytes
        return [state.digest() for state in self._digests]

    def _verify(self, end: int) -> None:
        while self._next < len(self._ranges):
            part = self._ranges[self._next]
            low, high = max(part.begin, self._verified), min(part.end, end)
            if low < high:
                block = self._memory[low:high]
                if not self._allow_nonfinite and not is_finite(block, part.dtype):
                    raise NonfiniteError(_nonfinite(block, part, low))
                self._digests[part.op].update(block)
            if part.end > end:
                break
            self._next += 1
        self._verified = end


def copy_of(chunk: Chunk) -> Fill:
    """A `Fill` from bytes received over the network.

    Raises:
        DataLossError: on the first call, if they do not match their checksum.
    """

    def fill(target: int, begin: int, size_bytes: int) -> None:
        if begin == 0:
            chunk.check()
        ctypes.memmove(target, chunk.address + begin, size_bytes)

    return fill


def is_finite(block: memoryview, dtype: str) -> bool:
    """Whether no element is NaN or infinite; dtypes without such numbers always pass.

    Loads numpy on first use. The block begins at a multiple of 64 bytes.
    """
    if not block.nbytes or dtype not in _EXPONENTS:
        return True
    size, exponent = _EXPONENTS[dtype]
    sign = 1 << 8 * size - 1
    np = _numpy()
    # As integers: two maxima over the cached block are faster than any elementwise test.
    # Positive non-finite numbers are the largest as signed, negative ones as unsigned.
    return (
        int(np.frombuffer(block, f"i{size}").max()) < exponent
        and int(np.frombuffer(block, f"u{size}").max()) < sign | exponent
    )


def _nonfinite(block: memoryview, part: DataRange, low: int) -> str:
    np = _numpy()
    size, exponent = _EXPONENTS[part.dtype]
    bad = (np.frombuffer(block, f"u{size}") & exponent) == exponent
    first = (low - part.begin) // item_bytes(part.dtype) + int(bad.argmax())
    return (
        f"the data for {part.fqn!r} holds NaN or infinite numbers, first at element {first} of "
        "this rank's part; an admin may allow that with allow_nonfinite"
    )


def _numpy() -> Any:
    import numpy as np

    return np
