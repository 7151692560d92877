"""One of two ranks: parameters leave the arena in training, are noticed and taken back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paramd.errors import ConflictError
from tests.ending import end
from tests.multiprocess.kinds import Built, Kind, full_parameters, kinds_for
from tests.multiprocess.rehome_worker import assert_same_tensors, check_inside, move_in

LEAVE_AT = 2
STEPS = 4


def assign_state(built: Built) -> None:
    """Every parameter becomes another object with other memory, as after loading a checkpoint."""
    state = {name: value.detach().clone() * 0.5 for name, value in built.model.state_dict().items()}
    built.model.load_state_dict(state, assign=True)


def replace_data(built: Built) -> None:
    """The memory of every second parameter is replaced; the objects stay."""
    with torch.no_grad():
        for param in list(built.model.parameters())[::2]:
            halved = param.data * 0.5
            if halved.stride() == param.stride():
                param.data = halved


def train(kind: Kind, leave: Callable[[Built], None], inside: bool) -> tuple[list[float], Built]:
    built = kind.build()
    optimizer = _optimizer(built)
    home, arena = move_in(built, optimizer) if inside else (None, None)
    losses = []
    for step in range(STEPS):
        if step == LEAVE_AT:
            leave(built)
            optimizer = _optimizer(built)
            if home is not None:
                noticed = home.check(full=True)
                assert noticed
                assert set(home.take_back()) == set(noticed)
        loss = built.loss(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if home is not None and arena is not None:
            assert home.check(full=True) == []
            check_inside(built, home, arena, optimizer)
    return losses, built


def _optimizer(built: Built) -> torch.optim.Optimizer:
    params: list[nn.Parameter] = [p for p in built.model.parameters() if p.requires_grad]
    return torch.optim.SGD(params, lr=0.05)


def compare(name: str, leave: Callable[[Built], None]) -> None:
    kind = _kind(name)
    expected, reference = train(kind, leave, False)
    losses, built = train(kind, leave, True)
    assert losses == expected, (name, losses, expected)
    assert_same_tensors(full_parameters(built.model), full_parameters(reference.model))


def check_untied_is_refused() -> None:
    """Assigning makes tied parameters separate ones; no arena may pretend otherwise."""
    built = _kind("ddp").build()
    home, arena = move_in(built, _optimizer(built))
    before = bytes(arena.memory)
    assign_state(built)
    with pytest.raises(ConflictError, match=r"head\.weight.*detach and attach again"):
        home.take_back()
    assert bytes(arena.memory) == before
    full = full_parameters(built.model)
    home.move_out()
    assert_same_tensors(full_parameters(built.model), full)
    del home
    arena.close()


def _kind(name: str) -> Kind:
    return next(kind for kind in kinds_for(dist.get_world_size()) if kind.name == name)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare("fsdp2-dims", assign_state)
    print("assign", flush=True)
    for name in ("ddp", "ddp-odd", "fsdp1-full-orig", "fsdp1-no-shard-orig"):
        compare(name, replace_data)
    print("data", flush=True)
    check_untied_is_refused()
    print("untied", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
