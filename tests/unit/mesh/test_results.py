"""Answers print well, and what a training script named is never markup."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paramd.errors import UsageError
from paramd.layout.stats import Stats, summarize
from paramd.layout.types import Box, Piece, TensorKind, TensorLayout
from paramd.mesh.edits.calls import Edits, parse_edit
from paramd.mesh.results import (
    SHOWN_ROWS,
    MeshStatus,
    ParamInfo,
    Params,
    RankStatus,
    StatsTable,
    Summoned,
    TensorStats,
    bytes_text,
    ranks_text,
)

HOSTILE = "<script>alert(1)</script>"
EDIT = {
    "id": "e", "job": "j", "incarnation": 1, "state": "APPLIED", "reason": "", "actor": "a",
    "committed_by": "a", "note": "", "dry_run": False, "created_s": 1.0, "ended_s": 2.0, "step": 3,
    "boundary": 1, "ops": [], "size_bytes": 8, "stop_ms": None, "after": None,
    "before": {
        "min": 0.0, "max": 2.0, "mean": 1.0, "norm": 3.0, "nan_count": 0, "inf_count": 0,
    },
    "undo": {"possible": False, "reason": None}, "undo_of": None, "undone_by": None,
    "hyperparameters": None, "rollback": None, "warning": "",
}  # fmt: skip


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


def test_without_pandas_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        Params([info("w", 0)]).to_pandas()


class FakeFrame:
    """What `to_pandas` uses of a DataFrame, where pandas is not installed."""

    def __init__(self, records: list[dict[str, Any]], columns: list[str]) -> None:
        self.records, self.columns = records, columns
        self.attrs: dict[str, Any] = {}


@pytest.fixture
def pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=FakeFrame))


def test_frames_have_values_under_their_names(pandas: None) -> None:
    numbers = summarize(Stats(count=4, mean=0.5, m2=1.0, sum_squares=2.0, min=-1.0, max=1.0))
    row = TensorStats(name="w", dtype="float32", shape=(4,), summary=numbers)
    frame = StatsTable([row], total=row, job="j", incarnation=1, step=7).to_pandas()
    (record,) = frame.records
    assert (record["name"], record["shape"], record["max"]) == ("w", (4,), 1.0)
    assert set(record) == set(frame.columns)
    assert (frame.attrs["job"], frame.attrs["step"], frame.attrs["unsettled"]) == ("j", 7, False)

    (edit,) = Edits([parse_edit(EDIT)]).to_pandas().records
    assert (edit["state"], edit["before_max"], edit["after_max"]) == ("APPLIED", 2.0, None)

    for table in (
        Params(),
        Edits(),
        StatsTable([], total=row, job="j", incarnation=1, step=7),
        MeshStatus([], job="j", incarnation=1, world_size=0),
    ):
        frame = table.to_pandas()
        assert not frame.records
        assert len(frame.columns) > 5, type(table)


def test_every_table_has_its_rows_type(pandas: None) -> None:
    assert Params([info("w", 0, 1)]).to_pandas().records[0]["ranks"] == (0, 1)
    rank = RankStatus(rank=3, phase="held", address="", reason="")
    frame = MeshStatus([rank], job="j", incarnation=1, world_size=4).to_pandas()
    assert frame.records[0]["rank"] == 3
    assert frame.attrs["world_size"] == 4
