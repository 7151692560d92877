"""Options that are passed on are those of the methods that take them."""

import inspect
from collections.abc import Callable, Set
from typing import Any

import pytest

import paramd
from paramd.integrations.training import AttachOptions
from paramd.mesh.amesh import AsyncMesh
from paramd.mesh.options import EditOptions, StatsOptions, SummonOptions
from paramd.trainer.attaching.exporting import ExportOptions


@pytest.mark.parametrize(
    ("options", "taker", "apart"),
    [
        (SummonOptions, AsyncMesh.summon, set()),
        (StatsOptions, AsyncMesh.stats, set()),
        (EditOptions, AsyncMesh.edit, set()),
        (ExportOptions, AsyncMesh.export, {"include", "timeout"}),
        (AttachOptions, paramd.attach, {"job", "accelerator"}),
    ],
)
def test_each_keyword_of_the_method_is_an_option(
    options: Any, taker: Callable[..., Any], apart: Set[str]
) -> None:
    taken = inspect.signature(taker).parameters.values()
    keywords = {one.name for one in taken if one.kind is inspect.Parameter.KEYWORD_ONLY}
    assert set(options.__annotations__) == keywords - apart
