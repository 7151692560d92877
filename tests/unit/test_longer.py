"""Which cases a run takes: the sample, an eighth of the others in CI, all in a campaign."""

from collections import Counter

import pytest

from tests.longer import sample

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
