"""A trainer with DataLoader workers, and a child of its own, that it leaves behind when it dies.

Trains with paramd attached, forks, says the children's pids, and kills itself when told.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import paramd
from tests.rank import run


def main(*, die: Path) -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin_s = time.monotonic()
    attachment = paramd.attach(model, optimizer, job="forking")
    attached_s = time.monotonic() - begin_s
    loader = DataLoader(
        TensorDataset(torch.randn(64, 5)),
        batch_size=4,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    for _ in range(3):
        (batch,) = next(batches)
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    print(
        f"run {attachment.incarnation} step {attachment.step} in {attached_s:.2f} s, child {child}",
        flush=True,
    )
    while not die.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run(main, alone=True)
