"""`mesh.spectrum`: singular values of a sharded weight, and problems of its rows.

The sidecars multiply their shards with narrow matrices; only those travel. A block Krylov space
grows from a random start until the largest singular values converge (Musco and Musco,
"Randomized block Krylov methods for stronger and faster approximate singular value
decomposition", 2015). It is kept on the shorter side, so a small weight is exhausted, and then all
its singular values are exact. Everything is computed in float64.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from paramd.documents import Document, Finite
from paramd.errors import ConflictError, UsageError
from paramd.extras import need
from paramd.layout.dtypes import DTYPES
from paramd.layout.heatmaps import Matrix, heatmap_items, matrix_of
from paramd.layout.plan import ReadPlan
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.reading.pin import while_pinned
from paramd.mesh.reading.stream import Reading
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

MAX_K = 32
SPARE = 4
"""Columns of a block beyond the requested k."""

EXACT_BELOW = 128
"""Shorter sides up to this length are exhausted."""

MAX_DIRECTIONS = 256
"""Most columns of the Krylov space; bounds the work and the memory of a call."""

STANDS_STILL = 1e-8
"""Relative change of the largest singular values at which the space is large enough."""

MAX_FACTOR_BYTES = 3 << 20
"""A sidecar takes no larger factor."""

MAX_SIDE = 400_000
"""Longest side whose factor still fits."""

MAX_LISTED = 100
_SEED = 20


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Spectrum(Document):
    """Singular values of one weight at one step, and its rows and columns."""

    name: str
    job: str
    incarnation: int
    step: int
    unsettled: bool = False
    """As in `Summoned`."""
    shape: tuple[int, ...]
    """Dims beyond the second count as columns."""
    dtype: str
    singular_values: tuple[float, ...]
    """The largest ones, falling; empty when elements are NaN or infinite."""
    error: Finite
    """Largest relative change of these in the last round; 0 when they are exact."""
    norm: Finite
    """Frobenius norm, of the finite elements."""
    stable_rank: Finite
    """norm squared / largest singular value squared; NaN for a weight of zeros."""
    condition: Finite
    """Largest / smallest singular value; infinite when the latter is 0."""
    condition_exact: bool
    """Whether it is exact; otherwise it is a lower bound."""
    dead_rows: tuple[int, ...]
    """Rows without an element above the smallest normal number of the dtype; the first 100."""
    dead_row_count: int
    dead_columns: tuple[int, ...]
    dead_column_count: int
    duplicate_rows: tuple[tuple[int, ...], ...]
    """Groups of rows that are equal bit for bit and not dead; the first 100."""
    duplicate_row_count: int
    """Rows that equal an earlier one."""
    saturated: float
    """Share of elements at the largest finite value of the dtype, or infinite."""
    denormal: float
    """Share of elements that are subnormal."""
    zero: float
    """Share of elements that are zero."""
    nonfinite: int
    """Elements that are NaN or infinite."""

    def __repr__(self) -> str:
        return f"<paramd.Spectrum {self.summary()}>"

    def summary(self) -> str:
        """In one line."""
        if not self.singular_values:
            return f"{self.name} at step {self.step}: {self.nonfinite:,} NaN or infinite"
        at_least = "" if self.condition_exact else "at least "
        return (
            f"{self.name} at step {self.step}: norm {self.norm:.4g}, largest singular value "
            f"{self.singular_values[0]:.4g}, stable rank {self.stable_rank:.4g}, condition number "
            f"{at_least}{self.condition:.4g}"
        )


async def compute_spectrum(
    reach: SidecarFinder, pattern: str, k: int, deadline_s: float
) -> Spectrum:
    """Args, Returns, Raises: as `AsyncMesh.spectrum`."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
        raise UsageError(f"k: {k!r}; expected 1 to {MAX_K} singular values")
    need("mesh.spectrum", "torch")

    return await while_pinned(reach, [pattern], partial(spectrum_of, k=k), deadline_s)


