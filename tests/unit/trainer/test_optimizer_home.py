"""Optimizer state in shared memory: the same bits, found again by a successor."""

import copy
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from paramd.errors import ConflictError
from paramd.memory.control_page import ControlPage, Word
from paramd.memory.descriptors import SparseMemory, create_memory, create_sparse
from paramd.memory.handover import optimizer_bytes
from paramd.trainer.resume.codec import decode, encode
from paramd.trainer.resume.optimizer_home import OptimizerHome

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, amsgrad=True),
    "adam-loop": lambda ps: torch.optim.Adam(ps, foreach=False),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.5, centered=True),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
}


class Memory:
    """The descriptors an optimizer home needs."""

    def __init__(self) -> None:
        self.descriptors = [create_memory("page", 4096), create_sparse("o", optimizer_bytes(1024))]
        self.page = ControlPage(self.descriptors[0])
        self.optimizer = SparseMemory(self.descriptors[1])

    def close(self) -> None:
        self.page.close()
        self.optimizer.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.close()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        net(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()


def same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    left, right = one.state_dict()["state"], other.state_dict()["state"]
    return encode(left) == encode(right)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_computes_the_same_and_a_successor_goes_on(name: str, memory: Memory) -> None:
    plain, moved = model(), model()
    alone, ours = (OPTIMIZERS[name](net.parameters()) for net in (plain, moved))
    home = OptimizerHome(memory.optimizer, memory.page, [ours])
    for step in range(5):
        trained(plain, alone, range(step, step + 1))
        trained(moved, ours, range(step, step + 1))
        home.settle()
    assert same_state(alone, ours)
    tensors = [v for s in ours.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    base = memory.optimizer.address
    for tensor in tensors:
        assert base <= tensor.data_ptr() < base + memory.page[Word.OPTIMIZER_BYTES]
    table, others = decode(encode(home.table(0))), decode(encode(home.others()))
    heir = copy.deepcopy(moved)
    heirs = OPTIMIZERS[name](heir.parameters())
    successor = OptimizerHome(memory.optimizer, memory.page, [heirs])
    successor.adopt(table, others)
    assert same_state(alone, heirs)
    assert not successor.settle()
    trained(plain, alone, range(5, 8))
    trained(heir, heirs, range(5, 8))
    assert same_state(alone, heirs)
    assert all(map(torch.equal, plain.parameters(), heir.parameters()))


def test_state_that_was_loaded_comes_home_and_its_place_is_used_again(memory: Memory) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    home = OptimizerHome(memory.optimizer, memory.page, [optimizer])
    trained(net, optimizer, range(2))
    assert home.settle()
    used = home.used_bytes
    for _ in range(3):
        saved = copy.deepcopy(optimizer.state_dict())
        trained(net, optimizer, range(2, 3))
        optimizer.load_state_dict(saved)
        assert home.settle()
        assert encode(optimizer.state_dict()["state"]) == encode(saved["state"])
    assert home.used_bytes == used
    assert not home.settle()


def test_a_place_the_script_still_looks_at_is_not_written_to(memory: Memory) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    home = OptimizerHome(memory.optimizer, memory.page, [optimizer])
    trained(net, optimizer, range(2))
    home.settle()
    param = net[0].weight
    kept = optimizer.state[param]["exp_avg"]
    values = kept.clone()
    optimizer.state[param]["exp_avg"] = torch.zeros_like(kept)
    assert home.settle()
    assert torch.equal(kept, values)
    assert torch.equal(optimizer.state[param]["exp_avg"], torch.zeros_like(kept))


def test_state_that_shares_memory_is_refused_by_name(memory: Memory) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    param = net[0].weight
    buffer = torch.zeros(2 * param.numel())
    optimizer.state[param]["view"] = buffer[: param.numel()].view_as(param)
    home = OptimizerHome(memory.optimizer, memory.page, [optimizer])
    with pytest.raises(ConflictError, match="state 'view' of parameter 0 of optimizer 0 shares"):
        home.settle()


def test_a_parameter_that_moved_to_another_group_is_in_that_one_in_the_table(
    memory: Memory,
) -> None:
    net = model()
    first, *others = net.parameters()
    optimizer = torch.optim.SGD(
        [{"params": [first]}, {"params": others, "lr": 0.5}], lr=0.1, momentum=0.9
    )
    trained(net, optimizer, range(1))
    home = OptimizerHome(memory.optimizer, memory.page, [optimizer])
    assert home.settle()
    assert not home.settle()
    groups = optimizer.param_groups
    groups[0]["params"].append(groups[1]["params"].pop(0))
    assert home.settle(), "the table has changed"
    (params,) = home.table(0)["params"]
    assert [group for _, group, *_ in params] == [0, 0, 1, 1]
    assert not home.settle()
    home.close()
