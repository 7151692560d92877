"""Tests have a budget of lines and of seconds, and a run that takes more than it has fails."""

from tests import costs
from tests.launch import ROOT

TESTS = "import pytest, time\n@pytest.mark.parametrize('n', range(4))\n"
TESTS += "def test_sum(n): time.sleep(0.1)\n"


def test_no_folder_has_more_lines_than_its_budget() -> None:
    lines, told = costs.lines_of(), costs.told_lines(costs.README.read_text(encoding="utf-8"))
    assert lines.keys() == costs.LINES.keys() == told.keys(), "run: python -m tests.costs"
    for found in (lines, told):
        over = {name: count for name, count in found.items() if count > costs.LINES[name]}
        assert not over, f"{over}: cut, or raise tests/costs.py LINES and say what for"


def test_no_file_is_too_long_to_read() -> None:
    files = {path: path.read_text().count("\n") for path in costs.FOLDER.rglob("*.py")}
    assert not {path: count for path, count in files.items() if count > costs.FILE_LINES}


def test_a_slow_file_has_a_reason() -> None:
    assert all((ROOT / file).is_file() for file in costs.SECONDS)
