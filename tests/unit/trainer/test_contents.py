"""What ranks compare of their unsharded parameters, and wrappers that are refused by name."""

from __future__ import annotations

import torch
from torch import nn

from paramd.trainer.attaching.discovering import contents
from paramd.trainer.model.shards import find_shards


def digests(model: nn.Module) -> list[int]:
    return list(contents(find_shards(model), [name for name, _ in model.named_parameters()]))


def test_equal_values_have_equal_digests_whatever_their_memory_order() -> None:
    one, other = nn.Linear(3, 5), nn.Linear(3, 5)
    other.load_state_dict(one.state_dict())
    other.weight.data = one.weight.detach().t().contiguous().t()
    assert other.weight.stride() != one.weight.stride()
    assert digests(one) == digests(other)
    with torch.no_grad():
        other.weight[4, 2] = -0.0 if bool(one.weight[4, 2] == 0) else 0.0
    assert [a == b for a, b in zip(digests(one), digests(other), strict=True)] == [False, True]
