"""A training that rests after its third update: `python -m tests.integration.resting_trainer JOB`.

Says so on stdout. A line on stdin makes it begin the next step; the end of stdin ends it.
"""

import sys

import torch
from torch import nn

import paramd


def main() -> None:
    """Train three steps, rest, go on, and wait for the end."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attachment = paramd.attach(model, optimizer, job=sys.argv[1])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    print("rests", flush=True)
    if sys.stdin.readline():
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        print("goes on", flush=True)
        sys.stdin.readline()
    attachment.detach()


if __name__ == "__main__":
    main()
