"""Every kind of model in one job; all elements of its gradients are the update's number.

So whoever reads a frame sees at once when it mixes updates, or has the wrong label. Runs
until `<folder>/stop` exists.
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paramd
from tests.gloo import all_see
from tests.multiprocess import kinds
from tests.rank import run

JOB = "gradients"

MODULUS = 200
"""bfloat16 has all integers up to 256."""


def main(*, folder: Path, only: str = "", gap_ms: float = 0.0) -> None:
    names = [name for name in only.split(",") if name]
    chosen = [k for k in kinds.kinds_for(dist.get_world_size()) if not names or k.name in names]
    built = {kind.name: kind.build() for kind in chosen}
    model = nn.ModuleDict({name: part.model for name, part in built.items()})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    attachment = paramd.attach(model, optimizer, job=JOB)
    print("attached", flush=True)
    while not all_see(folder / "stop"):
        update = attachment.step + 1
        optimizer.zero_grad(set_to_none=bool(update % 2))
        for part in built.values():
            part.loss(update).backward()
        fill(optimizer, update % MODULUS)
        optimizer.step()
        if gap_ms:
            time.sleep(gap_ms / 1e3)
    print(f"updates {attachment.step}", flush=True)
    attachment.detach()


def fill(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                getattr(param.grad, "_local_tensor", param.grad).fill_(value)


if __name__ == "__main__":
    run(main)