async def spectrum_of(reading: Reading, plan: ReadPlan, *, k: int) -> Spectrum:
    """The spectrum of a plan's only tensor, pinned; UsageError unless it is a matrix of floats."""
    check_matrix(plan)
    tensor = plan.tensors[0]
    shards = _Shards(reading, plan, matrix_of(tensor.shape))
    profile = await shards.profile()
    values: tuple[float, ...] = ()
    error, condition, exact = math.nan, math.nan, False
    if not profile.nonfinite:
        values, error, condition, exact = await _singular_values(shards, k)
    largest = values[0] if values else 0.0
    return Spectrum(
        name=tensor.name,
        job=reading.sidecars.document.job,
        incarnation=reading.pinned.state.incarnation,
        step=reading.pinned.state.step,
        unsettled=reading.pinned.unsettled,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        singular_values=values,
        error=error,
        norm=math.sqrt(profile.sum_squares),
        stable_rank=profile.sum_squares / largest**2 if largest else math.nan,
        condition=condition,
        condition_exact=exact,
        saturated=profile.saturated / profile.count,
        denormal=profile.denormal / profile.count,
        zero=profile.zero / profile.count,
        nonfinite=profile.nonfinite,
        **await asyncio.to_thread(profile.rows_and_columns, tensor.dtype),
    )


def check_matrix(plan: ReadPlan) -> None:
    """Raise UsageError unless a plan has one tensor, which has a spectrum."""
    if len(plan.tensors) != 1:
        raise UsageError(f"name: {len(plan.tensors)} tensors match; name exactly one")
    tensor = plan.tensors[0]
    if len(tensor.shape) < 2 or min(tensor.shape) < 1:
        raise UsageError(
            f"name: {tensor.name} has shape {list(tensor.shape)}; only a matrix (2 dims or "
            "more, none of them 0) has singular values"
        )
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None or not tensor.dtype.startswith(("float", "bfloat")) or not dtype.reduced:
        raise UsageError(f"name: {tensor.name} is {tensor.dtype}; expected floating-point numbers")
    matrix = matrix_of(tensor.shape)
    if max(matrix.rows, matrix.columns) > MAX_SIDE:
        raise UsageError(
            f"name: {tensor.name} is {matrix.rows:,} x {matrix.columns:,}; at most {MAX_SIDE:,} "
            "rows and columns, ask for a slice such as 'w[0:100000]'"
        )


@dataclass(slots=True)
class _Profile:
    """The ranks' profiles, merged."""

    row_max: Numbers
    col_max: Numbers
    row_sums: NDArray[np.uint64]
    count: int = 0
    sum_squares: float = 0.0
    nonfinite: int = 0
    saturated: int = 0
    denormal: int = 0
    zero: int = 0

    def add(self, part: pb.ProfileSnapshotResponse) -> bool:
        """Add a rank's part; False, and nothing is added, if it is beyond the matrix."""
        import numpy as np

        row_max = np.frombuffer(part.row_max, "<f8")
        col_max = np.frombuffer(part.col_max, "<f8")
        sums = np.frombuffer(part.row_sums, "<u8").reshape(-1, 2)
        row_end, col_end = part.row_begin + len(row_max), part.col_begin + len(col_max)
        if row_end > len(self.row_max) or col_end > len(self.col_max):
            return False
        at, across = slice(part.row_begin, row_end), slice(part.col_begin, col_end)
        self.row_max[at] = np.maximum(self.row_max[at], row_max)
        self.col_max[across] = np.maximum(self.col_max[across], col_max)
        self.row_sums[at] += sums
        self.count += part.count
        self.sum_squares += part.sum_squares
        self.nonfinite += part.nonfinite_count
        self.saturated += part.saturated_count
        self.denormal += part.denormal_count
        self.zero += part.zero_count
        return True

    def rows_and_columns(self, dtype: str) -> dict[str, Any]:
        """The fields of `Spectrum` about rows and columns."""
        import numpy as np

        # Written so that a row with a NaN counts as alive.
        tiny = _SMALLEST_NORMAL.get(dtype, 0.0)
        dead_rows = np.flatnonzero(self.row_max < tiny if tiny else self.row_max == 0)
        dead_columns = np.flatnonzero(self.col_max < tiny if tiny else self.col_max == 0)
        alive = np.setdiff1d(np.arange(len(self.row_max)), dead_rows, assume_unique=True)
        _, group, sizes = np.unique(
            self.row_sums[alive], axis=0, return_inverse=True, return_counts=True
        )
        group = group.reshape(-1)
        repeated = alive[sizes[group] > 1]
        groups: dict[int, list[int]] = {}
        for row, number in zip(repeated.tolist(), group[sizes[group] > 1].tolist(), strict=True):
            groups.setdefault(number, []).append(row)
        listed = list(groups.values())[:MAX_LISTED]
        return {
            "dead_rows": tuple(dead_rows[:MAX_LISTED].tolist()),
            "dead_row_count": len(dead_rows),
            "dead_columns": tuple(dead_columns[:MAX_LISTED].tolist()),
            "dead_column_count": len(dead_columns),
            "duplicate_rows": tuple(tuple(rows[:MAX_LISTED]) for rows in listed),
            "duplicate_row_count": len(alive) - len(sizes),
        }


