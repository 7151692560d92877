"""Every kind of model in one job; all elements of its gradients are the update's number.

So whoever reads a frame sees at once when it mixes updates, or has the wrong label. Runs
until `<folder>/stop` exists. `<folder>/truth` has rank 0 write, for the updates that follow, what
torch gathers of real gradients (kinds without flat parameters), as `<update>.grads`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import paramd
from tests.ending import end
from tests.gloo import all_see
from tests.multiprocess import kinds
from tests.multiprocess.workers.gradient_cases import Idle

JOB = "gradients"

MODULUS = 200
"""bfloat16 has all integers up to 256."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kinds", default="", help="comma-separated; all without it")
    parser.add_argument("--truth", action="store_true", help="real gradients, written to files")
    parser.add_argument("--gap-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = [name for name in arguments.kinds.split(",") if name]
    chosen = [k for k in kinds.kinds_for(dist.get_world_size()) if not names or k.name in names]
    built = {kind.name: kind.build() for kind in chosen}
    model = nn.ModuleDict({name: part.model for name, part in built.items()})
    trained = [p for p in model.parameters() if p.requires_grad]
    # A planted NaN must not spread.
    optimizer = Idle(iter(trained)) if arguments.truth else torch.optim.SGD(trained, lr=1e-3)
    attachment = paramd.attach(model, optimizer, job=JOB)
    print("attached", flush=True)
    while not all_see(arguments.folder / "stop"):
        update = attachment.step + 1
        optimizer.zero_grad(set_to_none=bool(update % 2))
        for part in built.values():
            part.loss(update).backward()
        if arguments.truth:
            plant_nan(model, update)
            write_truth(arguments.folder, model, update)
        else:
            fill(optimizer, update % MODULUS)
        optimizer.step()
        if arguments.gap_ms:
            time.sleep(arguments.gap_ms / 1e3)
    print(f"updates {attachment.step}", flush=True)
    attachment.detach()
    dist.destroy_process_group()


def fill(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                getattr(param.grad, "_local_tensor", param.grad).fill_(value)


def plant_nan(model: nn.Module, update: int) -> None:
    """One NaN in a shard of one gradient, on the one rank that holds it."""
    for name, param in model.named_parameters():
        if name.startswith("fsdp2.") and name.endswith("embed.weight") and param.grad is not None:
            local = getattr(param.grad, "_local_tensor", param.grad)
            if dist.get_rank() == 0 and update % 2 == 0:
                local.view(-1)[0] = float("nan")


def write_truth(folder: Path, model: nn.Module, update: int) -> None:
    found = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            full = param.grad
            whole = full.full_tensor() if hasattr(full, "full_tensor") else full
            found[name.replace("_checkpoint_wrapped_module.", "").replace(".module.", ".", 1)] = (
                whole.detach().clone().contiguous()
            )
    if dist.get_rank() == 0:
        path = folder / f"{update}.grads"
        save_file(found, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)


if __name__ == "__main__":
    end(main)
