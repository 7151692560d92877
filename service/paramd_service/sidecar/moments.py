"""Statistics of a few megabytes of elements by numpy alone, which takes a tenth of torch's memory.

The control plane's watch samples so little that torch is not loaded for it. Whoever wants more, or
binary exponents, is answered by `statistics`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from paramd.errors import UsageError
from paramd.layout.stats import COLUMNS, Runs
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_BYTES: Final = 64 << 20
"""Most bytes that are reduced here: for more, torch is faster by more than it takes to load."""

ITEM_BYTES: Final = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Sizes of the dtypes that numpy can reduce here."""

PIECE_NUMEL: Final = 1 << 16
"""Elements reduced at a time, so that their float64 stay in the cores' cache."""

_NO_COUNTS: Final[dict[str, Any]] = {"exponent_begin": -64}
_NOTHING: Final[tuple[float, ...]] = (0, 0, 0, 0, 0.0, 0.0, 0.0, math.inf, -math.inf)
"""The columns of no element, as `EMPTY` of `paramd.layout.stats` has them."""


def fits(runs: Sequence[Runs]) -> bool:
    """Whether these are reduced here: torch is not loaded anyway, they are small and of dtypes that
    numpy knows."""
    if "torch" in sys.modules or any(one.dtype not in ITEM_BYTES for one in runs):
        return False
    return sum(ITEM_BYTES[one.dtype] * sum(one.numels) for one in runs) <= MOST_BYTES


class Answers:
    """Statistics of runs, by the numbers that the runs give them."""

    def __init__(self, count: int) -> None:
        self.rows = [_NOTHING] * count

    def columns(self) -> pb.StatsColumns:
        """One column for each number."""
        columns = zip(*self.rows, strict=True) if self.rows else ([] for _ in COLUMNS)
        return pb.StatsColumns(**dict(zip(COLUMNS, map(list, columns), strict=True)))

    def messages(self) -> list[pb.Stats]:
        """One for each run, in order."""
        named: list[dict[str, Any]] = [dict(zip(COLUMNS, row, strict=True)) for row in self.rows]
        return [pb.Stats(**_NO_COUNTS, **one) for one in named]


def reduce_runs(data: memoryview, runs: Sequence[Runs], *, stop: Sequence[bool] = ()) -> Answers:
    """Statistics of all runs; unfinished once `stop` is not empty.

    Raises:
        UsageError: If a run leaves `data`.
    """
    found = Answers(sum(len(one.tensors) for one in runs))
    for one in runs:
        size = ITEM_BYTES[one.dtype]
        for number, begin, numel in zip(one.tensors, one.begin_bytes, one.numels, strict=True):
            if stop:
                return found
            if not 0 <= begin <= len(data) or not 0 <= numel <= (len(data) - begin) // size:
                raise UsageError(
                    f"items: {numel} elements of {one.dtype} from byte {begin} on leave the "
                    f"snapshot of {len(data)} bytes"
                )
            found.rows[number] = _reduced(data[begin : begin + numel * size], one.dtype)
    return found


def _reduced(data: memoryview, dtype: str) -> tuple[float, ...]:
    import numpy as np

    count = zeros = nans = infs = 0
    mean = m2 = squares = 0.0
    low, high = math.inf, -math.inf
    size = ITEM_BYTES[dtype]
    for first in range(0, len(data), PIECE_NUMEL * size):
        piece = _widened(data[first : first + PIECE_NUMEL * size], dtype)
        count += len(piece)
        is_finite = np.isfinite(piece)
        if not is_finite.all():
            nan_count = int(np.isnan(piece).sum())
            finite = piece[is_finite]
            nans += nan_count
            infs += len(piece) - len(finite) - nan_count
            piece = finite
        if not len(piece):
            continue
        before = count - nans - infs - len(piece)
        own_mean = float(piece.mean())
        apart = piece - own_mean
        delta = own_mean - mean
        total = before + len(piece)
        # Chan's rule merges the moments of pieces without losing digits.
        mean += delta * len(piece) / total
        m2 += float(apart.dot(apart)) + delta * delta * before * len(piece) / total
        squares += float(piece.dot(piece))
        zeros += len(piece) - int(np.count_nonzero(piece))
        low, high = min(low, float(piece.min())), max(high, float(piece.max()))
    return count, zeros, nans, infs, mean, m2, squares, low, high


def _widened(data: memoryview, dtype: str) -> NDArray[np.float64]:
    """The elements as float64, which no sum of a piece overflows."""
    import numpy as np

    if dtype == "bfloat16":
        # The upper half of a float32.
        halves = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return halves.view(np.float32).astype(np.float64)
    return np.frombuffer(data, dtype).astype(np.float64)