_SMALLEST_NORMAL = {
    "float64": 2.0**-1022,
    "float32": 2.0**-126,
    "bfloat16": 2.0**-126,
    "float16": 2.0**-14,
    "float8_e4m3fn": 2.0**-6,
    "float8_e5m2": 2.0**-14,
    "float8_e4m3fnuz": 2.0**-7,
    "float8_e5m2fnuz": 2.0**-15,
}


@dataclass(slots=True)
class _Shards:
    reading: Reading
    plan: ReadPlan
    matrix: Matrix
    items: dict[int, tuple[pb.PoolItem, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.items = {
            rank: items for rank, items in heatmap_items(self.plan, self.matrix).items() if items
        }

    async def profile(self) -> _Profile:
        """Rows, columns and counts of all of it."""
        import numpy as np

        rows, columns = self.matrix.rows, self.matrix.columns
        merged = _Profile(np.zeros(rows), np.zeros(columns), np.zeros((rows, 2), np.uint64))
        parts = await asyncio.gather(*map(self._profile_of, self.items))
        for rank, part in zip(self.items, parts, strict=True):
            self._check(rank, merged.add(part))
        if merged.count != rows * columns:
            raise ConflictError(
                f"the ranks looked at {merged.count:,} of {rows * columns:,} elements; try again"
            )
        return merged

    async def _profile_of(self, rank: int) -> pb.ProfileSnapshotResponse:
        request = pb.ProfileSnapshotRequest(
            dtype=self.plan.tensors[0].dtype,
            row_count=self.matrix.rows,
            col_count=self.matrix.columns,
            items=self.items[rank],
        )
        return await self.reading.ask(rank, request, pb.ProfileSnapshotResponse)

    async def times(self, factor: Numbers, *, transposed: bool) -> Numbers:
        import numpy as np

        result = np.zeros(
            (self.matrix.columns if transposed else self.matrix.rows, factor.shape[1])
        )
        parts = await asyncio.gather(
            *(self._product(rank, factor, transposed=transposed) for rank in self.items)
        )
        # In the order of ranks, so that the same state has the same spectrum.
        for begin, product in parts:
            result[begin : begin + len(product)] += product
        return result

    async def _product(
        self, rank: int, factor: Numbers, *, transposed: bool
    ) -> tuple[int, Numbers]:
        import numpy as np

        begin, end = self._needed(rank, transposed=transposed)
        part = factor[begin:end]
        width = max(1, min(part.shape[1], MAX_FACTOR_BYTES // (8 * len(part))))
        products, first = [], 0
        for left in range(0, part.shape[1], width):
            columns = np.ascontiguousarray(part[:, left : left + width])
            request = pb.MultiplySnapshotRequest(
                dtype=self.plan.tensors[0].dtype,
                row_count=self.matrix.rows,
                col_count=self.matrix.columns,
                items=self.items[rank],
                transposed=transposed,
                factor_begin=begin,
                factor_width=columns.shape[1],
                factor=columns.tobytes(),
            )
            answer = await self.reading.ask(rank, request, pb.MultiplySnapshotResponse)
            product = np.frombuffer(answer.product, "<f8").reshape(-1, columns.shape[1])
            first = answer.begin
            most = self.matrix.columns if transposed else self.matrix.rows
            self._check(rank, 0 <= first <= most - len(product))
            products.append(product)
        return first, np.concatenate(products, axis=1)

    def _needed(self, rank: int, *, transposed: bool) -> tuple[int, int]:
        """The rows of a factor that a rank's items need."""
        begins, ends = [], []
        for item in self.items[rank]:
            side = slice(None, 1) if transposed else slice(1, None)
            begin = item.row_begin if transposed else item.col_begin
            pairs = zip(item.sizes[side], item.steps[side], strict=True)
            begins.append(begin)
            ends.append(begin + sum((size - 1) * step for size, step in pairs) + 1)
        return min(begins), max(ends)

    def _check(self, rank: int, fits: bool) -> None:
        if not fits:
            who = self.reading.sidecars.who(rank)
            raise ConflictError(f"{who} returned a part that does not fit the matrix; try again")


async def _singular_values(shards: _Shards, k: int) -> tuple[tuple[float, ...], float, float, bool]:
    """The k largest singular values, their relative error, the condition number, its exactness."""
    values, error, exact = await _grown(shards, k)
    smallest = float(values[-1])
    condition = float(values[0]) / smallest if smallest else math.inf
    return (tuple(float(value) for value in values[:k]), 0.0 if exact else error, condition, exact)


async def _grown(shards: _Shards, k: int) -> tuple[Numbers, float, bool]:
    """Grow a Krylov space until its k largest singular values stand still.

    Returns:
        All its singular values, how much the k largest changed last, and whether it is the whole
        of the shorter side, so that they are exact.
    """
    import numpy as np

    rows, columns = shards.matrix.rows, shards.matrix.columns
    # The space grows on the shorter side; `wide` says that those are the rows.
    wide = rows < columns
    short = min(rows, columns)
    width = min(short, k + SPARE)
    most = _most_directions(short)
    block = np.random.default_rng(_SEED).standard_normal((short, width))
    basis = np.empty((short, 0))
    images = np.empty((columns if wide else rows, 0))
    values = np.empty(0)
    error = math.inf
    while True:
        block = await asyncio.to_thread(_orthogonal, basis, block[:, : most - basis.shape[1]])
        if not block.shape[1]:
            break
        image = await shards.times(block, transposed=wide)
        basis = np.concatenate([basis, block], axis=1)
        images = np.concatenate([images, image], axis=1)
        before = values
        values = await asyncio.to_thread(_values_of, images)
        error = _change(before[:k], values[:k])
        if basis.shape[1] >= most or (short > EXACT_BELOW and error <= STANDS_STILL):
            break
        block = await shards.times(image, transposed=not wide)
    return values, error, basis.shape[1] == short


def _most_directions(short: int) -> int:
    """Most columns of the space on a side of that length."""
    return short if short <= EXACT_BELOW else min(short, MAX_DIRECTIONS)


def _orthogonal(basis: Numbers, block: Numbers) -> Numbers:
    """An orthonormal basis of what `block` adds to `basis`.

    A direction that adds nothing becomes a random one, so that the space always grows.
    """
    import numpy as np

    if not block.shape[1]:
        return block
    generator = np.random.default_rng(_SEED + 1 + basis.shape[1])
    scale = np.linalg.norm(block, axis=0)
    block = block / np.where(scale > 0, scale, 1.0)
    for _ in range(3):
        block = block - basis @ (basis.T @ block)
        block, upper = np.linalg.qr(block)
        lost = np.abs(np.diag(upper)) < 1e-10
        if lost.any():
            block = np.where(lost, generator.standard_normal(block.shape), block)
    return block


def _values_of(images: Numbers) -> Numbers:
    import numpy as np

    # Of the triangle: the same singular values, and a tall matrix costs one pass.
    values: Numbers = np.linalg.svd(np.linalg.qr(images, mode="r"), compute_uv=False)
    return values


def _change(before: Numbers, after: Numbers) -> float:
    import numpy as np

    if len(before) < len(after):
        return math.inf
    largest = float(after[0]) if len(after) else 0.0
    return float(np.abs(after - before).max() / largest) if largest else 0.0


def listed(items: Sequence[int], count: int) -> str:
    """Row numbers in words, shortened."""
    shown = ", ".join(map(str, items[:8]))
    return shown if count <= 8 else f"{shown}, ... ({count:,})"
