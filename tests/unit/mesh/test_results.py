"""Answers print well, and what a training script named is never markup."""

from __future__ import annotations

import pytest
import torch

from paramd.errors import NotFoundError
from paramd.layout.stats import EMPTY, Stats, summarize
from paramd.layout.types import Box, Piece, TensorKind, TensorLayout
from paramd.mesh.results import ParamInfo, Params, StatsTable, Summoned, TensorStats

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


def stats() -> StatsTable:
    summary = summarize(Stats(count=4, mean=1.0, sum_squares=4.0, min=1.0, max=1.0))
    rows = [
        TensorStats(name=name, dtype="float32", shape=(4,), summary=summary) for name in ("a", "b")
    ]
    total = TensorStats(name="total", dtype="", shape=(8,), summary=summarize(EMPTY))
    return StatsTable(rows, total=total, job="j", incarnation=1, step=7)


def test_a_table_finds_rows_by_name_and_its_slices_are_tables() -> None:
    table = stats()
    assert "a" in table  # type: ignore[comparison-overlap]
    assert "c" not in table  # type: ignore[comparison-overlap]
    assert table[0] in table
    assert table["b"] is table[1]
    assert table["b"].norm == table[1].summary.norm == 2.0
    assert (type(table[1:]), table[1:].step, len(table[1:])) == (StatsTable, 7, 1)
    assert "total" not in repr(table[:1])
    with pytest.raises(NotFoundError, match="'c'"):
        table["c"]
    assert len(repr(table[0])) < 200
    assert "float32" in repr(table[0])
