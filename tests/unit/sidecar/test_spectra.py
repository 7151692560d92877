"""Singular values from shards in odd views, against `torch.linalg.svdvals`."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paramd.errors import UsageError
from paramd.layout.heatmaps import Matrix, matrix_of
from paramd.mesh.insight import spectrum
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.statistics import pooling
from paramd_service.statistics import sidecar as statistics

Views = list[tuple[memoryview, pooling.View]]


def view_of(shard: torch.Tensor, whole: Sequence[int], origin: tuple[int, int]) -> Any:
    """A shard with the strides that it has, and its snapshot."""
    storage = torch.empty(0, dtype=torch.uint8).set_(shard.untyped_storage())
    data = memoryview(bytearray(storage.numpy()))
    name = str(shard.dtype).removeprefix("torch.")
    view = pooling.make_view(
        shard.storage_offset() * shard.itemsize, shard.shape, shard.stride(), (1, 1), row_dims=1,
        origin=origin, grid=pooling.Grid("sum", whole[0], whole[1], 1, 1), data_bytes=len(data),
        dtype=name,
    )  # fmt: skip
    return data, view


def cut(matrix: torch.Tensor, how: str) -> Views:
    """The matrix in three shards: of rows, of columns, or of a run that cuts through rows."""
    if how == "rows":
        begins = np.cumsum([0, *(len(part) for part in matrix.chunk(3))])
        parts = [(part, (int(b), 0)) for part, b in zip(matrix.chunk(3), begins, strict=False)]
    elif how == "columns":
        chunks = matrix.chunk(3, dim=1)
        begins = np.cumsum([0, *(part.shape[1] for part in chunks)])
        parts = [(part, (0, int(b))) for part, b in zip(chunks, begins, strict=False)]
    else:
        row, column = len(matrix) // 2, matrix.shape[1] // 3
        parts = [
            (matrix[:row], (0, 0)),
            (matrix[row : row + 1, :column], (row, 0)),
            (matrix[row : row + 1, column:], (row, column)),
            (matrix[row + 1 :], (row + 1, 0)),
        ]
    return [view_of(part, matrix.shape, origin) for part, origin in parts]


@dataclass
class Shards:
    """What `_singular_values` multiplies with, by the sidecars' own products."""

    matrix: Matrix
    dtype: str
    views: Views
    moved: int = 0

    async def times(self, factor: Any, *, transposed: bool) -> Any:
        rows = self.matrix.columns if transposed else self.matrix.rows
        result = np.zeros((rows, factor.shape[1]))
        for data, view in self.views:
            begin, product = pooling.multiply(
                data, self.dtype, [view], pooling.matrix(factor), 0, lambda: False,
                transposed=transposed,
            )  # fmt: skip
            result[begin : begin + len(product)] += product.numpy()
            self.moved += product.numel()
        return result


def values_of(matrix: torch.Tensor, how: str, k: int) -> tuple[Any, Shards]:
    name = str(matrix.dtype).removeprefix("torch.")
    shards = Shards(matrix_of(matrix.shape), name, cut(matrix, how))
    return asyncio.run(spectrum._singular_values(shards, k)), shards  # type: ignore[arg-type]


