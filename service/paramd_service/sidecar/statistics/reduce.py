"""Mergeable statistics of runs of equal elements, one run or many small ones at a time.

Memory is walked once, in pieces that fit the cores' cache; a few vector operations reduce each
piece while it is there. Sums are float64 across pieces and rows; within a row of 1,024 elements,
float32 vector lanes are exact enough (relative error below 1e-6). Counts, minima and maxima are
exact. In cache, numpy is faster at minima, maxima and zeros, torch at rows. Small tensors of one
length are reduced together, since they cost calls, not bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from paramd.errors import UsageError
from paramd.layout.dtypes import DTYPES
from paramd.layout.stats import COLUMNS, EMPTY, Runs
from paramd.v1 import sidecar_pb2 as pb

Column: TypeAlias = NDArray[np.int64]

EXPONENT_BEGIN = -64
EXPONENT_BINS = 128
"""Bins [-64, 64): weights and gradients lie far inside; the end bins collect the rest."""

BIASED_BINS = 256
"""Counts are kept by the biased exponent of a float32: e + 127."""

_MANTISSA_BITS = 23
_BIAS = 127

_PAIR_BINS = 1 << 15
_PAIRS_NUMEL = 1 << 16
"""Below this many elements, that many counters do not pay off."""

PIECE_BYTES = 1 << 20
"""Bytes reduced at a time; bounds temporary memory to a few times that. A tenth faster than
512 KiB, where the operations' overhead shows."""

MAX_EDGES = 513

_ROW = 1024
# If the mean contributes less than this part of the mean square, subtracting loses no digits.
_SMALL_MEAN = 0.05
# Below this mean square, squares of float32 numbers lose digits.
_TINY_SQUARE = 1e-30

_WIDENED: dict[str, torch.dtype] = {
    name: getattr(torch, one.reduced) for name, one in DTYPES.items() if one.reduced
}


