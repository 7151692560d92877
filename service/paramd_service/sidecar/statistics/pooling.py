"""Strided views of a snapshot, a cache-sized block at a time: shrunk to the cells of a heat map,
profiled as a matrix, or multiplied.

Rows and columns rise along a view's dims, so the elements of a cell are runs of rows and columns:
each block is reduced over its rows first, then over its columns. The product with a narrow matrix,
in float64, is what a randomised decomposition needs of a weight: spectra are found from shards
without moving them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from paramd.errors import UsageError
from paramd_service.sidecar.statistics.reduce import item_bytes, widened

BLOCK_NUMEL = 128 << 10
"""Elements reduced at a time; bounds temporary memory to a few times that."""

_BLOCK_COLUMNS = 16 << 10

_NEUTRAL = {"sum": 0.0, "min": math.inf, "max": -math.inf, "absmax": 0.0}

Starts: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"
"""Where runs of rows (or columns) of one cell begin in a block."""

# Elements are gathered as words of their size, which works for every dtype.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

MAX_CELLS = 512
"""Most cells of a heat map in each direction."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix, and the heat map that it is reduced to."""

    mode: str
    """sum, min, max or absmax."""
    rows: int
    columns: int
    cell_rows: int
    cell_columns: int

    def __post_init__(self) -> None:
        for name, cells, size in (
            ("cell_row_count", self.cell_rows, self.rows),
            ("cell_col_count", self.cell_columns, self.columns),
        ):
            if not 1 <= cells <= min(MAX_CELLS, size):
                raise UsageError(
                    f"{name}: {cells}; expected 1 to {MAX_CELLS} and at most the {size} that the "
                    "matrix has"
                )


@dataclass(frozen=True, slots=True)
class Axis:
    """One side of a view: the matrix rows (or columns) of its positions."""

    begin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def last(self) -> int:
        """Row of the last position."""
        return self.begin + sum((s - 1) * p for s, p in zip(self.sizes, self.steps, strict=True))

    @property
    def rises(self) -> bool:
        """Whether positions are distinct rows in rising order."""
        pairs = list(zip(self.sizes, self.steps, strict=True))
        return all(
            step > sum((s - 1) * p for s, p in pairs[dim + 1 :])
            for dim, (size, step) in enumerate(pairs)
            if size > 1
        )

    def index(self, begin: int, end: int) -> torch.Tensor:
        """Rows of the matrix of positions [begin, end), int64, rising."""
        return self._weighted(self.steps, begin, end) + self.begin

    def offset(self, begin: int, end: int) -> torch.Tensor:
        """Offsets of those positions from the view's first element, in elements of the snapshot."""
        return self._weighted(self.strides, begin, end)

    def _weighted(self, weights: Sequence[int], begin: int, end: int) -> torch.Tensor:
        position = torch.arange(begin, end)
        total = torch.zeros_like(position)
        for size, weight in zip(reversed(self.sizes), reversed(weights), strict=True):
            total += position % size * weight
            position = position // size
        return total


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a snapshot within the matrix; see `paramd.v1.PoolItem`."""

    begin_bytes: int
    rows: Axis
    columns: Axis

    @property
    def cover_numel(self) -> int:
        """Elements of the snapshot from the view's first to its last, inclusive."""
        return 1 + sum(
            (size - 1) * stride
            for axis in (self.rows, self.columns)
            for size, stride in zip(axis.sizes, axis.strides, strict=True)
        )


@dataclass(slots=True)
class Heatmap:
    """The cells reduced so far, [rows, columns]."""

    values: torch.Tensor
    counts: torch.Tensor
    nonfinite: torch.Tensor
    begin: tuple[int, int]
    """First row and column of cells."""


