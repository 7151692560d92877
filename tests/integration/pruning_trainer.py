"""A training whose layer is pruned while it runs, and is itself again at the end.

python -m tests.integration.pruning_trainer JOB

Prints a line once the pruned model has been trained for some steps. A line on stdin removes the
pruning; the end of stdin ends the training.
"""

import select
import sys
import time

import torch
from torch import nn
from torch.nn.utils import prune

import paramd


def main() -> None:
    """Train until stdin ends."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attachment = paramd.attach(model, optimizer, job=sys.argv[1])

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)

    step()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    for _ in range(5):
        step()
    print("pruned", flush=True)
    while True:
        step()
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                break
            prune.remove(model[0], "weight")
    attachment.detach()


if __name__ == "__main__":
    main()
