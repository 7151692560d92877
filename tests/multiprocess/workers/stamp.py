"""A trainer whose optimizer writes the step number into every parameter, slowly.

Whatever is read of it at one step holds that step's number in every element; a mix of
steps shows at once. Ends when `--stop` exists.

Beside `--stop` these files tell it more, rank by rank:

    die-<rank>      the rank kills itself half way through its next update
    raise-<rank>    its next update raises half way; it is tried again once `again` exists
    rest            all ranks rest between two updates, say "resting", and go on without it
"""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paramd
from paramd.trainer.attaching.attachment import Attachment
from tests.gloo import all_see
from tests.gpu.late import late_fill
from tests.multiprocess import kinds
from tests.rank import run

REST_S = 0.0002


class StampOptimizer(torch.optim.Optimizer):
    """Fills each parameter with the number of the update, in parts, with rests between."""

    def __init__(self, parameters: Any, *, folder: Path) -> None:
        super().__init__(list(parameters), {})
        rank = os.environ["RANK"]
        self._dies, self._raises = folder / f"die-{rank}", folder / f"raise-{rank}"
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.updates += 1
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if index == len(group["params"]) // 2:
                    self._half_way()
                local = getattr(parameter, "_local_tensor", parameter.data)
                for part in local.reshape(-1).chunk(2) if local.is_contiguous() else [local]:
                    late_fill(part, self.updates)
                    time.sleep(REST_S)

    def _half_way(self) -> None:
        if self._dies.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if self._raises.exists():
            self._raises.unlink()
            self.updates -= 1
            raise ArithmeticError("half way")


def main(*, kind: str, gap_ms: float = 0.0, lockstep: bool, stop: Path) -> None:
    folder = stop.parent
    model = kinds.named(kind).build().model
    optimizer = StampOptimizer(model.parameters(), folder=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            getattr(parameter, "_local_tensor", parameter.data).fill_(0)
    attachment = paramd.attach(model, optimizer, job="stamp")
    print("attached", flush=True)
    for round_ in count():
        _update(optimizer, folder / "again")
        if gap_ms:
            time.sleep(gap_ms / 1e3)
        if lockstep and dist.is_initialized():
            dist.barrier()
        if round_ % 20 == 19:
            if all_see(stop):
                break
            _rest(folder / "rest", attachment)
    attachment.detach()
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter.data)
        assert bool((local == optimizer.updates).all()), "a parameter lost its last value"


def _update(optimizer: StampOptimizer, again: Path) -> None:
    try:
        optimizer.step()
    except ArithmeticError:
        print("raised", flush=True)
        while not again.exists():
            time.sleep(0.01)
        optimizer.step()


def _rest(wanted: Path, attachment: Attachment) -> None:
    if not all_see(wanted):
        return
    print(f"resting at {attachment.step}", flush=True)
    while wanted.exists():
        time.sleep(0.01)
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    run(main, alone=True)
