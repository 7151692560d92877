"""Which indices a placement leaves to a rank: the same as torch's own splitting gives."""

from itertools import product

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from paramd.trainer.model.dtensor import Runs, shard_runs

SIZES = (0, 1, 2, 3, 5, 7, 8, 13, 29)


def indices(runs: Runs) -> list[int]:
    return [index for begin, end in runs for index in range(begin, end)]


def by_torch(held: torch.Tensor, chunks: int, split_factor: int) -> list[list[int]]:
    placement = Shard(0) if split_factor == 1 else _StridedShard(0, split_factor=split_factor)
    parts, _ = placement._split_tensor(held, chunks, with_padding=False, contiguous=False)
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("split_factor", [1, 2, 3, 4])
def test_one_placement_leaves_what_torch_leaves(split_factor: int) -> None:
    for size, chunks in product(SIZES, (1, 2, 3, 4)):
        if size == 0:
            continue
        expected = by_torch(torch.arange(size), chunks, split_factor)
        ours = [indices(shard_runs(((0, size),), chunks, i, split_factor)) for i in range(chunks)]
        assert ours == expected, (size, chunks)


def test_two_placements_on_one_dim_are_applied_one_after_the_other() -> None:
    for size, outer, inner in product(SIZES[1:], (1, 2, 3, 4), (1, 2, 3, 4)):
        for row, column in product(range(outer), range(inner)):
            held = shard_runs(((0, size),), outer, row, inner)
            ours = indices(shard_runs(held, inner, column))
            first = torch.tensor(by_torch(torch.arange(size), outer, inner)[row], dtype=torch.int64)
            expected = by_torch(first, inner, 1)[column] if len(first) else []
            assert ours == expected, (size, outer, inner, row, column)
