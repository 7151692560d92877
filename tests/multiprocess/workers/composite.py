"""Every kind of model in one job, with paramd attached and without: the same training.

Each part of the model keeps its own wrappers (DDP, FSDP, TP, ...); their names get the
kind in front. So one attach shows all kinds at one world size. On the way it writes what torch
says, and waits until a client has compared.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import paramd
from tests.gloo import all_see
from tests.multiprocess import kinds
from tests.multiprocess.truth import assert_same_bytes
from tests.rank import run

JOB = "composite"
STEPS, MORE = 2, 2
"""Until a client compares; then so many with paramd attached, and as many without."""


def main(*, folder: Path) -> None:
    (ours, losses), (theirs, their_losses) = trained(folder), trained(None)
    assert losses == their_losses
    assert_same_bytes(ours, theirs)


def trained(folder: Path | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Trains, with paramd attached if there is a folder for its truth; parameters and losses."""
    built = {kind.name: kind.build() for kind in kinds.kinds_for(dist.get_world_size())}
    model = nn.ModuleDict({name: part.model for name, part in built.items()})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    attachment = paramd.attach(model, optimizer, job=JOB) if folder is not None else None
    losses = []
    for step in range(STEPS + 2 * MORE):
        if attachment is not None and folder is not None and step == STEPS:
            write_truth(folder / f"{JOB}.truth", built, attachment.step)
            while not all_see(folder / f"{JOB}.checked"):
                time.sleep(0.05)
        if attachment is not None and step == STEPS + MORE:
            attachment.detach()
        optimizer.zero_grad()
        for part in built.values():
            loss = part.loss(step)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return gathered(built), losses


def gathered(built: dict[str, kinds.Built]) -> dict[str, torch.Tensor]:
    """Full parameters as torch gathers them. Collective."""
    return {
        f"{kind}.{name}": tensor.contiguous()
        for kind, part in built.items()
        for name, tensor in kinds.full_parameters(part.model).items()
    }


def write_truth(path: Path, built: dict[str, kinds.Built], step: int) -> None:
    whole = gathered(built)
    if dist.get_rank() == 0:
        save_file(whole, path.with_suffix(".part"), metadata={"step": str(step)})
        os.replace(path.with_suffix(".part"), path)


if __name__ == "__main__":
    run(main)
