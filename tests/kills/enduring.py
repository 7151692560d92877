"""Trains until it is told to stop, or, without paramd, for a number of steps; the same bits.

<folder>/stop              ends all ranks after the same epoch; a number of steps is of whole epochs
<folder>/at-<rank>         steps made
<folder>/final-<rank>      digests by name, JSON, and the number of steps as "steps"

FSDP2 and AdamW, with dropout, a scheduler and a drawn order of batches. Beside the trained layers
lies a large frozen one, which no step reads: it makes a snapshot large and steps cheap.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import paramd
from tests.gloo import all_see
from tests.multiprocess.workers.resuming import OPTIMIZERS, Loader, Net, digests
from tests.rank import run

JOB = "enduring"
ROW = 1024


class Laden(Net):
    """The net of the tests of resuming, with something frozen that is large."""

    def __init__(self, laden_mib: int) -> None:
        super().__init__(buffers=False, frozen=True, wide=31)
        self.laden = nn.Linear(ROW, laden_mib * (1 << 18) // ROW, bias=False)
        self.laden.requires_grad_(False)


def main(
    folder: Path,
    *,
    group: str = "",
    laden_mib: int,
    steps: int = 0,
    pause_s: float = 0.0,
    attach: bool = False,
) -> None:
    if group:
        # Its helpers are in it, too. What it has by now, torch alone, is not counted there.
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Laden(laden_mib)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.up, model.laden, model):
        fully_shard(part, mesh=mesh)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)
    optimizer = OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    loader = Loader(rank, rank, folder, draws=True)
    attachment = paramd.attach(model, optimizer, job=JOB) if attach else None
    made = 0
    while not made or not (made == steps or (not steps and all_see(folder / "stop"))):
        for tokens, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), targets).backward()
            optimizer.step()
            scheduler.step()
            made += 1
            (folder / f"at-{rank}").write_text(str(made))
            time.sleep(pause_s)
    found = digests(model, optimizer, scheduler, loader)
    (folder / f"final-{rank}").write_text(json.dumps(found | {"steps": str(made)}, indent=1))
    if attachment is not None:
        attachment.detach()


if __name__ == "__main__":
    run(main)
