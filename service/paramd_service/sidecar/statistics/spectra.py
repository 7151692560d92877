"""Products and profiles of matrices that lie in strided views of a snapshot.

A product with a narrow matrix is what a randomised decomposition needs of a weight, so that
spectra are found from shards without moving them. Computed in float64, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paramd.errors import UsageError
from paramd_service.sidecar.statistics.pooling import Axis, View, blocks

MAX_WIDTH = 64
"""Most columns of a factor."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMS = 2
_SEED = 0x70617261
"""Equal in all sidecars, or their sums could not be added."""


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
    """A tensor of its own with these numbers."""
    return torch.from_numpy(numbers.copy())


def profile(
    data: memoryview, dtype: str, views: Sequence[View], stopped: Callable[[], bool]
) -> Profile:
    """Look at all views' rows and columns; useless once `stopped` says true."""
    kind: torch.dtype = getattr(torch, dtype)
    limits = torch.finfo(kind)
    row_begin, row_end = _reach([view.rows for view in views])
    col_begin, col_end = _reach([view.columns for view in views])
    found = Profile(
        row_begin,
        col_begin,
        torch.zeros(row_end - row_begin, dtype=torch.float64),
        torch.zeros(col_end - col_begin, dtype=torch.float64),
        torch.zeros(row_end - row_begin, _SUMS, dtype=torch.int64),
    )
    multipliers = [_multipliers(number, col_begin, col_end) for number in range(_SUMS)]
    for view in views:
        for block, rows, columns in blocks(data, dtype, view):
            if stopped():
                return found
            at, across = rows - row_begin, columns - col_begin
            magnitude = block.double().abs()
            finite = torch.isfinite(magnitude)
            found.count += magnitude.numel()
            found.nonfinite += magnitude.numel() - int(finite.sum())
            found.saturated += int((magnitude >= limits.max).sum())
            found.denormal += int(((magnitude > 0) & (magnitude < limits.smallest_normal)).sum())
            found.zero += int((magnitude == 0).sum())
            found.sum_squares += float(magnitude.masked_fill(~finite, 0.0).square().sum())
            # Rows and columns of a view are distinct, so none is written twice.
            found.row_max[at] = torch.maximum(found.row_max[at], magnitude.amax(dim=1))
            found.col_max[across] = torch.maximum(found.col_max[across], magnitude.amax(dim=0))
            bits = block.contiguous().view(_WORDS[kind.itemsize]).long()
            for number, random in enumerate(multipliers):
                found.row_sums[at, number] += (bits * random[across]).sum(dim=1)
    return found


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

    Args:
        factor: float64 [columns of the matrix from `factor_begin` on, width]; rows of the matrix
            when `transposed`.

    Raises:
        UsageError: the factor lacks rows.
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
    """The half-open range that the axes lie in."""
    return min((one.begin for one in axes), default=0), max(
        (one.last + 1 for one in axes), default=0
    )


def _multipliers(number: int, begin: int, end: int) -> torch.Tensor:
    """Random 64-bit numbers of columns [begin, end), the same in every process."""
    generator = np.random.PCG64(_SEED + number).advance(begin)
    return torch.from_numpy(generator.random_raw(end - begin).astype(np.uint64).view(np.int64))
