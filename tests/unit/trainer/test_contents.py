"""What ranks compare of their unsharded parameters, and wrappers that are refused by name."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from paramd.errors import UsageError
from paramd.trainer.attaching.discovering import contents
from paramd.trainer.attaching.given import resolve
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


def test_megatrons_wrapper_is_refused_with_how_to_attach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for its class, whose package takes seconds to import."""
    name = "megatron.core.distributed.data_parallel_base"
    stand_in = ModuleType(name)
    wrapper = type("_BaseDataParallel", (nn.Module,), {})
    stand_in._BaseDataParallel = wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, stand_in)
    with pytest.raises(UsageError, match=r"_BaseDataParallel.*integrations.megatron.attach\(model"):
        resolve(nn.Sequential(wrapper()), None, "job", None)
