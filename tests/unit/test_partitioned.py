"""Partitions of an optimizer: which regions a range of a slice is; what is put back afterwards."""

from contextlib import ExitStack
from itertools import combinations
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paramd.integrations.megatron import regions
from paramd.integrations.training import override
from paramd.layout.merge import defect
from paramd.layout.types import Box, Interval, Region

SHAPES = [(), (5,), (3, 4), (2, 3, 2), (1, 4, 1, 2)]


def taken(full: torch.Tensor, region: Region) -> torch.Tensor:
    if isinstance(region, Interval):
        return full.flatten()[region.begin : region.end]
    return full[tuple(map(slice, region.begin, region.end))].flatten()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_range_of_every_ranks_slice_is_found_in_the_whole(
    shape: tuple[int, ...], ranks: int
) -> None:
    for split in [None, *range(len(shape))] if ranks == 1 else range(len(shape)):
        sizes = [n * ranks if dim == split else n for dim, n in enumerate(shape)]
        full = torch.arange(prod(sizes)).view(sizes)
        for rank in range(ranks):
            mine = full if split is None else full.chunk(ranks, split)[rank]
            flat = mine.flatten()
            for begin, end in combinations(range(len(flat) + 1), 2):
                found = regions(begin, end, shape, split, rank)
                elements = torch.cat([taken(full, region) for region in found])
                assert torch.equal(elements, flat[begin:end]), (split, rank, begin, end, found)
                assert len(found) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_ranges_of_all_ranks_make_a_layout(shape: tuple[int, ...]) -> None:
    """Wherever a bucket's border lies: two ranks for each slice, two slices."""
    numel = prod(shape)
    for split in [None, *range(len(shape))]:
        slices = 1 if split is None else 2
        full = tuple(n * slices if dim == split else n for dim, n in enumerate(shape))
        for border in range(numel + 1):
            found: list[Region] = []
            for rank in range(slices):
                found += regions(0, border, shape, split, rank)
                found += regions(border, numel, shape, split, rank)
            assert defect(full, tuple(found)) is None, (split, border, found)


def test_a_whole_parameter_is_one_box_so_that_replicas_are_compared() -> None:
    assert regions(0, 12, (3, 4), None, 0) == [Box((0, 0), (3, 4))]
    assert regions(0, 12, (3, 4), 1, 2) == [Box((0, 8), (3, 12))]
    assert regions(3, 3, (3, 4), None, 0) == []


class Stepping:
    def step(self) -> str:
        return "its own"


def test_an_overridden_method_is_put_back_as_it_was() -> None:
    ends = ExitStack()
    attachment: Any = SimpleNamespace(_at_detach=ends)
    plain, wrapped, wrapped_since = Stepping(), Stepping(), Stepping()
    wrapped.step = lambda: "a scheduler's"  # type: ignore[method-assign]
    for one in (plain, wrapped, wrapped_since):
        override(attachment, one, "step", lambda: "counted")
        assert one.step() == "counted"
    wrapped_since.step = lambda: "somebody's"  # type: ignore[method-assign]
    ends.close()
    assert plain.step() == "its own"
    assert not vars(plain)
    assert wrapped.step() == "a scheduler's"
    assert wrapped_since.step() == "somebody's"
