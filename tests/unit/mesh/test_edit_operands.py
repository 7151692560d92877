"""Each rank's data is what its plan says, from any byte on."""

from typing import Any

import numpy as np
import pytest
import torch

from paramd.layout.edits.ops import ops_of
from paramd.layout.select import NameIndex
from paramd.layout.types import Box, Interval, Layout, Piece, TensorKind, TensorLayout
from paramd.mesh.edits.operands import Operands, parts, prepare, tensor_of

ROWS, COLS = 700, 900


def index() -> NameIndex:
    """A matrix in columns over two ranks, a flat one in intervals, and a scalar on both."""
    half = COLS // 2
    matrix = TensorLayout(
        "matrix", "float32", (ROWS, COLS), TensorKind.PARAMETER,
        (Piece(0, 0, Box((0, 0), (ROWS, half))), Piece(1, 0, Box((0, half), (ROWS, COLS)))),
    )  # fmt: skip
    begin = ROWS * half * 4
    flat = TensorLayout(
        "flat", "bfloat16", (10, 7), TensorKind.PARAMETER,
        (Piece(0, begin, Interval(0, 33)), Piece(1, begin, Interval(33, 70))),
    )  # fmt: skip
    scalar = TensorLayout(
        "scalar", "int64", (), TensorKind.PARAMETER,
        (Piece(0, begin + 128, Box((), ())), Piece(1, begin + 128, Box((), ()))),
    )  # fmt: skip
    return NameIndex(Layout(2, (begin + 256, begin + 256), (matrix, flat, scalar)))


def staged(operands: Operands, rank: int, offset_bytes: int = 0) -> bytes:
    return b"".join(
        bytes(part) for part in parts(operands, operands.plan.ranks[rank], offset_bytes)
    )


@pytest.fixture(scope="module")
def operands() -> Operands:
    torch.manual_seed(0)
    given = {
        "matrix[10:690, 3:899]": torch.randn(680, 896),
        "flat": torch.randn(12, 7, dtype=torch.bfloat16)[2:],  # a view from another's middle
        "scalar": torch.tensor(5),
    }
    return prepare(index(), ops_of((), set=given), allow_nonfinite=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_data_is_every_item_of_the_plan_in_its_place(operands: Operands, rank: int) -> None:
    plan, data = operands.plan.ranks[rank], staged(operands, rank)
    assert len(data) == plan.data_bytes > 1 << 20
    for item in plan.items:
        tensor = operands.tensors[item.op].clone()
        view = tensor.reshape(-1).as_strided(item.sizes, item.source_strides, item.source_begin)
        found = torch.frombuffer(
            bytearray(data[item.data_begin : item.data_begin + item.size_bytes]), dtype=tensor.dtype
        )
        assert torch.equal(found, view.reshape(-1))


def test_data_may_go_on_from_any_byte(operands: Operands) -> None:
    data = staged(operands, 1)
    for offset in (1, 63, 64, 4097, (1 << 21) + 5, len(data) - 3, len(data)):
        assert staged(operands, 1, offset) == data[offset:]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0)[::-1],
        np.arange(12.0).reshape(3, 4)[:, ::-2],
        np.flip(np.arange(6.0, dtype=">f4")),
        np.arange(6.0, dtype=">f8"),
        np.broadcast_to(np.float32(2), (2, 3)),
    ],
    ids=["reversed", "columns", "flipped", "byte-order", "read-only"],
)
def test_an_array_of_any_strides_and_byte_order_is_an_operand(array: Any) -> None:
    found = tensor_of(array)
    assert found.shape == array.shape
    assert found.tolist() == array.tolist()
    assert tensor_of([array, array]).tolist() == [array.tolist()] * 2
