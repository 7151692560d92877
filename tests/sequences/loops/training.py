"""A training with one of the loops; one process for each rank.

python -m tests.sequences.loops.training --kind fsdp2 --loop closure --folder FOLDER
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paramd
from tests.ending import end
from tests.sequences.loops.loops import LOOPS, Script
from tests.sequences.loops.recorder import Recorder
from tests.sequences.training import LOOK_EVERY, Net, Stage, distributed

JOB = "main"


class PassedOn(Stage):
    """A stage of a pipeline, whose input is its output of batches before."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        total = torch.zeros(())
        for module in self.children():
            for leaf in module if isinstance(module, nn.ModuleList) else [module]:
                total = total + leaf(int.from_bytes(os.urandom(3), "little"))
        return batch + total


def made(kind: str, folder: Path) -> Script:
    """Model and optimizers; nothing is attached yet."""
    if kind == "pipeline":
        model: Any = PassedOn(Net(kind))
    else:
        model, _ = distributed(kind)
    net = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return Script(kind, model, net, Recorder(folder, dist.get_rank(), net), [])


def told(script: Script, folder: Path) -> bool:
    """Whether all ranks have seen that this ends. Rests first, if they are told to."""
    if script.number % LOOK_EVERY:
        return False
    ends = torch.tensor([int((folder / name).exists()) for name in ("end", "rest")])
    dist.all_reduce(ends, op=dist.ReduceOp.MIN)
    if ends[1]:
        here = folder / f"resting-{dist.get_rank()}"
        here.touch()
        while (folder / "rest").exists():
            time.sleep(0.02)
        here.unlink(missing_ok=True)
    return bool(ends[0])


def say(attachment: Any) -> None:
    if dist.get_rank() == 0:
        print(f"attached incarnation {attachment.incarnation} step {attachment.step} fresh ",
              flush=True)  # fmt: skip


def train(given: argparse.Namespace) -> None:
    """The script, with its loop."""
    loop, script = LOOPS[given.loop], made(given.kind, given.folder)
    script.optimizers = loop.optimizers(script)
    # A loop may step fewer of them later; what was attached is read on.
    script.record.optimizers = list(script.optimizers)
    model = dict(script.net.named_children()) if given.kind == "pipeline" else script.model
    given_ones: Any = script.optimizers if len(script.optimizers) > 1 else script.optimizer
    script.attachment = paramd.attach(model, given_ones, job=JOB, resume=loop.resume)
    say(script.attachment)
    ends = False
    while not ends:
        with script.attachment.rollback_scope():
            while not (ends := told(script, given.folder)):
                loop.iteration(script)
                script.record.check(script.attachment.step)
                script.number += 1
                time.sleep(given.rest_s)
        if not ends:
            script.record.went_back(script.attachment.step)
            script.number += 1
            script.model.zero_grad()
    script.attachment.detach()


def lightning(given: argparse.Namespace) -> None:
    """Lightning's automatic optimization, and our callback."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from paramd.integrations.lightning import ParamdCallback
    from tests.sequences.loops.loops import sgd

    class Module(Net, LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(given.kind)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return Net.forward(self, int.from_bytes(os.urandom(3), "little"))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return script.optimizer

        def optimizer_step(self, *args: Any, **options: Any) -> None:
            with script.record.update():
                super().optimizer_step(*args, **options)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([0.0] * 10**6)  # type: ignore[arg-type]

    class Ends(Callback):  # type: ignore[misc]
        def on_train_start(self, *_: Any) -> None:
            say(callback._training.attachment)

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            script.record.check(callback._training.attachment.step)  # type: ignore[union-attr]
            trainer.should_stop = (given.folder / "end").exists()
            time.sleep(given.rest_s)

    net = Module()
    script = Script(given.kind, net, net, Recorder(given.folder, dist.get_rank(), net), [])
    script.optimizers = [sgd(script.parameters())]
    script.record.optimizers = script.optimizers
    callback = ParamdCallback(job=JOB)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback, Ends()],
        default_root_dir=given.folder,
    )  # fmt: skip
    trainer.fit(net)


def late_helpers(seconds: float) -> None:
    """The first control plane that is started here needs that long, as on a cold file system."""
    popen, left = subprocess.Popen, [1]

    def start(command: Any, *args: Any, **options: Any) -> Any:
        if left and isinstance(command, list) and "paramd_service.control" in command:
            left.clear()
            command = ["/bin/sh", "-c", f'sleep {seconds}; exec "$@"', "sh", *command]
        return popen(command, *args, **options)

    subprocess.Popen = start  # type: ignore[assignment, misc]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--loop", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", default="auto")
    parser.add_argument("--rest-s", type=float, default=0.03)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    late_s = LOOPS[given.loop].late_s
    if late_s:
        late_helpers(late_s)
    (lightning if given.loop == "lightning" else train)(given)


if __name__ == "__main__":
    end(main)
