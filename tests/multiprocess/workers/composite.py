"""Every kind of model in one job: trains two steps, writes what torch says, waits.

Each part of the model keeps its own wrappers (DDP, FSDP, TP, ...); their names get the
kind in front. So one attach shows all kinds at one world size.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import paramd
from tests.ending import end
from tests.multiprocess import kinds
from tests.multiprocess.workers.train import rank, wait_for

JOB = "composite"
STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    built = {kind.name: kind.build() for kind in kinds.kinds_for(dist.get_world_size())}
    model = nn.ModuleDict({name: part.model for name, part in built.items()})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    attachment = paramd.attach(model, optimizer, job=JOB)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in built.values():
            part.loss(step).backward()
        optimizer.step()
    write_truth(folder / f"{JOB}.truth", built, attachment.step)
    wait_for(folder / f"{JOB}.checked")
    attachment.detach()
    dist.destroy_process_group()


def write_truth(path: Path, built: dict[str, kinds.Built], step: int) -> None:
    whole = {}
    for kind, part in built.items():
        for name, tensor in kinds.full_parameters(part.model).items():
            whole[f"{kind}.{name}"] = tensor.contiguous()
    if rank() == 0:
        save_file(whole, path.with_suffix(".part"), metadata={"step": str(step)})
        os.replace(path.with_suffix(".part"), path)


if __name__ == "__main__":
    end(main)
