"""Pictures: every way in which a tensor may be cut gives the heatmap of the whole."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd.layout.heatmaps import heatmap_items, matrix_of, merge_parts
from paramd.layout.plan import plan_read
from paramd.layout.select import NameIndex, select
from paramd.layout.types import Box, Interval, Layout, Piece, TensorKind, TensorLayout
from paramd.v1 import sidecar_pb2 as pb


def layout_of(shape: tuple[int, ...], pieces: tuple[Piece, ...], ranks: int) -> Layout:
    tensor = TensorLayout("w", "float32", shape, TensorKind.PARAMETER, pieces)
    return Layout(ranks, (1 << 20,) * ranks, (tensor,))


def positions(layout: Layout, pattern: str, row_dims: int) -> list[tuple[int, int]]:
    """(row, column) of every element that the items of all ranks name."""
    plan = plan_read(layout, select(NameIndex(layout), pattern))
    matrix = matrix_of(plan.tensors[0].shape, row_dims)
    found = []
    for items in heatmap_items(plan, matrix).values():
        for item in items:
            for index in product(*map(range, item.sizes)):
                steps = [i * step for i, step in zip(index, item.steps, strict=True)]
                k = item.row_dims
                found.append((item.row_begin + sum(steps[:k]), item.col_begin + sum(steps[k:])))
    return sorted(found)


@pytest.mark.parametrize("row_dims", [0, 1, 2, 3])
@pytest.mark.parametrize("pattern", ["w", "w[1:3]", "w[:, 1:4]", "w[0:2, 1:2, 1:3]"])
@pytest.mark.parametrize("cut", ["rows", "columns", "flat", "replicas"])
def test_every_element_has_its_place_exactly_once(cut: str, pattern: str, row_dims: int) -> None:
    shape = (4, 5, 3)
    pieces = {
        "rows": (Piece(0, 0, Box((0, 0, 0), (3, 5, 3))), Piece(1, 0, Box((3, 0, 0), (4, 5, 3)))),
        "columns": (
            Piece(0, 0, Box((0, 0, 0), (4, 2, 3)), strides=(1, 12, 4)),
            Piece(1, 0, Box((0, 2, 0), (4, 5, 3))),
        ),
        "flat": (Piece(0, 0, Interval(0, 17)), Piece(1, 0, Interval(17, 60))),
        "replicas": (Piece(0, 0, Box((0, 0, 0), shape)), Piece(1, 0, Box((0, 0, 0), shape))),
    }[cut]
    layout = layout_of(shape, pieces, 2)
    sizes = {"w": shape, "w[1:3]": (2, 5, 3), "w[:, 1:4]": (4, 3, 3), "w[0:2, 1:2, 1:3]": (2, 1, 2)}
    matrix = matrix_of(sizes[pattern], row_dims)
    every = sorted(product(range(matrix.rows), range(matrix.columns)))
    assert positions(layout, pattern, row_dims) == every


def part(row: int, column: int, values: list[list[float]]) -> pb.PoolSnapshotResponse:
    """A part of cells with one element each; NaN stands for an element that is not finite."""
    flat = [value for line in values for value in line]
    bad = [int(math.isnan(value)) for value in flat]
    return pb.PoolSnapshotResponse(
        cell_row_begin=row,
        cell_col_begin=column,
        cell_row_count=len(values),
        cell_col_count=len(values[0]),
        values=[0.0 if b else v for v, b in zip(flat, bad, strict=True)],
        counts=[1 - b for b in bad],
        nonfinite_counts=bad if any(bad) else [],
    )


@given(
    st.lists(st.floats(-100, 100) | st.just(math.nan), min_size=1, max_size=8),
    st.sampled_from(["mean", "min", "max", "absmax"]),
)
def test_a_cell_of_many_parts_tells_of_all_of_them(values: list[float], mode: str) -> None:
    shown = [abs(v) if mode == "absmax" else v for v in values]
    heatmap = merge_parts([part(0, 1, [[v]]) for v in shown], mode=mode, rows=1, columns=2)
    finite = [v for v in shown if not math.isnan(v)]
    reduce = {"mean": lambda v: sum(v) / len(v), "min": min, "max": max, "absmax": max}
    assert math.isnan(heatmap.values[0])
    if finite:
        assert heatmap.values[1] == reduce[mode](finite)
    else:
        assert math.isnan(heatmap.values[1])
    bad = len(values) - len(finite)
    assert heatmap.nonfinite == ([(0, 1, bad)] if bad else [])
    assert heatmap.count == len(values)