@pytest.mark.parametrize("falling", [0.5, 0.02])
def test_the_largest_values_of_a_large_weight_are_found_from_few_columns(falling: float) -> None:
    generator = torch.Generator().manual_seed(2)
    left, _ = torch.linalg.qr(torch.randn(420, 300, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(300, 300, generator=generator, dtype=torch.float64))
    wanted = torch.exp(-falling * torch.arange(300, dtype=torch.float64)) + 1e-6
    matrix = ((left * wanted) @ right.T).float()
    exact = torch.linalg.svdvals(matrix.double())
    (values, error, condition, is_exact), shards = values_of(matrix, "flat", 8)
    torch.testing.assert_close(torch.tensor(values).double(), exact[:8], rtol=1e-5, atol=0)
    assert error <= 1e-6
    assert not is_exact
    assert 1 < condition <= float(exact[0] / exact[-1]) * (1 + 1e-9)
    assert shards.moved < 2 * 256 * 420 * 2


def test_singular_and_empty_weights() -> None:
    zeros, _ = values_of(torch.zeros(9, 5), "rows", 3)
    assert zeros[0] == (0.0, 0.0, 0.0)
    assert zeros[2] == math.inf
    (values, _, condition, exact), _ = values_of(torch.ones(60, 50), "columns", 2)
    assert exact
    assert values == pytest.approx((math.sqrt(3000), 0.0), abs=1e-9)
    assert condition > 1e12


@pytest.mark.parametrize("how", ["rows", "columns", "flat"])
def test_dead_equal_saturated_and_denormal_are_found_whatever_the_shards(how: str) -> None:
    matrix = torch.randn(20, 9, generator=torch.Generator().manual_seed(3))
    matrix[4] = 0.0
    matrix[:, 7] = 0.0
    matrix[11] = matrix[2]
    matrix[15] = matrix[2]
    matrix[16] = -matrix[2]
    matrix[6] = 1e-40
    matrix[0, 0] = torch.finfo(torch.float32).max
    matrix[1, 1] = math.inf
    merged = merged_profile(matrix, how)
    found = merged.rows_and_columns("float32")
    assert found["dead_rows"] == (4, 6)
    # Column 7 has an element above zero, but none that is a normal number.
    assert found["dead_columns"] == (7,)
    assert found["duplicate_rows"] == ((2, 11, 15),)
    assert found["duplicate_row_count"] == 2
    assert (merged.saturated, merged.nonfinite, merged.denormal) == (2, 1, 9)


def merged_profile(matrix: torch.Tensor, how: str) -> Any:
    rows, columns = matrix.shape
    merged = spectrum._Profile(np.zeros(rows), np.zeros(columns), np.zeros((rows, 2), np.uint64))
    for data, view in cut(matrix, how):
        found = pooling.profile(data, "float32", [view], lambda: False)
        at = slice(found.row_begin, found.row_begin + len(found.row_max))
        across = slice(found.col_begin, found.col_begin + len(found.col_max))
        merged.row_max[at] = np.maximum(merged.row_max[at], found.row_max.numpy())
        merged.col_max[across] = np.maximum(merged.col_max[across], found.col_max.numpy())
        merged.row_sums[at] += found.row_sums.numpy().view(np.uint64)
        merged.saturated += found.saturated
        merged.nonfinite += found.nonfinite
        merged.denormal += found.denormal
    return merged


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"row_count": 0}, "row_count, col_count: 0, 5"),
        ({"dtype": "int32"}, "floating-point"),
        ({"dtype": "complex64"}, "no statistics"),
        ({"row_dims": 0}, "with row_dims 1"),
        ({"begin_bytes": 8}, "leaves the snapshot"),
        ({"row_begin": 3}, "leaves the matrix"),
        ({"factor": bytes(7)}, "whole rows"),
        ({"factor": b""}, "whole rows"),
        ({"factor_width": 65}, "1 to 64"),
        ({"factor_begin": -1}, "whole rows"),
        ({"factor_begin": 2}, "items need 0 to 5"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    item = {"begin_bytes": 0, "row_dims": 1, "row_begin": 0}
    item |= {key: change[key] for key in change if key in item}
    request = pb.MultiplySnapshotRequest(
        dtype="float32",
        row_count=3,
        col_count=5,
        items=[pb.PoolItem(sizes=[3, 5], strides=[5, 1], steps=[1, 1], col_begin=0, **item)],
        factor_width=2,
        factor=np.ones((5, 2)).tobytes(),
    )
    for key, value in change.items():
        if key not in item:
            setattr(request, key, value)
    rank: Any = SimpleNamespace(faults=SimpleNamespace(at=lambda _: None))
    data = memoryview(torch.ones(3, 5).numpy().tobytes())
    with pytest.raises(UsageError, match=said):
        statistics.multiply(rank, data, request, [])
