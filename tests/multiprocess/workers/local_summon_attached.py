"""A trainer whose only updates are edits in `summon_full_params`; each writes its step everywhere.

So whatever a client reads at one step holds that step's number in every element. In between
come blocks that must not count: without writeback, and raising on one rank.
"""

import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paramd
from paramd.errors import AbortedError
from tests.gloo import all_see
from tests.multiprocess import kinds
from tests.rank import run


def main(*, kind: str, stop: Path) -> None:
    model = kinds.named(kind).build().model
    edit(model, 0.0)
    attachment = paramd.attach(model, None, job="stamp")
    print("attached", flush=True)
    step = 0
    while not all_see(stop):
        step += 1
        edit(model, float(step), rank0_only=bool(step % 2), offload_to_cpu=step % 3 == 0)
        assert attachment.step == step, f"{attachment.step} instead of {step}"
        edit(model, -1.0, writeback=False)
        if step % 5 == 0:
            with suppress(AbortedError, ZeroDivisionError):
                edit(model, -2.0, fails=dist.get_rank() == 1)
        assert attachment.step == step, f"{attachment.step} instead of {step}"
    part = next(child for child in model.children())
    with paramd.summon_full_params(part, rank0_only=True):
        # A part of an attached model is attached.
        pass
    assert attachment.step == step + 1
    attachment.detach()
    with paramd.summon_full_params(model) as params:
        assert all(bool((param == step).all()) for param in params.values())
    print(f"ok {step} steps", flush=True)


def edit(model: nn.Module, value: float, *, fails: bool = False, **flags: bool) -> None:
    with paramd.summon_full_params(model, **flags) as params, torch.no_grad():
        for index, param in enumerate(params.values()):
            param.fill_(value)
            if index == len(params) // 2:
                time.sleep(0.002)
                if fails:
                    raise ZeroDivisionError


if __name__ == "__main__":
    run(main)
