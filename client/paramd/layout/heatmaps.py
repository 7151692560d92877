"""Heat maps of tensors: a matrix pooled into cells, each rank reducing what it holds.

A tensor of any rank is shown as a matrix: its first dims are flattened to rows, the others to
columns. Row r of R falls into row floor(r * H / R) of a heatmap with H rows; columns likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, nan, prod

from paramd.errors import UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.plan import Landing, ReadPlan
from paramd.layout.types import Interval, boxes_of_interval, row_major

MAX_CELLS = 512
"""Most cells of a heatmap in each direction."""

MODES = ("mean", "absmax", "min", "max")
"""Reductions of a cell's finite elements."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor of `shape` viewed as a matrix."""

    shape: tuple[int, ...]
    row_dims: int
    """How many of the first dims form the rows."""

    @property
    def rows(self) -> int:
        return prod(self.shape[: self.row_dims])

    @property
    def columns(self) -> int:
        return prod(self.shape[self.row_dims :])

    @property
    def steps(self) -> tuple[int, ...]:
        """Rows (or columns) between neighbours of each dim."""
        k = self.row_dims
        return row_major(self.shape[:k]) + row_major(self.shape[k:])


def matrix_of(shape: Sequence[int], row_dims: int | None = None) -> Matrix:
    """A tensor as a matrix; by default the first dim forms the rows, and a vector is one row.

    Raises:
        UsageError: `row_dims` is negative or more than the tensor has.
    """
    dims = row_dims if row_dims is not None else int(len(shape) >= 2)
    if not 0 <= dims <= len(shape):
        raise UsageError(f"row_dims: {dims}; the tensor has {len(shape)} dims")
    return Matrix(tuple(shape), dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatmapItem:
    """A view of a rank's snapshot within the matrix; as `paramd.v1.PoolItem`."""

    begin_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    steps: tuple[int, ...]
    row_dims: int
    row_begin: int
    col_begin: int


def heatmap_items(plan: ReadPlan, matrix: Matrix) -> dict[int, tuple[HeatmapItem, ...]]:
    """What each rank pools, so that each element of the plan's only tensor counts once."""
    assert len(plan.tensors) == 1, "a heatmap shows one tensor"
    size_bytes = item_bytes(plan.tensors[0].dtype)
    return {
        read.rank: tuple(
            item for landing in read.landings for item in _items(landing, matrix, size_bytes)
        )
        for read in plan.ranks
    }


def _items(landing: Landing, matrix: Matrix, size_bytes: int) -> Iterator[HeatmapItem]:
    if isinstance(landing.target, Interval):
        begin_bytes = landing.begin_bytes
        for box in boxes_of_interval(landing.target, (matrix.rows, matrix.columns)):
            yield HeatmapItem(
                begin_bytes=begin_bytes,
                sizes=box.sizes,
                strides=row_major(box.sizes),
                steps=(1, 1),
                row_dims=1,
                row_begin=box.begin[0],
                col_begin=box.begin[1],
            )
            begin_bytes += box.numel * size_bytes
        return
    k, steps = matrix.row_dims, matrix.steps
    offsets = [b * step for b, step in zip(landing.target.begin, steps, strict=True)]
    yield HeatmapItem(
        begin_bytes=landing.begin_bytes,
        sizes=landing.sizes,
        strides=landing.strides,
        steps=steps,
        row_dims=k,
        row_begin=sum(offsets[:k]),
        col_begin=sum(offsets[k:]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatmapPart:
    """A rectangle of cells reduced by one rank; lists are row-major."""

    row_begin: int
    col_begin: int
    rows: int
    columns: int
    values: Sequence[float]
    """Sums in mode mean."""
    counts: Sequence[int]
    """Finite elements per cell."""
    nonfinite: Sequence[int]
    """NaN and infinite elements per cell; empty if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap:
    """A finished heatmap; lists are row-major."""

    rows: int
    columns: int
    values: list[float]
    """NaN for a cell without finite elements."""
    nonfinite: list[tuple[int, int, int]]
    """(row, column, count) of cells with NaN or infinite elements."""
    count: int
    """Elements of all cells together."""


def merge_parts(parts: Sequence[HeatmapPart], *, mode: str, rows: int, columns: int) -> Heatmap:
    """Merge all parts into a heatmap; exact even where a cell spans pieces of several ranks."""
    better = {"min": min, "absmax": max, "max": max}.get(mode)
    values = [{"min": inf, "max": -inf}.get(mode, 0.0)] * (rows * columns)
    counts = [0] * (rows * columns)
    bad: dict[int, int] = {}
    for part in parts:
        for r in range(part.rows):
            begin = (part.row_begin + r) * columns + part.col_begin
            source = slice(r * part.columns, (r + 1) * part.columns)
            cells = zip(part.values[source], part.counts[source], strict=True)
            for at, (value, count) in enumerate(cells, begin):
                if count:
                    old = values[at]
                    values[at] = better(old, value) if better is not None else old + value
                    counts[at] += count
            for at, count in enumerate(part.nonfinite[source], begin):
                if count:
                    bad[at] = bad.get(at, 0) + count
    if mode == "mean":
        values = [v / n if n else nan for v, n in zip(values, counts, strict=True)]
    else:
        values = [v if n else nan for v, n in zip(values, counts, strict=True)]
    return Heatmap(
        rows=rows,
        columns=columns,
        values=values,
        nonfinite=[(*divmod(at, columns), count) for at, count in sorted(bad.items())],
        count=sum(counts) + sum(bad.values()),
    )
