"""A training with tied, frozen and buffered tensors that swaps in its average when told to.

Commands are files in --folder: "swap" enters the block, "back" leaves it, "stop" ends the
training. Each step sets all trained weights to the number of the step, and within the block
they are `AVERAGE`.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paramd
from tests.rank import run

AVERAGE = 0.25


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.adapter = nn.Linear(4, 4)
        self.adapter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.adapter(self.norm(self.embed(tokens))))
        return found


class Stamp(torch.optim.Optimizer):
    """Sets every parameter to the number of the step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.fill_(self.count)


def main(*, folder: Path, raises: bool) -> None:
    torch.manual_seed(0)
    model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = Stamp(trained)
    attachment = paramd.attach(model, optimizer, job="standins")
    print(f"attached {attachment.url}", flush=True)
    swapped = False
    while True:
        stop = torch.tensor(float((folder / "stop").exists()))
        swap = torch.tensor(float((folder / "swap").exists() and not swapped))
        for flag in (stop, swap):
            dist.all_reduce(flag)
        if stop:
            break
        optimizer.zero_grad()
        model(torch.arange(8)).sum().backward()
        optimizer.step()
        if swap:
            swapped = True
            try:
                with attachment.swapped_weights("ema"):
                    evaluate(model, trained, folder)
                    if raises:
                        raise RuntimeError("the evaluation failed")
            except RuntimeError:
                pass
            # Long enough to be read at rest after the block.
            time.sleep(1.5)
        time.sleep(0.01)
    print("settled", flush=True)
    attachment.detach()


def evaluate(model: nn.Module, trained: list[nn.Parameter], folder: Path) -> None:
    kept = [parameter.detach().clone() for parameter in trained]
    with torch.no_grad():
        for parameter in trained:
            parameter.fill_(AVERAGE)
    # In training mode and differentiated: what `model.eval()` alone does not mark.
    model(torch.arange(8))
    print(f"swapped {int(kept[0].flatten()[0])}", flush=True)
    while not (folder / "back").exists():
        time.sleep(0.01)
    with torch.no_grad():
        for parameter, values in zip(trained, kept, strict=True):
            parameter.copy_(values)


if __name__ == "__main__":
    run(main)
