"""Trains under DDP, in trouble for as long as a file of that name lies in `<folder>`.

explode, vanish   gradients of `layers.2` grow 10,000 times, or shrink 100,000 times
slow, stuck, dead rank 1 sleeps in each step, or until the file has gone, or is killed
data              reading takes both ranks 0.3 s
nan               an element of `layers.1.weight` is NaN
drift             rank 1 has another value of an element of `layers.3.bias`
"""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import paramd
from tests.rank import run
from tests.web.training import JOB

SECONDS = 0.3


class Rows(Dataset[torch.Tensor]):
    """Random rows."""

    def __init__(self, folder: Path) -> None:
        self._slow = folder / "data"

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SECONDS if self._slow.exists() else 0.0)
        return torch.randn(32)


def train(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [nn.Linear(32, 32) for _ in range(4)]
    named: OrderedDict[str, nn.Module] = OrderedDict(layers=nn.Sequential(*layers))
    model = DistributedDataParallel(nn.Sequential(named))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    attachment = paramd.attach(model, optimizer, job=JOB)
    print("attached", flush=True)
    second = dist.get_rank() == 1
    broken = {"nan": (layers[1].weight, True), "drift": (layers[3].bias, second)}
    values = {name: parameter.detach().clone() for name, (parameter, _) in broken.items()}

    def change(name: str) -> None:
        """As planted while the file is there; as it was once it has gone."""
        parameter, here = broken[name]
        with attachment.update(), torch.no_grad():
            parameter.copy_(values[name])
            if here and name in now:
                parameter.view(-1)[0] = float("nan") if name == "nan" else 1.0

    now, before = set[str](), set[str]()
    for batch in DataLoader(Rows(folder), batch_size=1):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        time.sleep(SECONDS if second and "slow" in now else 0.02)
        while second and (folder / "stuck").exists():
            time.sleep(0.05)
        if second and (folder / "dead").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        for parameter in layers[2].parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1e4 if "explode" in now else 1e-5 if "vanish" in now else 1.0)
        if loss.isfinite():  # else one NaN is in all parameters after a step, and heals no more
            optimizer.step()
        attachment.log(loss=loss)
        told = [{one.name for one in folder.iterdir()}]
        dist.broadcast_object_list(told)
        before, now = now, told[0]
        for name in broken.keys() & (now ^ before):
            change(name)


if __name__ == "__main__":
    run(train)
