"""Pictures of strided views against the obvious loop over every element."""

import math
from itertools import product

import pytest
import torch

from paramd.errors import UsageError
from paramd_service.sidecar.statistics import pooling

MODES = ("sum", "min", "max", "absmax")


def picture_of(
    tensor: torch.Tensor, grid: pooling.Grid, *, row_dims: int = 1, origin: tuple[int, int] = (0, 0)
) -> pooling.Heatmap:
    """The heatmap of `tensor` with the strides that it has."""
    storage = tensor.untyped_storage()
    data = memoryview(bytearray(storage))  # type: ignore[call-overload]
    sizes = tensor.shape
    steps = [math.prod(sizes[d + 1 : row_dims]) for d in range(row_dims)]
    steps += [math.prod(sizes[d + 1 :]) for d in range(row_dims, len(sizes))]
    view = pooling.make_view(
        tensor.storage_offset() * tensor.itemsize, sizes, tensor.stride(), steps, row_dims=row_dims,
        origin=origin, grid=grid, data_bytes=len(data),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )  # fmt: skip
    dtype = str(tensor.dtype).removeprefix("torch.")
    return pooling.pool(data, dtype, grid, [view], lambda: False)


def naive(matrix: torch.Tensor, grid: pooling.Grid) -> dict[tuple[int, int], list[float]]:
    cells: dict[tuple[int, int], list[float]] = {}
    for r, c in product(range(matrix.shape[0]), range(matrix.shape[1])):
        cell = (r * grid.cell_rows // grid.rows, c * grid.cell_columns // grid.columns)
        cells.setdefault(cell, []).append(float(matrix[r, c]))
    return cells


def expected(values: list[float], mode: str) -> float:
    finite = [v for v in values if math.isfinite(v)]
    found = {"sum": math.fsum, "min": min, "max": max, "absmax": lambda v: max(map(abs, v))}
    return float(found[mode](finite))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize(("rows", "columns"), [(7, 13), (1, 40), (40, 1), (33, 8)])
def test_every_cell_tells_of_exactly_its_elements(
    mode: str, dtype: torch.dtype, rows: int, columns: int
) -> None:
    values = torch.arange(rows * columns).sub(50).mul(3).remainder(101).sub(30).to(dtype)
    matrix = values.reshape(rows, columns)
    grid = pooling.Grid(mode, rows, columns, min(5, rows), min(4, columns))
    heatmap, cells = picture_of(matrix, grid), naive(matrix, grid)
    assert len(cells) == heatmap.values.numel()
    for (r, c), found in cells.items():
        assert float(heatmap.values[r, c]) == expected(found, mode)
        assert int(heatmap.counts[r, c]) == len(found)
    assert not heatmap.nonfinite.any()


@pytest.mark.parametrize("mode", MODES)
def test_nan_and_infinity_are_counted_and_change_no_value(mode: str) -> None:
    matrix = torch.arange(60.0).reshape(6, 10) - 20
    matrix[0, 0], matrix[3, 4], matrix[5, 9] = math.nan, math.inf, -math.inf
    matrix[2:4, 5:] = math.nan  # two whole cells
    grid = pooling.Grid(mode, 6, 10, 3, 2)
    heatmap = picture_of(matrix, grid)
    for (r, c), found in naive(matrix, grid).items():
        bad = sum(not math.isfinite(v) for v in found)
        assert (int(heatmap.nonfinite[r, c]), int(heatmap.counts[r, c])) == (bad, len(found) - bad)
        if bad < len(found):
            assert float(heatmap.values[r, c]) == expected(found, mode)


@pytest.mark.parametrize("row_dims", [1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_memory_in_any_order_of_dims_gives_the_same_picture(
    row_dims: int, order: tuple[int, ...]
) -> None:
    tensor = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)
    back = sorted(range(3), key=order.__getitem__)
    strided = tensor.permute(order).contiguous().permute(back)
    rows = math.prod(tensor.shape[:row_dims])
    grid = pooling.Grid("sum", rows, tensor.numel() // rows, 3, 4)
    one = picture_of(tensor, grid, row_dims=row_dims)
    other = picture_of(strided, grid, row_dims=row_dims)
    assert torch.equal(one.values, other.values)
    assert torch.equal(one.counts, other.counts)


def test_blocks_join_up_whatever_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(37, 53, dtype=torch.float64)
    grid = pooling.Grid("max", 37, 53, 10, 11)
    whole = picture_of(matrix, grid)
    monkeypatch.setattr(pooling, "BLOCK_NUMEL", 16)
    monkeypatch.setattr(pooling, "_BLOCK_COLUMNS", 7)
    small = picture_of(matrix, grid)
    assert torch.equal(whole.values, small.values)
    assert torch.equal(whole.counts, small.counts)


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": (3, 0)},
        {"sizes": (3,)},
        {"strides": (-1, 1)},
        {"steps": (0, 0), "sizes": (1000, 1000), "strides": (0, 0)},
        {"origin": (2, 0)},
        {"origin": (0, -1)},
        {"begin_bytes": 8},
        {"begin_bytes": -4},
        {"row_dims": 3},
        {"sizes": (1 << 40, 1 << 40)},
    ],
)
def test_what_leaves_the_snapshot_or_the_matrix_is_refused(change: dict[str, object]) -> None:
    right: dict[str, object] = {
        "begin_bytes": 0, "sizes": (3, 4), "strides": (4, 1), "steps": (1, 1), "row_dims": 1,
        "origin": (0, 0), "data_bytes": 48, "dtype": "float32",
        "grid": pooling.Grid("sum", 4, 4, 2, 2),
    }  # fmt: skip
    pooling.make_view(**right)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        pooling.make_view(**right | change)  # type: ignore[arg-type]
