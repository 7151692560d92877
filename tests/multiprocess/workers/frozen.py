"""A trainer whose optimizer changes nothing: whatever its parameters hold was edited into them.

With `--adds` each update adds one to every element: then they hold the step, and what was
edited on top of it. All parameters begin as zero. Ends when `--stop` exists.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import paramd
from tests.gloo import all_see
from tests.multiprocess import kinds
from tests.rank import run

UPDATE_S, GAP_S = 0.0005, 0.01
"""How long an update takes, and what is between two."""


class Frozen(torch.optim.Optimizer):
    """Updates that change nothing, or add one."""

    def __init__(self, parameters: Any, *, adds: bool) -> None:
        super().__init__(list(parameters), {})
        self._adds = adds

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups if self._adds else ():
            for parameter in group["params"]:
                local_of(parameter).add_(1)
        time.sleep(UPDATE_S)


def main(*, kind: str, adds: bool, stop: Path) -> None:
    model = kinds.named(kind).build().model
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter).fill_(0)
    optimizer = Frozen(model.parameters(), adds=adds)
    attachment = paramd.attach(model, optimizer, job="frozen")
    print("attached", flush=True)
    round_ = 0
    while round_ % 10 or not all_see(stop):
        optimizer.step()
        time.sleep(GAP_S)
        round_ += 1
    attachment.detach()


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter.data)
    return local


if __name__ == "__main__":
    run(main)