def make_view(
    begin_bytes: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    steps: Sequence[int],
    *,
    row_dims: int,
    origin: tuple[int, int],
    grid: Grid,
    data_bytes: int,
    dtype: str,
) -> View:
    """Make a view, checked against the snapshot and the matrix.

    Raises:
        UsageError: If it is malformed or exceeds one of them.
    """
    if not (len(sizes) == len(strides) == len(steps) <= 16 and 0 <= row_dims <= len(sizes)):
        raise UsageError("items: sizes, strides and steps must be equally many, at most 16")
    if any(s < 1 or t < 0 or p < 0 for s, t, p in zip(sizes, strides, steps, strict=True)):
        raise UsageError("items: sizes must be above 0, strides and steps not below")
    rows, columns = (
        Axis(begin, tuple(sizes[part]), tuple(strides[part]), tuple(steps[part]))
        for begin, part in zip(origin, (slice(row_dims), slice(row_dims, None)), strict=True)
    )
    view = View(begin_bytes, rows, columns)
    if not 0 <= begin_bytes <= data_bytes - view.cover_numel * item_bytes(dtype):
        raise UsageError(f"items: a view from byte {begin_bytes} on leaves the snapshot")
    fits = all(0 <= axis.begin <= axis.last for axis in (rows, columns))
    fits = fits and rows.last < grid.rows and columns.last < grid.columns
    if not fits or not rows.rises or not columns.rises:
        raise UsageError("items: a view leaves the matrix, or its steps do not rise")
    return view


def pool(
    data: memoryview, dtype: str, grid: Grid, views: Sequence[View], stopped: Callable[[], bool]
) -> Heatmap:
    """Reduce all views to the rectangle of cells that they touch. `stopped` is checked between
    blocks; true ends the work, and the result is useless."""
    sides = ((grid.cell_rows, grid.rows), (grid.cell_columns, grid.columns))
    heatmap = _empty(grid, views, sides)
    for view in views:
        for block, rows, columns in blocks(data, dtype, view):
            if stopped():
                return heatmap
            cells = [
                index * cell_count // count - begin
                for index, (cell_count, count), begin in zip(
                    (rows, columns), sides, heatmap.begin, strict=True
                )
            ]
            _add(heatmap, grid.mode, block.to(widened(dtype)), *cells)
    return heatmap


