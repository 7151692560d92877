"""A trainer whose optimizer changes nothing: whatever its parameters hold was edited into them.

With `--adds` each update adds one to every element: then they hold the step, and what was
edited on top of it. All parameters begin as zero. Ends when `--stop` exists; then each rank
prints what its local parameters hold ("holds {name: [values]}").

    die-<rank>      beside `--stop`: the rank kills itself within its next update
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paramd
from tests.ending import end
from tests.gloo import all_see
from tests.multiprocess import kinds


class Frozen(torch.optim.Optimizer):
    """Updates that change nothing, or add one."""

    def __init__(self, parameters: Any, *, update_s: float, adds: bool, dies: Path) -> None:
        super().__init__(list(parameters), {})
        self._update_s = update_s
        self._adds = adds
        self._dies = dies

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self._adds:
            for group in self.param_groups:
                for parameter in group["params"]:
                    local_of(parameter).add_(1)
        time.sleep(self._update_s)
        if self._dies.exists():
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--job", default="frozen")
    parser.add_argument("--update-ms", type=float, default=0.5)
    parser.add_argument("--gap-ms", type=float, default=3.0)
    parser.add_argument("--adds", action="store_true")
    parser.add_argument("--stop", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    model = kinds.named(arguments.kind).build().model
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter).fill_(0)
    optimizer = Frozen(
        model.parameters(),
        update_s=arguments.update_ms / 1e3,
        adds=arguments.adds,
        dies=arguments.stop.parent / f"die-{rank}",
    )
    attachment = paramd.attach(model, optimizer, job=arguments.job)
    print("attached", flush=True)
    round_ = 0
    while True:
        optimizer.step()
        time.sleep(arguments.gap_ms / 1e3)
        round_ += 1
        if round_ % 10 == 0 and all_see(arguments.stop):
            break
    attachment.detach()
    held = {
        name: sorted(set(local_of(parameter).flatten().tolist()))
        for name, parameter in model.named_parameters()
        if local_of(parameter).numel()
    }
    print(f"holds {json.dumps(held)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter.data)
    return local


if __name__ == "__main__":
    end(main)
