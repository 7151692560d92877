"""docs/reference/roles.md says of roles what the code does."""

from __future__ import annotations

from tests.contract.security_page import BEGIN, END, PAGE, page


def test_the_role_matrix_is_that_of_the_code() -> None:
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert page() == text, "run `make surface` and look at what changed"
