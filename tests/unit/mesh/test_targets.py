"""Snapshots land in tensors as values, whatever views these are."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from paramd.layout.plan import plan_read
from paramd.layout.select import NameIndex, select
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.mesh.reading.assemble import Targets
from paramd.mesh.reading.places import PlaceSink

SHAPE = (4, 5)
INDEX = NameIndex(
    Layout(
        1,
        (80,),
        (
            TensorLayout(
                "w", "float32", SHAPE, TensorKind.PARAMETER, (Piece(0, 0, Box((0, 0), SHAPE)),)
            ),
        ),
    )
)


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.zeros(SHAPE),
        lambda: torch._neg_view(torch.zeros(SHAPE)),
        lambda: torch.zeros(SHAPE, dtype=torch.complex64).conj().imag,
        lambda: torch.zeros(5, 4).T,
        lambda: torch.zeros(8, 10)[::2, ::2],
    ],
    ids=["plain", "negative", "imaginary", "transposed", "strided"],
)
def test_a_tensor_to_fill_has_the_values_whatever_view_it_is(
    view: Callable[[], torch.Tensor],
) -> None:
    chosen = select(INDEX, ["w"], with_buffers=False)
    plan = plan_read(INDEX.layout, chosen)
    target, values = view(), torch.arange(20.0).reshape(SHAPE)
    targets = Targets(plan, [("w",)], dtype=None, device=None, into={"w": target})
    sink = PlaceSink(targets.places(plan.ranks[0]))
    sink.write(0, ctypes.addressof((ctypes.c_char * 80).from_buffer(values.numpy())), 80)
    assert torch.equal(target, values)
