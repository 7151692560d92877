"""Names are those of a user's state dict, whatever wraps the modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from paramd.layout.types import TensorKind
from paramd.trainer.model.shards import find_shards


class Named(nn.Module):
    """Attributes called like the wrappers' own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self._orig_mod = nn.Linear(3, 2)


def names(model: nn.Module) -> list[str]:
    return [shard.fqn for shard in find_shards(model)]


def test_names_are_those_of_the_state_dict_in_its_order() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Conv1d(1, 1, 1)))

    assert names(model) == list(model.state_dict())


def test_compiled_and_checkpointed_modules_keep_their_users_names() -> None:
    model = nn.Sequential(checkpoint_wrapper(Named()), nn.Linear(2, 2))
    expected = list(nn.Sequential(Named(), nn.Linear(2, 2)).state_dict())

    assert names(torch.compile(model, backend="eager")) == expected
    inside = checkpoint_wrapper(torch.compile(Named(), backend="eager"))
    assert names(nn.Sequential(inside, nn.Linear(2, 2))) == expected
    assert (
        names(nn.Sequential(torch.compile(Named(), backend="eager"), nn.Linear(2, 2))) == expected
    )


def test_tied_parameters_are_one_shard_with_all_their_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    model["c"] = model["a"]

    model["a"].bias.requires_grad_(False)
    found = {shard.fqn: shard.aliases for shard in find_shards(model)}

    assert [shard.trainable for shard in find_shards(model)] == [True, False]
    assert found == {"a.weight": ("b.weight", "c.weight"), "a.bias": ("c.bias",)}
    assert {n for fqn, others in found.items() for n in (fqn, *others)} == set(model.state_dict())


def test_only_persistent_buffers_count() -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.zeros(2))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    model.register_buffer("absent", None)

    assert [(s.fqn, s.kind) for s in find_shards(model)] == [("kept", TensorKind.BUFFER)]
