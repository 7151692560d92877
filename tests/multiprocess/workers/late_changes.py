"""FSDP2 on two ranks; at some steps rank 1 goes on alone, and rank 0 rests until a file is there.

Each update sets all weights to the number of its step. At the steps of `HALVED` a rank halves its
shards before it goes on, so that the step has two states. `at-N` appears once step N has settled on
rank 1, which then waits in its forward for rank 0, which waits for `go-N`.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import paramd
from paramd.memory.control_page import ControlPage, Word
from tests.multiprocess.workers.standins import Stamp
from tests.rank import run

APART = (2, 8, 12)
HALVED = (2, 12)
LAST = 14
WIDTH = 6


def tell_once_settled(page: ControlPage, step: int, file: Path) -> None:
    """On a thread: the training's own waits in the forward that settles the step."""
    while page.words[Word.SETTLED_AS] >> 1 != step:
        time.sleep(0.005)
    file.touch()


def main(*, folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    fully_shard(model)
    optimizer = Stamp(list(model.parameters()))
    attachment = paramd.attach(model, optimizer, job="late-changes")
    print("attached", flush=True)
    for step in range(1, LAST + 1):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        if step in APART and dist.get_rank() == 0:
            while not (folder / f"go-{step}").exists():
                time.sleep(0.01)
        if step in HALVED:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().mul_(0.5)
        if step in APART and dist.get_rank() == 1:
            told = attachment._page, step, folder / f"at-{step}"
            threading.Thread(target=tell_once_settled, args=told, daemon=True).start()
    attachment.detach()


if __name__ == "__main__":
    run(main)
