"""Answers print well, and what a training script named is never markup."""

import pytest
import torch

from paramd.layout.types import Box, Piece, TensorKind, TensorLayout
from paramd.mesh.results import ParamInfo, Params, Summoned

HOSTILE = "<script>alert(1)</script>"


def info(name: str, *ranks: int) -> ParamInfo:
    pieces = tuple(Piece(rank, 0, Box((0,), (4,))) for rank in ranks)
    return ParamInfo.of(TensorLayout(name, "float32", (4,), TensorKind.PARAMETER, pieces))


def test_names_are_escaped_in_notebooks() -> None:
    summoned = Summoned(
        {HOSTILE: torch.zeros(2)}, job=HOSTILE, incarnation=1, step=2, seconds=0.5, bytes=8
    )
    for answer in (Params([info(HOSTILE, 0)]), summoned):
        assert "<script>" not in answer._repr_html_()
        assert "&lt;script&gt;" in answer._repr_html_()


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"w": torch.zeros(2)}, True),
        ({"w": torch.nn.Parameter(torch.zeros(2))}, True),
        ({"w": torch.zeros(3)}, False),
        ({"w": torch.zeros(2, device="meta")}, False),
        ({"w": [0.0, 0.0]}, False),
        ({}, False),
        (None, False),
    ],
)
def test_summons_are_compared_whole(other: object, same: bool) -> None:
    found = Summoned({"w": torch.zeros(2)}, job="j", incarnation=1, step=2, seconds=0.5, bytes=8)
    assert (found == other, found != other) == (same, not same)
