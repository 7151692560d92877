"""Train a small network with Lightning, served by paramd.

    python examples/train_lightning.py --job my-run --devices 2

and in another terminal, for example: `paramd stats '*'`. Needs pip install 'paramd[lightning]'.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paramd.integrations.lightning import ParamdCallback


class Regression(pl.LightningModule):
    """Learns to add."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        (numbers,) = batch
        return nn.functional.mse_loss(self.net(numbers), numbers.sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="train-lightning")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()

    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="auto",
        devices=arguments.devices,
        max_steps=arguments.steps,
        logger=False,
        enable_checkpointing=False,
        callbacks=[ParamdCallback(job=arguments.job)],
    )
    trainer.fit(Regression(), DataLoader(TensorDataset(torch.randn(512, 8)), batch_size=16))


if __name__ == "__main__":
    main()
