"""Trains, and tells at each step the digest of each parameter's and each optimizer state's bytes.

<folder>/truth-<step>   {name: {"": digest of the parameter, key: digest or number, ...}}, by rank 0
<folder>/hang           every rank's next forward waits inside
<folder>/end            training ends
"""

import hashlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import paramd
from tests.multiprocess import kinds
from tests.rank import run

JOB = "states"


def zero(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "zero": zero,
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
}


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def truth(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Collective."""
    found = {
        name: {"": digest(tensor)} for name, tensor in sorted(kinds.full_parameters(model).items())
    }
    for name, state in states(model, optimizer).items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[name][key] = digest(value) if key != "step" else float(value)
    return found


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """By name. Collective."""
    if not hasattr(optimizer, "optim"):
        options = StateDictOptions(full_state_dict=True)
        found: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
        return found["state"]
    names = {param: name.removeprefix("module.") for name, param in model.named_parameters()}
    mine = {names[param]: state for param, state in optimizer.optim.state.items()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: state for part in parts for name, state in part.items()}


def main(
    folder: Path,
    *,
    kind: str = "fsdp2",
    optimizer: str = "adamw",
    resume: str = "never",
    not_given: bool,
) -> None:
    warnings.simplefilter("ignore")  # torch's own, hundreds of them
    built = kinds.named(kind).build(0)
    wanted = [param for param in built.model.parameters() if param.requires_grad]
    made = OPTIMIZERS[optimizer](wanted)
    given = None if not_given else made
    attachment = paramd.attach(built.model, given, job=JOB, resume=resume)

    def hang(*_: object) -> None:
        while (folder / "hang").exists():
            (folder / f"hangs-{dist.get_rank()}").touch()
            time.sleep(0.02)

    # After paramd's own hook, which settles the step.
    built.model.register_forward_pre_hook(hang)
    over = torch.zeros(1)
    while not over.item():
        made.zero_grad()
        built.loss(attachment.step).backward()
        made.step()
        told = truth(built.model, made)
        if dist.get_rank() == 0:
            path = folder / f"truth-{attachment.step}"
            path.with_suffix(".new").write_text(json.dumps(told))
            path.with_suffix(".new").rename(path)
        over.fill_((folder / "end").exists())
        dist.all_reduce(over)
    attachment.detach()


if __name__ == "__main__":
    run(main)
