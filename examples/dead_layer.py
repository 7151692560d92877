"""A training with a fault that its loss does not name: the units of one layer are dead.

    torchrun --standalone --nproc-per-node 2 examples/dead_layer.py

and in another terminal what README.md shows.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paramd

LAYERS, WIDTH = 4, 64


class Net(nn.Module):
    """Residual blocks, so that the training goes on without one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        found: torch.Tensor = self.head(x)
        return found


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    # What one update with too large a learning rate can do.
    nn.init.constant_(net.layers[2].bias, -30.0)  # type: ignore[arg-type]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    attachment = paramd.attach(model, optimizer, job="my-run")
    torch.manual_seed(dist.get_rank())
    while attachment.step < 100_000:
        x = torch.randn(32, WIDTH)
        target = torch.sin(x.sum(dim=1, keepdim=True))
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
