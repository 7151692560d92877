"""Heat maps and single elements of tensors, without torch.

A heat map is a matrix pooled into cells, each rank reducing its shard. A tensor of any rank is
shown as a matrix: its first dims are flattened to rows, the others to columns. Row r of R falls
into row floor(r * H / R) of a heatmap with H rows; columns likewise. Elements are copied from a
snapshot into a slice, and written as exact text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, nan, prod

from paramd.errors import UsageError
from paramd.layout.dtypes import DTYPES, item_bytes
from paramd.layout.plan import Landing, ReadPlan, as_boxes
from paramd.layout.types import Box, Interval, row_major
from paramd.v1 import sidecar_pb2 as pb

MAX_CELLS = 512
"""Most cells of a heatmap in each direction."""

MODES = ("mean", "absmax", "min", "max")
"""Reductions of a cell's finite elements."""

# (exponent bits, mantissa bits, bias, has infinity, negative zero is NaN)
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, False, False),
    "float8_e5m2": (5, 2, 15, True, False),
    "float8_e4m3fnuz": (4, 3, 8, False, True),
    "float8_e5m2fnuz": (5, 2, 16, False, True),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor of `shape` viewed as a matrix."""

    shape: tuple[int, ...]
    row_dims: int
    """Number of first dims that form the rows."""

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
        UsageError: If `row_dims` is negative or more than the tensor has.
    """
    dims = row_dims if row_dims is not None else int(len(shape) >= 2)
    if not 0 <= dims <= len(shape):
        raise UsageError(f"row_dims: {dims}; the tensor has {len(shape)} dims")
    return Matrix(tuple(shape), dims)


def heatmap_items(plan: ReadPlan, matrix: Matrix) -> dict[int, tuple[pb.PoolItem, ...]]:
    """Each rank's items to pool, so that each element of the plan's only tensor counts once."""
    assert len(plan.tensors) == 1, "a heatmap shows one tensor"
    size_bytes = item_bytes(plan.tensors[0].dtype)
    return {
        read.rank: tuple(
            item for landing in read.landings for item in _items(landing, matrix, size_bytes)
        )
        for read in plan.ranks
    }


def _items(landing: Landing, matrix: Matrix, size_bytes: int) -> Iterator[pb.PoolItem]:
    if isinstance(landing.target, Interval):
        matrix = Matrix((matrix.rows, matrix.columns), 1)
    k, steps = matrix.row_dims, matrix.steps
    for part in as_boxes(landing, matrix.shape, size_bytes):
        assert isinstance(part.target, Box)
        offsets = [b * step for b, step in zip(part.target.begin, steps, strict=True)]
        yield pb.PoolItem(
            begin_bytes=part.begin_bytes,
            sizes=part.sizes,
            strides=part.strides,
            steps=steps,
            row_dims=k,
            row_begin=sum(offsets[:k]),
            col_begin=sum(offsets[k:]),
        )


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


def merge_parts(
    parts: Sequence[pb.PoolSnapshotResponse], *, mode: str, rows: int, columns: int
) -> Heatmap:
    """Merge all ranks' cells into a heatmap; exact even where one spans pieces of several ranks.

    Args:
        parts: The ranks' answers; cells outside of theirs are of others.
        mode: One of `MODES`, that of all parts.
        rows: Rows of the heatmap.
        columns: Columns of the heatmap.
    """
    cells = _Cells(mode, rows, columns)
    for part in parts:
        cells.add(part)
    return Heatmap(
        rows=rows,
        columns=columns,
        values=cells.results(),
        nonfinite=[(*divmod(at, columns), count) for at, count in sorted(cells.nonfinite.items())],
        count=sum(cells.counts) + sum(cells.nonfinite.values()),
    )


