"""Tests that watch for some time, or do a thing many times, and more so in `make test-long`;
tests over many cases, of which `make test` has a sample and `make campaigns`, as CI runs it, all.
"""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from typing import TypeVar

Case = TypeVar("Case")


def seconds(usual: float, longer: float) -> float:
    """How long to watch."""
    return longer if os.environ.get("PARAMD_TESTS_LONG") == "1" else usual


def times(usual: int, longer: int) -> int:
    """How often to do it."""
    return round(seconds(usual, longer))


def takes_all() -> bool:
    """Whether tests over many cases have all of them."""
    return os.environ.get("PARAMD_TESTS_ALL") == "1"


def sample(cases: Sequence[Case], chosen: Container[Case]) -> list[Case]:
    """The cases to test now: the chosen ones, or all."""
    return [case for case in cases if takes_all() or case in chosen]
