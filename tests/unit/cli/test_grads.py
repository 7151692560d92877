"""`paramd grads` on a terminal: bars, headline, table."""

from __future__ import annotations

from typing import Any

from paramd.cli.tensors import BARS, History, frame_listing, headline, spark, table_of


def document(step: int, norm: float | None, **more: Any) -> dict[str, Any]:
    numbers = {
        "count": 6, "zero_count": 0, "nan_count": 0, "inf_count": 0, "norm": norm, "mean": 0.0,
        "std": 1.0, "min": -1.0, "max": 1.0,
    }  # fmt: skip
    return {
        "job": "run",
        "incarnation": 2,
        "step": step,
        "dropped": 0,
        "clip": {"factor": None},
        "scale": 1.0,
        "total": numbers,
        "params": [
            {"name": "w", "none": None, **numbers},
            {"name": "u", "none": "its grad is None"},
        ],
        **more,
    }


def test_bars_go_from_the_lowest_to_the_highest_norm() -> None:
    assert spark([1.0, 2.0, 8.0]) == BARS[0] + BARS[1] + BARS[7]
    assert spark([3.0, 3.0]) == BARS[0] * 2
    assert spark([None, 1.0]) == "·" + BARS[0]
    assert spark([]) == ""


def test_the_headline_says_what_is_special() -> None:
    assert headline(document(5, 1.0)) == "job run, incarnation 2, update 5"
    told = headline(document(5, 1.0, clip={"factor": 0.5}, scale=8.0, dropped=3))
    assert told.endswith("update 5, clipped by 0.5, scaled by 8, 3 dropped before")


def test_the_table_has_a_row_each_and_the_total() -> None:
    history = History()
    for step in (1, 2):
        history.add(document(step, float(step)))
    lines = table_of(document(2, 2.0), history, 200)
    assert [line.split()[0] for line in lines] == ["NAME", "w", "u", "total", "job"]
    narrow = table_of(document(2, 2.0), history, 50)
    assert max(map(len, narrow[:-1])) <= 50
    assert narrow[0].split()[:2] == ["NAME", "NORM"]
    assert narrow[1].endswith(BARS[0] + BARS[7])
    assert "-o wide" in narrow[-1]
    assert history.spark("w") == BARS[0] + BARS[7]
    assert history.spark("u") == "··"
    assert frame_listing(document(2, 2.0)).rows[1]["none"] == "its grad is None"
