"""Trains kinds of models with paramd attached for a while, then again without, and compares.

On the way each job stops once and writes what torch says its full parameters are, so that
a client may compare what it summons; then it trains on until the client has seen enough.

    <folder>/<job>.truth       safetensors, written at `step` of its metadata; training stands
    <folder>/<job>.checked     the client has compared; training goes on
    <folder>/<job>.seen        the client has seen it train; paramd is detached
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import paramd
from tests.ending import end
from tests.multiprocess import kinds

DEADLINE_S = 60.0
"""How long a job waits for its client."""

TRUTH_AT = 4
"""Step at which the truth is written."""

AFTER = 2
"""Steps after paramd has gone."""


def adam(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(params, lr=0.01)]


def momentum(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(params, lr=0.05, momentum=0.9)]


def two(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    half = (len(params) + 1) // 2
    others = [torch.optim.RMSprop(params[half:], lr=0.01)] if params[half:] else []
    return [torch.optim.AdamW(params[:half], lr=0.01), *others]


OPTIMIZERS = (adam, momentum, two)


@dataclass
class Run:
    """What one training computed."""

    losses: list[float] = field(default_factory=list)
    full: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Training:
    """A model and its optimizers; every call is collective."""

    kind: kinds.Kind
    make: Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]

    def __post_init__(self) -> None:
        self.built = self.kind.build()
        trainable = [p for p in self.built.model.parameters() if p.requires_grad]
        self.optimizers = self.make(trainable)
        self.run = Run()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.built.loss(len(self.run.losses))
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.run.losses.append(loss.item())

    def end(self) -> Run:
        self.run.full = kinds.full_parameters(self.built.model)
        return self.run


def train_attached(job: str, training: Training, attach_at: int, folder: Path) -> Run:
    """Attaches, lets the client compare and watch, detaches, trains on."""
    for _ in range(attach_at):
        training.step()
    updates = len(training.optimizers)
    attachment = paramd.attach(
        training.built.model, training.optimizers, job=job, step=attach_at * updates
    )
    while len(training.run.losses) < TRUTH_AT:
        training.step()
    assert attachment.step == TRUTH_AT * updates
    write_truth(folder / f"{job}.truth", training.built.model, attachment.step)
    wait_for(folder / f"{job}.checked")
    deadline_s = time.monotonic() + DEADLINE_S
    while not everybody((folder / f"{job}.seen").exists):
        assert time.monotonic() < deadline_s, "the client has not seen the training"
        training.step()
    assert attachment.step == len(training.run.losses) * updates
    attachment.detach()
    for _ in range(AFTER):
        training.step()
    return training.end()


def write_truth(path: Path, model: nn.Module, step: int) -> None:
    """Collective: rank 0 writes the full parameters as torch gathers them."""
    full = kinds.full_parameters(model)
    if rank() == 0:
        whole = {name: tensor.contiguous() for name, tensor in full.items()}
        save_file(whole, path.with_suffix(".part"), metadata={"step": str(step)})
        os.replace(path.with_suffix(".part"), path)
    everybody(lambda: True)


def wait_for(path: Path) -> None:
    """Collective: until the file is there."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not everybody(path.exists):
        assert time.monotonic() < deadline_s, f"{path.name} did not come"
        time.sleep(0.01)


def everybody(condition: Callable[[], bool]) -> bool:
    """Whether rank 0 finds so; the same on all ranks."""
    told = torch.tensor([int(condition())])
    if dist.is_initialized():
        dist.broadcast(told, 0)
    return bool(told.item())


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train_plainly(training: Training, steps: int) -> Run:
    while len(training.run.losses) < steps:
        training.step()
    return training.end()


def differences(ours: Run, theirs: Run) -> list[str]:
    found = [
        f"step {i}: {a} != {b}"
        for i, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True))
        if a != b
    ]
    found += sorted(set(ours.full) ^ set(theirs.full))
    for name in set(ours.full) & set(theirs.full):
        if raw(ours.full[name]) != raw(theirs.full[name]):
            found.append(f"{name} differs")
    return found


def raw(tensor: torch.Tensor) -> tuple[object, ...]:
    """What byte equality compares."""
    flat = tensor.detach().contiguous().reshape(-1)
    return tuple(tensor.shape), tensor.dtype, bytes(flat.view(torch.uint8).numpy())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1 or arguments.kinds != "plain":
        dist.init_process_group("gloo")
    for index, name in enumerate(arguments.kinds.split(",")):
        kind, make = kinds.named(name), OPTIMIZERS[index % len(OPTIMIZERS)]
        try:
            ours = train_attached(name, Training(kind, make), 2 * (index % 2), arguments.folder)
            theirs = train_plainly(Training(kind, make), len(ours.losses))
            bad = differences(ours, theirs)
            assert len(set(ours.losses)) > TRUTH_AT, "the model must learn, or nothing is shown"
        except Exception:
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        if bad:
            print(f"FAILED {name}: {bad[:5]}", flush=True)
            os._exit(1)
        print(
            f"ok {name} {make.__name__} attached at {2 * (index % 2)}, {len(ours.losses)} steps",
            flush=True,
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
