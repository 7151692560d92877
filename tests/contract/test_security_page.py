"""docs/reference/roles.md says of roles what the code does."""

import re

from tests.contract.security_page import BEGIN, END, PAGE, page
from tests.launch import ROOT


def test_the_role_matrix_is_that_of_the_code() -> None:
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert page() == text, "run `make surface` and look at what changed"


def test_what_an_adversary_can_reach_is_tried_by_a_test_that_is_there() -> None:
    text, tests = (ROOT / "docs/security.md").read_text(), ROOT / "tests"
    reached = text.partition("five adversaries")[2].partition("Out of scope")[0]
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", text)
    assert all("::test_" in told for told in reached.split("\n- ")[1:])
    assert len(named) > 12
    for file, test in named:
        assert re.search(rf"def {test}\(", (tests / file).read_text()), f"{file}::{test}"
    for file in re.findall(r"`tests/([\w/]+\.py)`", text):
        assert (tests / file).is_file(), file
