"""Statistics of a few megabytes of elements by numpy alone, which takes a tenth of torch's memory.

The control plane's watch samples so little that torch is not loaded for it. Whoever wants more, or
binary exponents, is answered by `statistics`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
    if "torch" in sys.modules or any(some.dtype not in ITEM_BYTES for some in runs):
        return False
    return sum(ITEM_BYTES[some.dtype] * sum(some.numels) for some in runs) <= MOST_BYTES


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
        return [pb.Stats(**_NO_COUNTS, **columns) for columns in named]


def reduce_runs(data: memoryview, runs: Sequence[Runs], *, stop: Sequence[bool] = ()) -> Answers:
    """Statistics of all runs; unfinished once `stop` is not empty.

    Raises:
        UsageError: If a run leaves `data`.
    """
    answers = Answers(sum(len(some.tensors) for some in runs))
    for some in runs:
        size = ITEM_BYTES[some.dtype]
        for number, begin, numel in zip(some.tensors, some.begin_bytes, some.numels, strict=True):
            if stop:
                return answers
            if not 0 <= begin <= len(data) or not 0 <= numel <= (len(data) - begin) // size:
                raise UsageError(
                    f"items: {numel} elements of {some.dtype} from byte {begin} on leave the "
                    f"snapshot of {len(data)} bytes"
                )
            answers.rows[number] = _reduced(data[begin : begin + numel * size], some.dtype)
    return answers


def _reduced(data: memoryview, dtype: str) -> tuple[float, ...]:
    """The columns of one run."""
    sums = _Sums()
    size = ITEM_BYTES[dtype]
    for first in range(0, len(data), PIECE_NUMEL * size):
        piece = _widened(data[first : first + PIECE_NUMEL * size], dtype)
        finite = sums.without_nonfinite(piece)
        if len(finite):
            sums.add(finite)
    return sums.row()


@dataclass(slots=True)
class _Sums:
    """What is known of the pieces of one run so far."""

    finite_count: int = 0
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    mean: float = 0.0
    m2: float = 0.0
    """Sum of squared distances from the mean."""
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def without_nonfinite(self, piece: NDArray[np.float64]) -> NDArray[np.float64]:
        """The finite elements of a piece, with its others counted."""
        import numpy as np

        is_finite = np.isfinite(piece)
        if is_finite.all():
            return piece
        finite: NDArray[np.float64] = piece[is_finite]
        nan_count = int(np.isnan(piece).sum())
        self.nans += nan_count
        self.infs += len(piece) - len(finite) - nan_count
        return finite

    def add(self, finite: NDArray[np.float64]) -> None:
        """Add elements: at least one, all of them finite."""
        import numpy as np

        before = self.finite_count
        self.finite_count = total = before + len(finite)
        own_mean = float(finite.mean())
        distances = finite - own_mean
        delta = own_mean - self.mean
        # Chan's rule merges the moments of pieces without losing digits.
        self.mean += delta * len(finite) / total
        self.m2 += float(distances.dot(distances)) + delta * delta * before * len(finite) / total
        self.squares += float(finite.dot(finite))
        self.zeros += len(finite) - int(np.count_nonzero(finite))
        self.low = min(self.low, float(finite.min()))
        self.high = max(self.high, float(finite.max()))

    def row(self) -> tuple[float, ...]:
        """The columns of `paramd.layout.stats.COLUMNS`, in order."""
        count = self.finite_count + self.nans + self.infs
        counts = (count, self.zeros, self.nans, self.infs)
        return (*counts, self.mean, self.m2, self.squares, self.low, self.high)


def _widened(data: memoryview, dtype: str) -> NDArray[np.float64]:
    """The elements as float64, which no sum of a piece overflows."""
    import numpy as np

    if dtype == "bfloat16":
        # The upper half of a float32.
        halves = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return halves.view(np.float32).astype(np.float64)
    return np.frombuffer(data, dtype).astype(np.float64)
