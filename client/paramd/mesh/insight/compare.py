"""Compare two tensors, and two states tensor by tensor, within a bound of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from paramd.mesh.results import Table

LARGEST_ROWS = 5
BLOCK_NUMEL = 1 << 22
"""Elements compared at a time; bounds temporary memory to some 100 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDiff:
    """How one tensor differs between a and b. NaN where there is nothing to compute."""

    name: str
    shape: tuple[int, ...]
    """Shape of a, or of b where only b has it."""
    dtype: str
    norm: float
    """Norm of b - a."""
    relative: float
    """The norm divided by that of a; infinite where a is all zeros and b is not."""
    norm_a: float
    norm_b: float
    cosine: float
    """Cosine of the angle between a and b; NaN where one is all zeros."""
    max_abs: float
    """Largest magnitude of an element of b - a."""
    changed: int
    """Elements whose values differ; a NaN in both counts as equal."""
    numel: int
    largest_rows: tuple[tuple[int, float], ...]
    """(row, norm of its difference) of the rows that differ most; of tensors with rows."""
    problem: str = ""
    """Why it was not compared: only one state has it, or the shapes differ."""
    cells: tuple[tuple[float, ...], ...] = ()
    """A heat map, if one was requested: the mean of b - a in each cell, NaN where it is not finite.
    Rows of the grid are rows of the tensor; dims beyond the second count as columns."""


class Diff(Table[TensorDiff]):
    """Differences by tensor, the largest relative one first; those not compared come last."""

    columns = (
        ("name", lambda row: row.name),
        ("norm", lambda row: _short(row.norm)),
        ("relative", lambda row: _short(row.relative)),
        ("cosine", lambda row: f"{row.cosine:.6f}" if not math.isnan(row.cosine) else "-"),
        ("changed", lambda row: f"{row.changed:,} of {row.numel:,}"),
        ("largest rows", lambda row: row.problem or ", ".join(str(r) for r, _ in row.largest_rows)),
    )
    row_type = TensorDiff
    about = ("a", "b")
    a: str
    b: str
    """Both states in words."""

    def summary(self) -> str:
        compared = [row for row in self if not row.problem]
        same = sum(row.changed == 0 for row in compared)
        norm = math.hypot(*(row.norm for row in compared if not math.isnan(row.norm)))
        others = len(self) - len(compared)
        return (
            f"{self.a} and {self.b}: {len(compared) - same} tensors differ (norm {norm:.4g}), "
            f"{same} are equal" + (f", {others} cannot be compared" if others else "")
        )


def order(row: TensorDiff) -> tuple[bool, float, str]:
    """Sort key of the rows of a `Diff`."""
    relative = row.relative if not math.isnan(row.relative) else math.inf
    return bool(row.problem), -relative, row.name


def compare(name: str, a: torch.Tensor, b: torch.Tensor, cells: int = 0) -> TensorDiff:
    """The difference between b and a, in float64; NaN and infinities are computed as they come.

    `cells`: most rows and columns of a heat map; 0 for none.
    """
    if a.shape != b.shape:
        what = f"the shapes differ: {list(a.shape)} and {list(b.shape)}"
        return not_compared(name, a, problem=what)
    sums = _summed(a, b, cells)
    norm_a, norm_b = math.sqrt(sums.squares_a), math.sqrt(sums.squares_b)
    norm = math.sqrt(sums.squares)
    return TensorDiff(
        name=name,
        shape=tuple(a.shape),
        dtype=str(a.dtype).removeprefix("torch."),
        norm=norm,
        relative=_relative(norm, norm_a),
        norm_a=norm_a,
        norm_b=norm_b,
        cosine=_cosine_of(sums.dot, norm_a, norm_b),
        max_abs=sums.max_abs,
        changed=sums.changed,
        numel=a.numel(),
        largest_rows=_largest(torch.cat(sums.rows)) if sums.rows and sums.changed else (),
        cells=sums.grid.means() if sums.grid is not None else (),
    )


