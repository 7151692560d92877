"""Tests have a budget of seconds, and a file with a budget of its own exists."""

from tests import costs
from tests.launch import ROOT


def test_a_slow_file_has_a_reason() -> None:
    assert all((ROOT / file).is_file() for file in costs.SECONDS)
