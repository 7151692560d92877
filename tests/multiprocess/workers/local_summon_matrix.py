"""All 16 sets of flags on every kind of module; prints one line a kind.

What a block shows and what stays after it are compared with plain tensors kept beside it,
read from the model by torch's own means. The last part trains on.
"""

import itertools
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

import paramd
from tests.multiprocess.kinds import Built, Kind, full_parameters, kinds_for
from tests.rank import run

FLAGS = ("writeback", "rank0_only", "offload_to_cpu", "with_grads")
FLAG_SETS = [
    dict(zip(FLAGS, values, strict=True)) for values in itertools.product((False, True), repeat=4)
]
LEARNING_RATE = 0.25

Tensors = dict[str, torch.Tensor]


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for kind in kinds_for(dist.get_world_size()):
        if not names or kind.name in names:
            began = time.monotonic()
            check_flags(kind)
            check_training(kind)
            print(f"ok {kind.name} {time.monotonic() - began:.1f} s", flush=True)


def check_flags(kind: Kind) -> None:
    """Each set of flags shows and keeps what it says, on a model with gradients."""
    built = kind.build()
    model = built.model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LEARNING_RATE)
    built.loss(0).backward()
    values, grads = full_parameters(model), reference_gradients(model)
    for number, flags in enumerate(FLAG_SETS):
        where = f"{kind.name} {flags} rank {dist.get_rank()}"
        values, grads = check_one(model, flags, number, values, grads, where)
    optimizer.step()
    for name, now in full_parameters(model).items():
        if name in grads:
            values[name] = values[name].add(grads[name].to(now.dtype), alpha=-LEARNING_RATE)
        assert torch.equal(now, values[name]), f"{kind.name}: {name} after the step"


def reference_gradients(model: nn.Module) -> Tensors:
    """What the first block shows; later blocks, and the optimizer, must agree with it."""
    with paramd.summon_full_params(model, writeback=False, with_grads=True) as params:
        return {n: p.grad.clone() for n, p in params.items() if p.grad is not None}


def check_one(
    model: nn.Module,
    flags: dict[str, bool],
    number: int,
    values: Tensors,
    grads: Tensors,
    where: str,
) -> tuple[Tensors, Tensors]:
    """Returns the values and gradients that the model must have afterwards."""
    before = [(name, id(param)) for name, param in model.named_parameters()]
    buffers = [(name, id(b), b.clone()) for name, b in model.named_buffers()]
    edited_values, edited_grads = dict(values), dict(grads)
    with paramd.summon_full_params(model, **flags) as params, torch.no_grad():
        if flags["rank0_only"] and dist.get_rank() != 0:
            assert params == {}, where
            assert [(name, id(param)) for name, param in model.named_parameters()] == before, where
        else:
            check_shown(model, params, flags, values, grads, where)
        for index, (name, value) in enumerate(values.items()):
            edited_values[name] = edit(value, index + number)
            if name in params:
                params[name].copy_(edited_values[name])
            if name in grads and flags["with_grads"]:
                edited_grads[name] = edit(grads[name], index + number)
                if name in params:
                    params[name].grad.copy_(edited_grads[name])
    assert [(name, id(param)) for name, param in model.named_parameters()] == before, where
    for (name, identity, old), (_, new) in zip(buffers, model.named_buffers(), strict=True):
        assert identity == id(new), f"{where}: buffer {name}"
        assert torch.equal(old, new), f"{where}: buffer {name}"
    expected = edited_values if flags["writeback"] else values
    if number % 3 == 0:
        # Torch's own means are slow; in between, the next block shows what stayed.
        for name, now in full_parameters(model).items():
            assert torch.equal(now, expected[name]), f"{where}: {name} afterwards"
    return expected, edited_grads if flags["writeback"] else grads


def edit(value: torch.Tensor, index: int) -> torch.Tensor:
    """Another value at each place; tied names get the same."""
    places = torch.arange(value.numel(), dtype=torch.float32).view(value.shape)
    index = 0 if value.shape == (29, 7) else index
    return (value * 0.5 + (places % 7 - 3 + index % 3).to(value.dtype) / 64).to(value.dtype)


def check_shown(
    model: nn.Module,
    params: dict[str, nn.Parameter],
    flags: dict[str, bool],
    values: Tensors,
    grads: Tensors,
    where: str,
) -> None:
    assert params.keys() == values.keys(), where
    registered = {id(param) for param in model.parameters()}
    assert registered == {id(param) for param in params.values()}, where
    for name, param in params.items():
        assert type(param) is nn.Parameter, f"{where}: {name}"
        assert type(param.data) is torch.Tensor, f"{where}: {name}"
        assert torch.equal(param.detach(), values[name]), f"{where}: value of {name}"
        if not flags["with_grads"] or name not in grads:
            assert param.grad is None, f"{where}: gradient of {name}"
        else:
            assert torch.equal(param.grad, grads[name]), f"{where}: gradient of {name}"


def check_training(kind: Kind) -> None:
    """Blocks without edits change nothing: three more steps are bit-equal."""
    losses, values = trained(kind.build(), blocks=False)
    losses_with, values_with = trained(kind.build(), blocks=True)
    assert torch.equal(losses, losses_with), f"{kind.name}: {losses} {losses_with}"
    for name, value in values.items():
        assert torch.equal(value, values_with[name]), f"{kind.name}: {name} after training"


def trained(built: Built, *, blocks: bool) -> tuple[torch.Tensor, Tensors]:
    """The losses of four steps, with blocks after backward and step of the first; the result."""
    model = built.model
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for step in range(4):
        loss = built.loss(step)
        loss.backward()
        if blocks and step == 0:
            enter_all(model)
        optimizer.step()
        if blocks and step == 1:
            enter_all(model)
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), full_parameters(model)


def enter_all(model: nn.Module) -> None:
    for flags in FLAG_SETS:
        with paramd.summon_full_params(model, **flags):
            pass


if __name__ == "__main__":
    run(main)
