"""A trainer whose optimizer changes nothing: whatever its parameters hold was edited into them.

With `--adds` each update adds one to every element: then they hold the step, and what was
edited on top of it. All parameters begin as zero. Ends when `--stop` exists.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paramd
from tests.ending import end
from tests.gloo import all_see
from tests.multiprocess import kinds

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--adds", action="store_true")
    parser.add_argument("--stop", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = kinds.named(arguments.kind).build().model
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter).fill_(0)
    optimizer = Frozen(model.parameters(), adds=arguments.adds)
    attachment = paramd.attach(model, optimizer, job="frozen")
    print("attached", flush=True)
    round_ = 0
    while round_ % 10 or not all_see(arguments.stop):
        optimizer.step()
        time.sleep(GAP_S)
        round_ += 1
    attachment.detach()
    dist.destroy_process_group()


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter.data)
    return local


if __name__ == "__main__":
    end(main)
