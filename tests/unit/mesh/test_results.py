"""Answers print well, and what a training script named is never markup."""

from __future__ import annotations

import torch

from paramd.layout.types import Box, Piece, TensorKind, TensorLayout
from paramd.mesh.results import (
    SHOWN_ROWS,
    ParamInfo,
    Params,
    Summoned,
    bytes_text,
    ranks_text,
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


def test_long_tables_say_how_much_they_hide() -> None:
    params = Params(info(f"layer.{n}", 0) for n in range(SHOWN_ROWS + 5))
    assert "(5 not shown)" in repr(params)
    assert f"layer.{SHOWN_ROWS - 1} " in repr(params)
    assert f"layer.{SHOWN_ROWS} " not in repr(params)
    assert "0 tensors" in repr(Params())


def test_ranks_are_told_as_runs() -> None:
    assert ranks_text([6, 0, 1, 2, 3]) == "0-3, 6"
    assert ranks_text([]) == ""
    assert info("w", 1, 0, 5).ranks == (0, 1, 5)


def test_a_summoned_dict_says_its_step() -> None:
    summoned = Summoned(
        {"w": torch.zeros(2, 3)}, job="j", incarnation=1, step=7, seconds=1.0, bytes=24
    )
    assert summoned["w"].shape == (2, 3)
    assert "step 7" in repr(summoned)
    assert "[2, 3]" in repr(summoned)


def test_bytes_have_units() -> None:
    assert [bytes_text(n) for n in (12, 1536, 5 << 20, 3 << 40)] == [
        "12 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