def count_biased(values: torch.Tensor, zero_count: int) -> torch.Tensor:
    """Nonzero elements by biased exponent; int64 [256]. `values` are 1-D and finite, float32 or
    float64; the end bins count exponents beyond float32's."""
    if values.dtype != torch.float32:
        exponent = torch.frexp(values[values != 0]).exponent + (_BIAS - 1)
        return torch.bincount(exponent.clamp_(0, BIASED_BINS - 1), minlength=BIASED_BINS)
    # Shifting out the mantissa leaves sign and exponent; a byte has room for the latter.
    biased = (values.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
    counts = _count_bytes(biased)
    # Zeros and subnormals share the biased exponent 0.
    counts[0] -= zero_count
    return counts


def _count_bytes(values: torch.Tensor) -> torch.Tensor:
    """How often each byte occurs; int64 [256]."""
    if values.numel() < _PAIRS_NUMEL:
        return torch.bincount(values, minlength=BIASED_BINS)
    low, high = int(values.numpy().min()), int(values.numpy().max())
    # Pairs are read as signed numbers, so both bytes must be below 128: all |x| < 2.
    if high >= BIASED_BINS // 2:
        return torch.bincount(values, minlength=BIASED_BINS)
    even = values.numel() // 2 * 2
    pairs = torch.bincount(values[:even].view(torch.int16), minlength=_PAIR_BINS)
    used = slice(low, high + 1)
    table = pairs.numpy().reshape(BIASED_BINS // 2, BIASED_BINS)[used, used]
    counts = torch.bincount(values[even:], minlength=BIASED_BINS)
    counts[used] += torch.from_numpy(table.sum(axis=0) + table.sum(axis=1))
    return counts


def count_biased_rows(rows: torch.Tensor) -> torch.Tensor:
    """Nonzero elements of each row by biased exponent; [rows, columns] -> int64 [rows, 256]."""
    exponent = torch.frexp(rows).exponent.long() + (_BIAS - 1)
    bins = exponent.clamp_(0, BIASED_BINS - 1)
    bins += BIASED_BINS * torch.arange(len(rows))[:, None]
    counts = torch.bincount(bins[rows != 0], minlength=BIASED_BINS * len(rows))
    return counts.view(len(rows), BIASED_BINS)


def folded(biased: torch.Tensor) -> list[int]:
    """Counts of bins [EXPONENT_BEGIN, EXPONENT_BEGIN + EXPONENT_BINS), of int64 [256]."""
    first = EXPONENT_BEGIN + _BIAS
    counts = biased[first : first + EXPONENT_BINS].clone()
    counts[0] += biased[:first].sum()
    counts[-1] += biased[first + EXPONENT_BINS :].sum()
    bins: list[int] = counts.tolist()
    return bins


@dataclass(slots=True)
class Reduced:
    """Statistics of one item; fields as in `paramd.v1.Stats`."""

    count: int = 0
    zero_count: int = 0
    nan_count: int = 0
    inf_count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    sum_squares: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    exponents: torch.Tensor | None = None
    between: torch.Tensor | None = None
    """Counts below, between and above edges; see `paramd.v1.Stats.edge_counts`."""

    def add_moments(self, count: int, mean: float, m2: float, sum_squares: float) -> None:
        """Merge the moments of `count` more finite elements (Chan's rule)."""
        if count == 0:
            return
        before = self.finite_count
        delta = mean - self.mean
        total = before + count
        self.mean += delta * count / total
        self.m2 += m2 + delta * delta * before * count / total
        self.sum_squares += sum_squares

    @property
    def finite_count(self) -> int:
        return self.count - self.nan_count - self.inf_count

    def columns(self) -> dict[str, float]:
        """The numbers of `paramd.layout.stats.COLUMNS`, in order."""
        return {
            "count": self.count,
            "zero_count": self.zero_count,
            "nan_count": self.nan_count,
            "inf_count": self.inf_count,
            "mean": self.mean,
            "m2": self.m2,
            "sum_squares": self.sum_squares,
            "min": self.min,
            "max": self.max,
        }


def set_up() -> None:
    """Use one thread: the cores belong to training."""
    torch.set_num_threads(1)


def item_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        UsageError: If there are no statistics of that dtype.
    """
    if dtype not in _WIDENED:
        reason = " (complex numbers have no order)" if "complex" in dtype else ""
        raise UsageError(
            f"dtype: no statistics of {dtype!r}{reason}; expected one of {', '.join(_WIDENED)}"
        )
    return DTYPES[dtype].item_bytes


def widened(dtype: str) -> torch.dtype:
    """The dtype in which elements of `dtype` are reduced; check with `item_bytes` first."""
    return _WIDENED[dtype]


def make_edges(edges: Sequence[float]) -> torch.Tensor | None:
    """Edges to count between, or None when there are none.

    Raises:
        UsageError: If they are too many, not finite, or not strictly rising.
    """
    if not edges:
        return None
    rising = all(a < b for a, b in pairwise(edges))
    if len(edges) > MAX_EDGES or not rising or not all(map(math.isfinite, edges)):
        raise UsageError(
            f"edges: {len(edges)} given; expected at most {MAX_EDGES} finite numbers, each above "
            "the one before"
        )
    return torch.tensor(edges, dtype=torch.float64)


def reduce_run(
    data: memoryview,
    dtype: str,
    *,
    with_exponents: bool,
    edges: torch.Tensor | None = None,
    before: memoryview | None = None,
) -> Reduced:
    """Statistics of a run of elements: whole ones, at any alignment.

    `with_exponents` costs several times everything else; `edges` are `make_edges`'; `before`, of
    the same dtype and size, is subtracted.

    Raises:
        UsageError: There are no statistics of that dtype.
    """
    itemsize = item_bytes(dtype)
    result = Reduced(
        exponents=torch.zeros(BIASED_BINS, dtype=torch.int64) if with_exponents else None
    )
    numel = len(data) // itemsize
    piece_numel = PIECE_BYTES // _WIDENED[dtype].itemsize
    for begin in range(0, numel, piece_numel):
        end = min(begin + piece_numel, numel)
        raw = torch.frombuffer(data[begin * itemsize : end * itemsize], dtype=torch.uint8)
        piece = _widen(raw, dtype)
        if before is not None:
            raw = torch.frombuffer(before[begin * itemsize : end * itemsize], dtype=torch.uint8)
            piece = piece - _widen(raw, dtype)
        _add_piece(result, piece)
        if edges is not None:
            _add_between(result, piece, edges)
    return result


def add_elements(result: Reduced, elements: torch.Tensor, dtype: str) -> None:
    """Add the statistics of a tensor of `dtype`, small enough to be widened at once."""
    if elements.numel():
        _add_piece(result, elements.flatten().to(_WIDENED[dtype]))


def exponent_counts(result: Reduced) -> list[int]:
    """Counts of bins from EXPONENT_BEGIN on; empty if they were not counted."""
    return folded(result.exponents) if result.exponents is not None else []


def _widen(raw: torch.Tensor, dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if raw.data_ptr() % kind.itemsize:
        raw = raw.clone()
    return raw.view(kind).to(_WIDENED[dtype])


def _add_piece(result: Reduced, piece: torch.Tensor) -> None:
    array = piece.numpy()
    # If there is a NaN, both are NaN.
    low, high = float(array.min()), float(array.max())
    numel = piece.numel()
    finite = piece
    if not (math.isfinite(low) and math.isfinite(high)):
        nan_count = int(torch.isnan(piece).sum())
        finite = piece[torch.isfinite(piece)]
        result.nan_count += nan_count
        result.inf_count += numel - nan_count - finite.numel()
        result.count += numel - finite.numel()
        if finite.numel() == 0:
            return
        array = finite.numpy()
        low, high = float(array.min()), float(array.max())
    result.add_moments(finite.numel(), *_moments(finite))
    result.count += finite.numel()
    result.min, result.max = min(result.min, low), max(result.max, high)
    zero_count = int(np.count_nonzero(array == 0)) if low <= 0 <= high else 0
    result.zero_count += zero_count
    if result.exponents is not None:
        result.exponents += count_biased(finite, zero_count)


def _add_between(result: Reduced, piece: torch.Tensor, edges: torch.Tensor) -> None:
    finite = piece[torch.isfinite(piece)].double()
    bins = torch.bucketize(finite, edges, right=True)
    counts = torch.bincount(bins, minlength=len(edges) + 1)
    result.between = counts if result.between is None else result.between + counts


def _moments(values: torch.Tensor) -> tuple[float, float, float]:
    """Mean, sum of squared distances from it, sum of squares."""
    count = values.numel()
    mean = _sum(values) / count
    sum_squares = _sum_squares(values)
    if count * mean * mean <= _SMALL_MEAN * sum_squares:
        return mean, sum_squares - count * mean * mean, sum_squares
    # The mean dominates: subtract it first, or digits would cancel.
    distances = values.double() - mean
    correction = float(distances.sum()) / count
    m2 = float(distances.square().sum()) - count * correction * correction
    mean += correction
    return mean, max(m2, 0.0), max(m2, 0.0) + count * mean * mean


def _sum(values: torch.Tensor) -> float:
    whole = values.numel() // _ROW * _ROW
    rows = values[:whole].view(-1, _ROW).sum(dim=1)
    total = float(rows.numpy().sum(dtype=np.float64))
    if whole < values.numel():
        total += float(values[whole:].sum(dtype=torch.float64))
    # Rows of very large float32 numbers overflow.
    return total if math.isfinite(total) else float(values.double().sum())


def _sum_squares(values: torch.Tensor) -> float:
    whole = values.numel() // _ROW * _ROW
    # The norm of a row is one fused pass; squares of single elements would be two.
    rows = torch.linalg.vector_norm(values[:whole].view(-1, _ROW), dim=1)
    norms = rows.numpy().astype(np.float64)
    total = float(norms.dot(norms))
    if not _TINY_SQUARE * whole <= total < math.inf:
        return float(values.double().square().sum())
    if whole < values.numel():
        total += float(values[whole:].double().square().sum())
    return total


def stats_message(reduced: Reduced) -> pb.Stats:
    columns: dict[str, Any] = {**reduced.columns()}
    return pb.Stats(**columns, **_counts(reduced))


_NO_COUNTS: dict[str, Any] = {"exponent_begin": EXPONENT_BEGIN}


def _counts(reduced: Reduced) -> dict[str, Any]:
    between = reduced.between.tolist() if reduced.between is not None else ()
    return _NO_COUNTS | {"exponent_counts": exponent_counts(reduced), "edge_counts": between}


SMALL_NUMEL = 8192
"""Longest runs reduced together, as rows of one matrix per length."""

_LEAST_ROWS, _MOST_ROWS = 4, 4096


class Answers:
    """Statistics of runs, a column for each number."""

    def __init__(self, count: int) -> None:
        none = zip(COLUMNS, EMPTY[: len(COLUMNS)], strict=True)
        self._columns = {name: np.zeros(count, type(one)) for name, one in none}
        self.counts: dict[int, dict[str, Any]] = {}
        """Members of `pb.Stats` that are lists."""

    def put(self, numbers: Column | int, **columns: object) -> None:
        for name, column in columns.items():
            self._columns[name][numbers] = column

    def columns(self) -> pb.StatsColumns:
        return pb.StatsColumns(**{name: one.tolist() for name, one in self._columns.items()})

    def messages(self) -> list[pb.Stats]:
        """One for each run, in order."""
        rows = zip(*(one.tolist() for one in self._columns.values()), strict=True)
        return [
            pb.Stats(**dict(zip(COLUMNS, row, strict=True)), **self.counts.get(number, _NO_COUNTS))
            for number, row in enumerate(rows)
        ]


def reduce_runs(
    data: memoryview,
    runs: Sequence[Runs],
    *,
    with_exponents: bool,
    edges: torch.Tensor | None = None,
    before: memoryview | None = None,
    stop: Sequence[bool] = (),
) -> Answers:
    """Statistics of all runs, by what the runs call tensors.

    Args:
        data: The snapshot's bytes.
        runs: Runs of one dtype each.
        with_exponents: As in `reduce_run`; so are `edges` and `before`.
        stop: Once it is not empty, the work ends and the answers are unfinished.

    Raises:
        UsageError: A run leaves `data`, or there are no statistics of its dtype.
    """
    placed = [_Placed.of(some) for some in runs]
    for some in placed:
        some.check(len(data))
    answers = Answers(sum(len(some.numbers) for some in placed))
    for some in placed:
        left = np.ones(len(some.numbers), bool)
        if edges is None and before is None:
            for rows in _alike(some.numels):
                if stop:
                    break
                left[rows] = _reduce_rows(data, some.taken(rows), answers, with_exponents)
        for at in np.flatnonzero(left):
            if stop:
                break
            run = some.bytes_of(int(at))
            reduced = reduce_run(
                data[run],
                some.dtype,
                with_exponents=with_exponents,
                edges=edges,
                before=before[run] if before is not None else None,
            )
            number = int(some.numbers[at])
            answers.put(number, **reduced.columns())
            answers.counts[number] = _counts(reduced)
    return answers


@dataclass(frozen=True, slots=True)
class _Placed:
    """Runs of one dtype, as columns of equal length."""

    dtype: str
    numbers: Column
    """What the runs call tensors."""
    begins: Column
    """First bytes in the snapshot."""
    numels: Column

    @classmethod
    def of(cls, runs: Runs) -> _Placed:
        columns = (np.array(column, np.int64) for column in runs[1:])
        return cls(runs.dtype, *columns)

    def check(self, size_bytes: int) -> None:
        """Raise UsageError if a run leaves the snapshot, or has no statistics."""
        fit = (self.begins >= 0) & (self.begins <= size_bytes) & (self.numels >= 0)
        fit &= self.numels <= (size_bytes - self.begins) // item_bytes(self.dtype)
        if not fit.all():
            at = int(np.argmin(fit))
            raise UsageError(
                f"items: {self.numels[at]} elements of {self.dtype} from byte {self.begins[at]} "
                f"on leave the snapshot of {size_bytes} bytes"
            )

    def taken(self, rows: Column) -> _Placed:
        """Some of the runs, by their indices."""
        return _Placed(self.dtype, self.numbers[rows], self.begins[rows], self.numels[rows])

    def bytes_of(self, row: int) -> slice:
        """The bytes of one run in the snapshot."""
        begin = int(self.begins[row])
        return slice(begin, begin + int(self.numels[row]) * item_bytes(self.dtype))


def _alike(numels: Column) -> Iterator[Column]:
    """Indices of small runs of one length, where there are enough of them, some at a time."""
    small = np.flatnonzero((numels >= 1) & (numels <= SMALL_NUMEL))
    small = small[np.argsort(numels[small], kind="stable")]
    for alike in np.split(small, np.flatnonzero(np.diff(numels[small])) + 1):
        if len(alike) >= _LEAST_ROWS:
            most = min(max(PIECE_BYTES // 8 // int(numels[alike[0]]), _LEAST_ROWS), _MOST_ROWS)
            yield from np.split(alike, range(most, len(alike), most))


def _rows_of(data: memoryview, dtype: str, begins: Column, numel: int) -> torch.Tensor:
    """Copies of runs of one length, as rows; float64 [runs, numel]."""
    size_bytes = item_bytes(dtype) * numel
    # Every place where a row may begin, at any alignment: taking some of them copies whole rows.
    places = np.ndarray((len(data) - size_bytes + 1,), f"V{size_bytes}", data, strides=(1,))
    raw = torch.from_numpy(places[begins].view(np.uint8))
    return raw.view(getattr(torch, dtype)).view(len(begins), numel).double()


def _reduce_rows(
    data: memoryview, alike: _Placed, answers: Answers, with_exponents: bool
) -> NDArray[np.bool_]:
    """Answer runs of one length together; returns which have non-finite elements, and none yet."""
    numbers, numel = alike.numbers, int(alike.numels[0])
    rows = _rows_of(data, alike.dtype, alike.begins, numel)
    low, high = torch.amin(rows, dim=1), torch.amax(rows, dim=1)
    finite = torch.isfinite(low) & torch.isfinite(high)
    if not finite.all():
        numbers, rows, low, high = numbers[finite.numpy()], rows[finite], low[finite], high[finite]
    mean = rows.mean(dim=1)
    answers.put(
        numbers,
        count=numel,
        zero_count=numel - torch.count_nonzero(rows, dim=1).numpy(),
        mean=mean.numpy(),
        m2=(rows - mean[:, None]).square_().sum(dim=1).numpy(),
        sum_squares=torch.linalg.vector_norm(rows, dim=1).square_().numpy(),
        min=low.numpy(),
        max=high.numpy(),
    )
    if with_exponents:
        for number, counts in zip(numbers.tolist(), count_biased_rows(rows), strict=True):
            answers.counts[number] = _NO_COUNTS | {"exponent_counts": folded(counts)}
    return ~finite.numpy()


def warm_up() -> None:
    """Reduce once: the first reduction of a process takes tens of milliseconds."""
    reduce_run(memoryview(bytearray(4096)), "float32", with_exponents=True)
