"""Fewer objects for those whose tests move parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """Moving looks at every object of the process; so only these tests' own are left to see."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
