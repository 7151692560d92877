"""Trainings whose exports are not the parameters: an adapter over a sharded base, averages beside
a model and in an optimizer, and schedule-free weights.

    views adapters --folder F

Rank 0 keeps the full state of every step, and writes all of them to F/truth.pt once F/stop is
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paramd
from tests.rank import run

WORDS, WIDTH = 29, 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 50), nn.Linear(50, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        found: torch.Tensor = self.head(self.norm(x + self.down(torch.tanh(self.up(x)))))
        return found


class Averaging(torch.optim.AdamW):
    """AdamW that keeps an average of each parameter it updates."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "ema" not in state:
                        state["ema"] = param.detach().clone()
                    state["ema"].lerp_(param, 0.125)
        return found


def adapted() -> Any:
    """Of the training, and of the test that checks what it wrote."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, target_modules=["up", "down"], modules_to_save=["head"])
    return get_peft_model(Net(), config)  # type: ignore[arg-type]


Made = tuple[nn.Module, Any, torch.optim.Optimizer, Callable[[], None]]
"""The model, what is attached, the optimizer, and what follows each update."""


def adapters() -> Made:
    model = adapted()
    fully_shard(model.base_model.model.up)
    fully_shard(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    return model, model, torch.optim.AdamW(trained, lr=1e-2), lambda: None


def averages() -> Made:
    bare = Net()
    bare.embed.weight.requires_grad_(False)
    ema = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(bare)
    trained = [one for one in bare.parameters() if one.requires_grad]
    return (
        model,
        {"net": model, "swa": ema},
        Averaging(trained, lr=1e-2),
        lambda: ema.update_parameters(bare),
    )


def schedule_free() -> Made:
    model = DistributedDataParallel(Net())
    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2)
    optimizer.train()
    return model, model, optimizer, lambda: None


CASES = {"adapters": adapters, "averages": averages, "schedule-free": schedule_free}


def truth(model: nn.Module, attached: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Full tensors by name, and those that an optimizer makes of them."""
    modules = attached.items() if isinstance(attached, dict) else [("", attached)]
    found: dict[str, Any] = {}
    for head, module in modules:
        bare = module.module if isinstance(module, DistributedDataParallel) else module
        for name, one in bare.state_dict().items():
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            found[f"{head}.{name}" if head else name] = whole.detach().clone()
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    for name, param in bare.named_parameters():
        state = optimizer.state.get(param, {})
        if "ema" in state:
            found[f"state.{name}"] = state["ema"].clone()
    if isinstance(optimizer, AdamWScheduleFree):
        for name, param in bare.named_parameters():
            z, beta = optimizer.state[param]["z"], optimizer.param_groups[0]["betas"][0]
            found[f"state.{name}"] = param.detach().lerp(z, 1 - 1 / beta)
    return found


def main(case: str, *, folder: Path) -> None:
    torch.manual_seed(0)
    model, attached, optimizer, after = CASES[case]()
    paramd.attach(attached, optimizer, job="views")
    steps: dict[int, Any] = {}
    stop, step = torch.zeros(()), 0
    while not stop:
        torch.manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(WORDS, (8,))
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        after()
        step += 1
        steps[step] = truth(model, attached, optimizer)
        time.sleep(0.03)  # so that the test's reads do not race thousands of steps
        stop.fill_((folder / "stop").exists())
        dist.broadcast(stop, 0)
    if dist.get_rank() == 0:
        torch.save(steps, folder / "truth.pt")


if __name__ == "__main__":
    run(main)
