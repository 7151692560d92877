"""Tests that watch for some time, or do a thing many times, and more so in `make test-long`."""

from __future__ import annotations

import os


def seconds(usual: float, longer: float) -> float:
    """How long to watch."""
    return longer if os.environ.get("PARAMD_TESTS_LONG") == "1" else usual


def times(usual: int, longer: int) -> int:
    """How often to do it."""
    return round(seconds(usual, longer))
