"""Planted bugs keep up with the code that they are planted in."""

from pathlib import Path

import pytest

from tests.mutants.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_can_be_planted_and_names_its_tests(bug: Bug) -> None:
    text = (ROOT / bug.file).read_text()
    assert text.count(bug.old) == 1, f"{bug.file}: adapt tests/mutants/bugs.py"
    compile(text.replace(bug.old, bug.new), bug.file, "exec")
    assert bug.tests
    for test in bug.tests:
        assert (ROOT / "tests" / test).is_file(), test
