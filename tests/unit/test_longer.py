"""Which cases a run takes: the sample, an eighth of the others in CI, all in a campaign."""

from collections import Counter

import pytest

from tests.longer import has_turn, sample, share

CASES = [(name, size) for name in ("a", "b", "c", "d", "e") for size in (1, 2, 4)]
CHOSEN = {("a", 1), ("c", 4)}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARAMD_TESTS_ALL", "PARAMD_TESTS_EIGHTH"):
        monkeypatch.delenv(name, raising=False)


def test_eight_eighths_have_every_case_once_and_the_sample_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[tuple[str, int]] = Counter()
    for turn in range(8):
        monkeypatch.setenv("PARAMD_TESTS_EIGHTH", str(turn))
        taken = sample(CASES, CHOSEN)
        assert taken == [case for case in CASES if case in taken], "in their order"
        assert len(taken) in (len(CHOSEN) + 1, len(CHOSEN) + 2)
        counts.update(taken)
    assert counts == {case: 8 if case in CHOSEN else 1 for case in CASES}


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_shares_have_every_case_once_and_commits_have_each_share_equally_often(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name, _ in CASES]
    counts: Counter[tuple[int, str]] = Counter()
    for turn in range(8):
        monkeypatch.setenv("PARAMD_TESTS_EIGHTH", str(turn))
        taken = share(list(enumerate(names)), parts)
        assert len(taken) in (len(names) // parts, len(names) // parts + 1)
        counts.update(taken)
    assert counts == dict.fromkeys(enumerate(names), 8 // parts)


def test_without_a_turn_one_share_is_taken_and_in_a_campaign_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(share(CASES, 4)) in (len(CASES) // 4, len(CASES) // 4 + 1)
    monkeypatch.setenv("PARAMD_TESTS_ALL", "1")
    assert share(CASES, 4) == CASES


def test_a_test_in_turns_runs_with_every_other_eighth_and_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"tests/test_it.py::test_{n}" for n in range(40)]
    assert all(map(has_turn, names))
    turns = []
    for eighth in range(8):
        monkeypatch.setenv("PARAMD_TESTS_EIGHTH", str(eighth))
        turns.append([has_turn(name) for name in names])
    assert all(sum(one) == 4 for one in zip(*turns, strict=True))
    assert 10 < sum(turns[0]) < 30
    monkeypatch.setenv("PARAMD_TESTS_ALL", "1")
    assert all(map(has_turn, names))