def _empty(grid: Grid, views: Sequence[View], sides: Sequence[tuple[int, int]]) -> Heatmap:
    """An empty heatmap of the rectangle of cells that the views touch."""
    begins, sizes = [], []
    for number, (cell_count, count) in enumerate(sides):
        axes = [view.columns if number else view.rows for view in views]
        begin = min((axis.begin * cell_count // count for axis in axes), default=0)
        end = max((axis.last * cell_count // count + 1 for axis in axes), default=0)
        begins.append(begin)
        sizes.append(end - begin)
    return Heatmap(
        torch.full(sizes, _NEUTRAL[grid.mode], dtype=torch.float64),
        torch.zeros(sizes, dtype=torch.int64),
        torch.zeros(sizes, dtype=torch.int64),
        (begins[0], begins[1]),
    )


def blocks(
    data: memoryview, dtype: str, view: View
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """2-D blocks of at most `BLOCK_NUMEL` elements, with their rows and columns."""
    kind: torch.dtype = getattr(torch, dtype)
    end = view.begin_bytes + view.cover_numel * kind.itemsize
    raw = torch.frombuffer(data[view.begin_bytes : end], dtype=torch.uint8)
    if raw.data_ptr() % kind.itemsize:
        raw = raw.clone()
    dense = _as_matrix(raw.view(kind), view)
    words = raw.view(WORDS[kind.itemsize])
    row_count, column_count = view.rows.count, view.columns.count
    width = min(column_count, _BLOCK_COLUMNS)
    height = max(1, BLOCK_NUMEL // width)
    for top in range(0, row_count, height):
        bottom = min(top + height, row_count)
        for left in range(0, column_count, width):
            right = min(left + width, column_count)
            if dense is not None:
                block = dense[top:bottom, left:right]
            else:
                offset = view.rows.offset(top, bottom)[:, None] + view.columns.offset(left, right)
                block = words[offset].view(kind)
            yield block, view.rows.index(top, bottom), view.columns.index(left, right)


def _as_matrix(elements: torch.Tensor, view: View) -> torch.Tensor | None:
    """[rows, columns] without a copy, or None when the view's strides do not allow it."""
    rows, columns = view.rows, view.columns
    strided = elements.as_strided((*rows.sizes, *columns.sizes), (*rows.strides, *columns.strides))
    try:
        return strided.view(rows.count, columns.count)
    except RuntimeError:
        return None


def _add(
    heatmap: Heatmap, mode: str, block: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> None:
    """Add a block, whose rows and columns belong to the given cells."""
    touched_rows, row_counts = torch.unique_consecutive(rows, return_counts=True)
    touched_columns, column_counts = torch.unique_consecutive(columns, return_counts=True)
    window = (touched_rows[:, None], touched_columns)
    starts = (_starts(row_counts), _starts(column_counts))
    counts = torch.outer(row_counts, column_counts)
    finite = torch.isfinite(block)
    if not bool(finite.all()):
        good = _fold(finite.to(torch.int64), starts, np.add)
        heatmap.nonfinite[window] += counts - good
        counts = good
        block = block.masked_fill(~finite, _NEUTRAL[mode])
    heatmap.counts[window] += counts
    if mode == "sum":
        heatmap.values[window] += _fold(block.double(), starts, np.add)
    elif mode == "min":
        lowest = _fold(block, starts, np.minimum).double()
        heatmap.values[window] = torch.minimum(heatmap.values[window], lowest)
    else:
        highest = _fold(block.abs() if mode == "absmax" else block, starts, np.maximum).double()
        heatmap.values[window] = torch.maximum(heatmap.values[window], highest)


def _fold(block: torch.Tensor, starts: tuple[Starts, Starts], reduce: np.ufunc) -> torch.Tensor:
    """[rows, columns] to [runs of rows, runs of columns]."""
    # torch reduces by index, element by element; numpy reduces runs, several times as fast.
    tall = reduce.reduceat(block.numpy(), starts[0], axis=0)
    return torch.from_numpy(reduce.reduceat(tall, starts[1], axis=1))


def _starts(run_lengths: torch.Tensor) -> Starts:
    return (run_lengths.cumsum(0) - run_lengths).numpy()


MAX_WIDTH = 64
"""Most columns of a factor."""

_SUMS = 2
_SEED = 0x70617261
"""Equal in all sidecars; otherwise their sums could not be added."""


@dataclass(slots=True)
class Profile:
    """As `paramd.v1.ProfileSnapshotResponse`."""

    row_begin: int
    col_begin: int
    row_max: torch.Tensor
    """float64 [rows]."""
    col_max: torch.Tensor
    """float64 [columns]."""
    row_sums: torch.Tensor
    """int64 [rows, 2], modulo 2^64."""
    count: int = 0
    sum_squares: float = 0.0
    nonfinite: int = 0
    saturated: int = 0
    denormal: int = 0
    zero: int = 0


def check_float(dtype: str) -> None:
    """Raise UsageError for a dtype that has no spectrum."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise UsageError(f"dtype: {dtype!r}; expected one of floating-point numbers")


def matrix(numbers: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> torch.Tensor:
    return torch.from_numpy(numbers.copy())


def profile(
    data: memoryview, dtype: str, views: Sequence[View], stopped: Callable[[], bool]
) -> Profile:
    """Profile all views' rows and columns.

    Args:
        data: The snapshot's bytes.
        dtype: Name of its floating-point dtype; check with `check_float` first.
        views: Checked by `make_view`.
        stopped: Checked between blocks; true ends the work, and the result is useless.
    """
    result = _empty_profile(views)
    col_end = result.col_begin + len(result.col_max)
    multipliers = [_multipliers(number, result.col_begin, col_end) for number in range(_SUMS)]
    for view in views:
        for block, rows, columns in blocks(data, dtype, view):
            if stopped():
                return result
            magnitudes = block.double().abs()
            _count_kinds(result, magnitudes, torch.finfo(block.dtype))
            at, across = rows - result.row_begin, columns - result.col_begin
            # Rows and columns of a view are distinct, so none is written twice.
            result.row_max[at] = torch.maximum(result.row_max[at], magnitudes.amax(dim=1))
            result.col_max[across] = torch.maximum(result.col_max[across], magnitudes.amax(dim=0))
            bits = block.contiguous().view(WORDS[block.itemsize]).long()
            for number, random in enumerate(multipliers):
                result.row_sums[at, number] += (bits * random[across]).sum(dim=1)
    return result


def _empty_profile(views: Sequence[View]) -> Profile:
    """The profile of no element, with the rows and columns that the views touch."""
    row_begin, row_end = _reach([view.rows for view in views])
    col_begin, col_end = _reach([view.columns for view in views])
    return Profile(
        row_begin,
        col_begin,
        torch.zeros(row_end - row_begin, dtype=torch.float64),
        torch.zeros(col_end - col_begin, dtype=torch.float64),
        torch.zeros(row_end - row_begin, _SUMS, dtype=torch.int64),
    )


def _count_kinds(profile: Profile, magnitudes: torch.Tensor, limits: torch.finfo) -> None:
    """Count a block's elements of each kind, and add their squares. `limits`: of their dtype."""
    finite = torch.isfinite(magnitudes)
    profile.count += magnitudes.numel()
    profile.nonfinite += magnitudes.numel() - int(finite.sum())
    profile.saturated += int((magnitudes >= limits.max).sum())
    denormal = (magnitudes > 0) & (magnitudes < limits.smallest_normal)
    profile.denormal += int(denormal.sum())
    profile.zero += int((magnitudes == 0).sum())
    profile.sum_squares += float(magnitudes.masked_fill(~finite, 0.0).square().sum())


def multiply(
    data: memoryview,
    dtype: str,
    views: Sequence[View],
    factor: torch.Tensor,
    factor_begin: int,
    stopped: Callable[[], bool],
    *,
    transposed: bool,
) -> tuple[int, torch.Tensor]:
    """The first row of the product, and its rows that the views touch.

    `factor`: float64 [columns of the matrix from `factor_begin` on (rows if `transposed`), width].

    Raises:
        UsageError: If it lacks rows.
    """
    sides = [
        (view.columns, view.rows) if transposed else (view.rows, view.columns) for view in views
    ]
    begin, end = _reach([out for out, _ in sides])
    first, last = _reach([over for _, over in sides])
    if views and not factor_begin <= first <= last <= factor_begin + len(factor):
        raise UsageError(
            f"factor: rows {factor_begin} to {factor_begin + len(factor)}; the items need "
            f"{first} to {last}"
        )
    product = torch.zeros(end - begin, factor.shape[1], dtype=torch.float64)
    for view in views:
        for block, rows, columns in blocks(data, dtype, view):
            if stopped():
                return begin, product
            wide = block.double()
            out, over = (columns, rows) if transposed else (rows, columns)
            part = (wide.T if transposed else wide) @ factor[over - factor_begin]
            product[out - begin] += part
    return begin, product


def _reach(axes: Sequence[Axis]) -> tuple[int, int]:
    """[first, last) of the rows (or columns) that the axes touch."""
    begin = min((axis.begin for axis in axes), default=0)
    end = max((axis.last + 1 for axis in axes), default=0)
    return begin, end


def _multipliers(number: int, begin: int, end: int) -> torch.Tensor:
    """Random 64-bit numbers of columns [begin, end), the same in every process."""
    generator = np.random.PCG64(_SEED + number).advance(begin)
    return torch.from_numpy(generator.random_raw(end - begin).astype(np.uint64).view(np.int64))
