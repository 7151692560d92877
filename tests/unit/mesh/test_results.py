"""Answers print well, and what a training script named is never markup."""

from __future__ import annotations

import torch

from paramd.layout.types import Box, Piece, TensorKind, TensorLayout
from paramd.mesh.results import (
    ParamInfo,
    Params,
    Summoned,
)

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


def test_a_summoned_state_dict_loads_into_the_module() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight
            self.norm = torch.nn.BatchNorm1d(3)

    source, target = Tied(), Tied()
    assert source.norm.running_mean is not None
    source.norm.running_mean.fill_(0.5)
    summoned = Summoned(
        source.state_dict(keep_vars=True), job="j", incarnation=1, step=7, seconds=1.0, bytes=24
    )
    plain = summoned.state_dict()
    assert type(plain) is dict
    assert plain["head.weight"] is plain["embed.weight"] is summoned["embed.weight"]
    target.load_state_dict(plain, strict=True)
    assert all(torch.equal(target.state_dict()[name], found) for name, found in plain.items())