def _summed(a: torch.Tensor, b: torch.Tensor, cells: int) -> _Sums:
    """Sums over all elements, a block at a time."""
    rows = a.shape[0] if a.dim() > 1 and a.numel() else 0
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    width = a.numel() // rows if rows else max(a.numel(), 1)
    # Whole rows at a time, so that rows add up.
    step = max(BLOCK_NUMEL // width, 1) * width if rows else BLOCK_NUMEL
    sums = _Sums(_Grid(rows if rows else 1, width, cells) if cells and a.numel() else None)
    for begin in range(0, a.numel(), step):
        delta = sums.add(flat_a[begin : begin + step], flat_b[begin : begin + step])
        if rows:
            sums.rows.append(delta.view(-1, width).norm(dim=1))
        if sums.grid is not None:
            sums.grid.add(begin, delta)
    return sums


class _Sums:
    """Sums over the elements of a and b, and over their differences."""

    def __init__(self, grid: _Grid | None) -> None:
        self.squares_a = self.squares_b = self.dot = self.squares = self.max_abs = 0.0
        self.changed = 0
        self.rows: list[torch.Tensor] = []
        """Norms of the rows' differences, in order; none of a tensor without rows."""
        self.grid = grid

    def add(self, block_a: torch.Tensor, block_b: torch.Tensor) -> torch.Tensor:
        """Add some elements of both; returns b - a, which is 0 where they are equal."""
        a, b = block_a.to(torch.float64), block_b.to(torch.float64)
        delta = b - a
        differs = (delta != 0) & ~(a.isnan() & b.isnan())
        # Two equal infinities have a NaN as their difference.
        differs &= ~(a == b)
        self.changed += int(differs.sum())
        delta = torch.where(differs, delta, 0.0)
        self.squares_a += float(a.dot(a))
        self.squares_b += float(b.dot(b))
        self.dot += float(a.dot(b))
        self.squares += float(delta.dot(delta))
        self.max_abs = _larger(self.max_abs, float(delta.abs().max()))
        return delta


def _relative(norm: float, norm_a: float) -> float:
    if norm_a:
        return norm / norm_a
    return math.inf if norm else 0.0


class _Grid:
    """Means of a matrix' cells, of which there are at most `most` by `most`."""

    def __init__(self, rows: int, columns: int, most: int) -> None:
        self._rows, self._columns = rows, columns
        self._shape = min(rows, most), min(columns, most)
        self._sums, self._counts = torch.zeros(2, math.prod(self._shape), dtype=torch.float64)

    def add(self, begin: int, elements: torch.Tensor) -> None:
        """Add elements from a flat index on."""
        at = torch.arange(begin, begin + elements.numel())
        height, width = self._shape
        row = (at // self._columns) * height // self._rows
        cell = row * width + (at % self._columns) * width // self._columns
        self._sums.index_add_(0, cell, elements)
        self._counts += torch.bincount(cell, minlength=self._counts.numel())

    def means(self) -> tuple[tuple[float, ...], ...]:
        """The cells, row by row."""
        means = self._sums / self._counts
        means[~means.isfinite()] = math.nan
        return tuple(map(tuple, means.view(self._shape).tolist()))


def not_compared(name: str, tensor: torch.Tensor, *, problem: str) -> TensorDiff:
    """The row of a tensor that cannot be compared."""
    nan = math.nan
    return TensorDiff(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        norm=nan,
        relative=nan,
        norm_a=nan,
        norm_b=nan,
        cosine=nan,
        max_abs=nan,
        changed=0,
        numel=tensor.numel(),
        largest_rows=(),
        problem=problem,
    )


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def _cosine_of(dot: float, norm_a: float, norm_b: float) -> float:
    if not norm_a or not norm_b:
        return math.nan
    cosine = dot / norm_a / norm_b
    # Rounding may lead just beyond the bounds.
    return min(max(cosine, -1.0), 1.0) if not math.isnan(cosine) else math.nan


def _largest(norms: torch.Tensor) -> tuple[tuple[int, float], ...]:
    finite = torch.where(norms.isnan(), math.inf, norms)
    rows = torch.topk(finite, min(LARGEST_ROWS, len(norms))).indices.tolist()
    return tuple((row, float(norms[row])) for row in rows if norms[row] != 0)


def _short(value: float) -> str:
    return f"{value:.4g}" if not math.isnan(value) else "-"