class _Cells:
    """Cells of a heatmap while ranks' parts are merged; lists are row-major."""

    def __init__(self, mode: str, rows: int, columns: int) -> None:
        self._mode, self._columns = mode, columns
        self._better = {"min": min, "absmax": max, "max": max}.get(mode)
        """Which of two values a cell keeps; None: their sum."""
        self._values = [{"min": inf, "max": -inf}.get(mode, 0.0)] * (rows * columns)
        self.counts = [0] * (rows * columns)
        """Finite elements."""
        self.nonfinite: dict[int, int] = {}
        """Others, of the cells that have some."""

    def add(self, part: pb.PoolSnapshotResponse) -> None:
        """Add a rank's cells."""
        for r in range(part.cell_row_count):
            begin = (part.cell_row_begin + r) * self._columns + part.cell_col_begin
            source = slice(r * part.cell_col_count, (r + 1) * part.cell_col_count)
            self._add_row(begin, part.values[source], part.counts[source])
            for at, count in enumerate(part.nonfinite_counts[source], begin):
                if count:
                    self.nonfinite[at] = self.nonfinite.get(at, 0) + count

    def _add_row(self, begin: int, values: Sequence[float], counts: Sequence[int]) -> None:
        for at, (value, count) in enumerate(zip(values, counts, strict=True), begin):
            if count:
                old = self._values[at]
                self._values[at] = (
                    self._better(old, value) if self._better is not None else old + value
                )
                self.counts[at] += count

    def results(self) -> list[float]:
        """Each cell's value; NaN for one without finite elements."""
        cells = zip(self._values, self.counts, strict=True)
        if self._mode == "mean":
            return [value / count if count else nan for value, count in cells]
        return [value if count else nan for value, count in cells]


def place_elements(
    landing: Landing, snapshot: Sequence[int], result: bytearray, shape: Sequence[int], dtype: str
) -> None:
    """Copy a landing's elements into the row-major `result` of `shape`."""
    size = item_bytes(dtype)
    assert isinstance(snapshot, bytes | bytearray)
    if landing.direct and landing.target_begin_bytes is not None:
        at = landing.target_begin_bytes
        result[at : at + landing.size_bytes] = snapshot[landing.begin_bytes : landing.end_bytes]
        return
    assert isinstance(landing.target, Box), "an interval is always direct"
    steps = row_major(shape)
    origin = sum(b * step for b, step in zip(landing.target.begin, steps, strict=True))
    for index in product(*map(range, landing.sizes)):
        source = sum(i * stride for i, stride in zip(index, landing.strides, strict=True))
        target = origin + sum(i * step for i, step in zip(index, steps, strict=True))
        begin = landing.begin_bytes + source * size
        result[target * size : (target + 1) * size] = snapshot[begin : begin + size]


def element_texts(data: bytes | bytearray, dtype: str) -> list[str]:
    """Every element as exact text: decimal, "nan", "inf", "1+2j", "true". UsageError: the dtype."""
    size = item_bytes(dtype)
    assert len(data) % size == 0
    if dtype == "bool":
        return ["true" if byte else "false" for byte in data]
    if form := DTYPES[dtype].form:
        return list(map(repr, struct.unpack(f"<{len(data) // size}{form}", data)))
    if dtype == "bfloat16":
        words = struct.unpack(f"<{len(data) // 2}H", data)
        wide = struct.pack(f"<{len(words)}I", *(word << 16 for word in words))
        return list(map(repr, struct.unpack(f"<{len(words)}f", wide)))
    if dtype in ("complex64", "complex128"):
        kind = "f" if dtype == "complex64" else "d"
        parts = struct.unpack(f"<{2 * len(data) // size}{kind}", data)
        return [_complex(re, im) for re, im in zip(parts[::2], parts[1::2], strict=True)]
    if dtype == "float8_e8m0fnu":
        return [repr(nan if byte == 255 else 2.0 ** (byte - 127)) for byte in data]
    return [repr(_float8(byte, *_FLOAT8[dtype])) for byte in data]


def _complex(real: float, imaginary: float) -> str:
    text = repr(imaginary)
    return f"{real!r}{'' if text.startswith('-') else '+'}{text}j"


def _float8(
    byte: int, exponent_bits: int, mantissa_bits: int, bias: int, has_inf: bool, fnuz: bool
) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    mantissa = byte & ((1 << mantissa_bits) - 1)
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    top = exponent == (1 << exponent_bits) - 1
    if fnuz and byte == 0x80:
        return nan
    if has_inf and top:
        return nan if mantissa else sign * inf
    if not has_inf and not fnuz and top and mantissa == (1 << mantissa_bits) - 1:
        return nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
