"""Train a small network whose weights, and whose loss, are seen while it trains.

    python examples/train_tracked.py --job my-run --log tensorboard

The weights' statistics are in the tracker (TensorBoard's files in ./runs, one folder for each run),
the loss is on the dashboard, where rules can use it. Needs pip install 'paramd[service,trackers]'.
"""

from __future__ import annotations

import argparse
from contextlib import suppress

import torch
from torch import nn

import paramd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="train-tracked")
    parser.add_argument("--steps", type=int, default=10_000_000, help="or until Ctrl-C")
    parser.add_argument("--log", default="tensorboard", help="a tracker, or several, with commas")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attachment = paramd.attach(model, optimizer, job=arguments.job, log=arguments.log)
    with suppress(KeyboardInterrupt):
        for _ in range(arguments.steps):
            numbers = torch.randn(16, 8)
            loss = nn.functional.mse_loss(model(numbers), numbers.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            attachment.log(loss=loss, lr=optimizer.param_groups[0]["lr"])
    # Ends what logs to the tracker, too.
    attachment.detach()


if __name__ == "__main__":
    main()
