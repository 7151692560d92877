"""Train a small network with Accelerate, served by paramd.

    torchrun --standalone --nproc-per-node 2 examples/train_accelerate.py --job my-run

and in another terminal, for example: `paramd stats '*'`. Needs pip install 'paramd[hf]'.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn

import paramd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="train-accelerate")
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    attachment = paramd.attach(accelerator=accelerator, job=arguments.job)
    while attachment.step < arguments.steps:
        with accelerator.accumulate(model):
            numbers = torch.randn(16, 8, device=accelerator.device)
            loss = nn.functional.mse_loss(model(numbers), numbers.sum(1, keepdim=True))
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"step {attachment.step}, loss {loss.item():.4f}")
    attachment.detach()
    accelerator.end_training()


if __name__ == "__main__":
    main()
