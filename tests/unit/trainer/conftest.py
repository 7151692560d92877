"""Fewer objects for those whose tests move parameters."""

import gc

import pytest


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Moving looks at every object of the process; so only these tests' own are left to see."""
    gc.collect()
    gc.freeze()
