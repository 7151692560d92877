"""Rules over the numbers that scripts log."""

from __future__ import annotations

import pytest

from paramd.errors import UsageError
from paramd_service.control.alerts.config import AlertConfig, parse_number
from paramd_service.control.alerts.numbers import MAX_NAMES, NumberHistory
from paramd_service.control.alerts.service import parse_alerts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("loss > 10", ("loss", ">", 10.0)),
        ("train/loss<-1e-3", ("train/loss", "<", -1e-3)),
        (" loss  jumps 5 ", ("loss", "jumps", 5.0)),
    ],
)
def test_rules_are_parsed(text: str, parts: tuple[str, str, float]) -> None:
    rule = parse_number(text)
    assert (rule.name, rule.how, rule.bound) == parts


@pytest.mark.parametrize(
    "text", ["", "loss", "loss = 3", "loss > x", "loss > nan", "loss jumps 1", "lossjumps5", "> 3"]
)
def test_a_rule_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="numbers: "):
        AlertConfig(numbers=(text,))


def test_each_rule_finds_what_violates_it() -> None:
    history = NumberHistory(["loss > 10", "loss jumps 3", "lr < 0"])
    assert history.judge(0, "loss", [(step, 1.0) for step in range(4)]) == []
    # Too few values for a jump.
    assert history.judge(0, "loss", [(4, 4.0)]) == []
    [jump] = history.judge(0, "loss", [(5, 3.5)])
    assert "median" in jump.reason
    found = history.judge(0, "loss", [(6, 11.0), (7, 1.0)])
    assert [(one.step, one.severity) for one in found] == [(6, "warning")] * 2
    [bad] = history.judge(0, "loss", [(8, float("nan"))])
    assert (bad.severity, bad.step, bad.ranks) == ("critical", 8, (0,))
    [low] = history.judge(3, "lr", [(1, -1e-9)])
    assert "below 0" in low.reason
    assert history.judge(1, "loss", [(1, 3.5)]) == []


def test_a_jump_of_a_negative_number_is_one_upwards() -> None:
    history = NumberHistory(["score jumps 2"])
    assert history.judge(0, "score", [(step, -1.0) for step in range(6)]) == []
    assert history.judge(0, "score", [(6, -5.0)]) == []
    assert history.judge(0, "score", [(7, 0.5)])


def test_names_of_a_rank_are_bounded() -> None:
    history = NumberHistory([])
    for number in range(MAX_NAMES):
        assert history.knows(0, f"n{number}")
        history.judge(0, f"n{number}", [(1, 1.0)])
    assert not history.knows(0, "one more")
    assert history.knows(0, "n3")
    assert history.knows(1, "one more")


def test_only_rules_about_the_state_may_pause_training_and_only_on_its_users_word() -> None:
    assert AlertConfig(hold=("logged-number", "norm-jump")).hold == ("logged-number", "norm-jump")
    with pytest.raises(UsageError, match="hold: 'straggler' cannot pause training"):
        AlertConfig(hold=("straggler",))
    table = {"hold": ["logged-number"]}
    assert parse_alerts(table, place="own") == {"hold": ("logged-number",)}
    with pytest.raises(UsageError, match="hold in the working directory is not trusted"):
        parse_alerts(table, place="here", trusted=False)
