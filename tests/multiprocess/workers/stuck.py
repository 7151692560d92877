"""Trains under DDP with data from a DataLoader that hangs on one rank when it is told to.

<folder>/hang.<rank>       the rank's dataset hangs until the file has gone
<folder>/keep-gil.<rank>   likewise, in native code that keeps the GIL
<folder>/slow.<rank>       each of its rows takes 0.2 s, until the file has gone
<folder>/end               training ends
"""

from __future__ import annotations

import ctypes
import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import paramd
from tests.rank import run

DEADLINE_S = 60.0


class Rows(Dataset[torch.Tensor]):
    """Random rows, some of which take for ever."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read()
        return torch.full((4,), float(index % 7))

    def read(self) -> None:
        rank, deadline_s = dist.get_rank(), time.monotonic() + DEADLINE_S
        if (self._folder / f"slow.{rank}").exists():
            time.sleep(0.2)
        while (self._folder / f"hang.{rank}").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        while (self._folder / f"keep-gil.{rank}").exists() and time.monotonic() < deadline_s:
            # PyDLL keeps the GIL: no Python runs in this process meanwhile.
            ctypes.PyDLL(None).sleep(6)


def train(folder: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    attachment = paramd.attach(model, optimizer, job="stuck")
    print(f"rank {dist.get_rank()} trains", flush=True)
    ended = torch.zeros(1)
    for batch in DataLoader(Rows(folder), batch_size=2):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        attachment.log(loss=loss, lr=optimizer.param_groups[0]["lr"])
        ended.fill_(float((folder / "end").exists()))
        dist.all_reduce(ended)
        if ended.item() == dist.get_world_size():
            break
        time.sleep(0.01)
    attachment.detach()


def main(folder: Path) -> None:
    logging.basicConfig()
    train(folder)


if __name__ == "__main__":
    run(main)
