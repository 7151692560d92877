"""Trains until told to stop, then resumes from a checkpoint that was exported meanwhile.

Every step's parameters are remembered by a digest; modules beside them note in their extra state
which step it is. After `--stop` exists, a fresh model and
optimizer load the checkpoint at `--checkpoint` with torch.distributed.checkpoint, train on
from its step, and must come to the very same parameters.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import paramd
from tests.gloo import all_see
from tests.multiprocess import kinds
from tests.rank import run

JOB = "resume"
STEPS_AFTER = 3


def main(*, kind: str, folder: Path) -> None:
    exported = kinds.named(kind)
    built, optimizer = make(exported, seed=0)
    inner(built.model).add_module("opaque", Opaque())
    attachment = paramd.attach(built.model, optimizer, job=JOB)
    digests = {}
    stop_at = None
    step = 0
    while stop_at is None or step < stop_at:
        train(built, optimizer, step)
        step += 1
        note(built.model, step)
        digests[step] = digest(built.model)
        if stop_at is None and all_see(folder / "stop"):
            # What was exported may be of the step just made.
            stop_at = step + STEPS_AFTER
        time.sleep(0.01)
    attachment.detach()
    check_resumed(exported, folder / "out" / "ckpt", digests)
    print("resumed", flush=True)


class Noted(nn.Module):
    """Extra state that is JSON."""

    step = 0

    def get_extra_state(self) -> Any:
        return {"step": self.step, "of": [self.step / 3, None, "ä"]}

    def set_extra_state(self, state: Any) -> None:
        self.step = state["step"]
        assert state == self.get_extra_state()


class Told(Noted):
    """A tensor, whose shape changes."""

    def get_extra_state(self) -> Any:
        return torch.full((self.step % 3,), float(self.step), dtype=torch.float64)

    def set_extra_state(self, state: Any) -> None:
        self.step = int(state[0]) if len(state) else self.step
        assert torch.equal(state, self.get_extra_state())


class Opaque(Noted):
    """Neither."""

    def get_extra_state(self) -> Any:
        return 1, self.step


def note(model: nn.Module, step: int) -> None:
    for module in model.modules():
        if isinstance(module, Noted):
            module.step = step


def inner(model: nn.Module) -> nn.Module:
    """What FSDP1 wraps, or the model itself."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return model.module if isinstance(model, FullyShardedDataParallel) else model


def make(kind: kinds.Kind, *, seed: int) -> tuple[kinds.Built, torch.optim.Optimizer]:
    built = kind.build(seed)
    for name, module in (("noted", Noted()), ("told", Told())):
        inner(built.model).add_module(name, module)
    wanted = [param for param in built.model.parameters() if param.requires_grad]
    return built, torch.optim.AdamW(wanted, lr=0.01, weight_decay=0.1)


def train(built: kinds.Built, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    built.loss(step).backward()
    optimizer.step()


def digest(model: nn.Module) -> str:
    """Names all parameters' values. Collective."""
    found = hashlib.sha256()
    for name, tensor in sorted(kinds.full_parameters(model).items()):
        found.update(name.encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def check_resumed(kind: kinds.Kind, checkpoint: Path, digests: dict[int, str]) -> None:
    built, optimizer = make(kind, seed=1)
    step = json.loads((checkpoint / "paramd-export.json").read_text())["step"]
    # A tensor is loaded into one of its shape.
    built.model.told.step = step % 3
    # Adam has no state before its first step; torch makes it so that it can be loaded.
    model_state, optimizer_state = get_state_dict(built.model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=str(checkpoint))
    set_state_dict(
        built.model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    assert built.model.noted.step == step
    assert not step % 3 or built.model.told.step == step
    assert digest(built.model) == digests[step], f"loaded another state than step {step} had"
    for number in range(step, step + STEPS_AFTER):
        train(built, optimizer, number)
        assert digest(built.model) == digests[number + 1], f"step {number + 1} differs"


if __name__ == "__main__":
    run(main)
