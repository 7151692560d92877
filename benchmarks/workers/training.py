"""One rank that really trains: several copies of one model, each attached in its own way."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import paramd
from benchmarks.ranks import obey
from benchmarks.workers.clocked import clocked
from benchmarks.workers.inside import InsideSidecar
from benchmarks.workers.saving import Saver
from paramd.trainer.attaching.attachment import Attachment
from tests.ending import end


class Trained:
    """A model, its optimizer, its input, and the time that its optimizer's hooks take."""

    def __init__(
        self, width: int, layers: int, batch: int, *, sharded: bool, moments: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(
            *(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
                for _ in range(layers)
            )
        )
        if sharded:
            for layer in self.model.children():
                fully_shard(layer)
            fully_shard(self.model)
        kind: Any = clocked(torch.optim.AdamW if moments else torch.optim.SGD, self._mark_behind)
        self.optimizer: torch.optim.Optimizer = kind(self.model.parameters(), lr=1e-4)
        self.attachment: Attachment | None = None
        self._input = torch.randn(batch, width)
        self._marks: list[int] = []

    def attach(self, job: str) -> None:
        """Attaches, with a clock before and behind each of paramd's hooks."""
        # Before paramd's first one; the step itself has the clock behind its last one.
        register_optimizer_step_pre_hook(self._mark)
        self._add_clocks()
        self.attachment = paramd.attach(self.model, self.optimizer, job=job)
        self._add_clocks()

    def _add_clocks(self) -> None:
        # As paramd's own: global hooks run apart from an optimizer's, and its forward hook first.
        register_optimizer_step_post_hook(self._mark)
        self.model.register_forward_pre_hook(self._mark, prepend=True)

    def step(self) -> list[float]:
        """One step: its seconds, the seconds inside hooks, the seconds of waiting for copies."""
        self._marks.clear()
        stalled_s = self._stalled_s()
        begin_s = time.perf_counter()
        self.model(self._input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - begin_s
        return [seconds, self._hooks_s(), self._stalled_s() - stalled_s]

    def empty_step(self) -> float:
        """A step of the optimizer without gradients: the seconds inside hooks, caches warm."""
        self._marks.clear()
        self.optimizer.step()
        return self._hooks_s()

    def _hooks_s(self) -> float:
        return sum(b - a for a, b in zip(self._marks[::2], self._marks[1::2], strict=True)) / 1e9

    def _mark_behind(self, _: object) -> None:
        if self.attachment is not None:
            self._mark(self.optimizer)

    def _mark(self, whose: Any, *_: Any) -> None:
        if whose is self.optimizer or whose is self.model:
            self._marks.append(time.perf_counter_ns())

    def _stalled_s(self) -> float:
        return self.attachment.stalls().total_s if self.attachment is not None else 0.0


class Training:
    """What the rank has been told to build."""

    def __init__(self) -> None:
        self._trained: list[Trained] = []
        self._inside: list[InsideSidecar] = []
        self._saver: Saver | None = None

    def build(
        self, width: int, layers: int, batch: int, sharded: bool, moments: bool = False
    ) -> int:
        """One more copy of the same model; returns the bytes of its parameters."""
        trained = Trained(width, layers, batch, sharded=sharded, moments=moments)
        self._trained.append(trained)
        return 4 * sum(parameter.numel() for parameter in trained.model.parameters())

    def attach(self, number: int, job: str, alerts: str = "") -> list[int]:
        """Attaches copy `number`; returns the pids of helper processes started for it.

        Args:
            alerts: Settings of its alerts, as JSON; empty: those of the environment.
        """
        if alerts:
            os.environ["PARAMD_ALERTS"] = alerts
        before = {child.pid for child in psutil.Process().children()}
        self._trained[number].attach(job)
        return [c.pid for c in psutil.Process().children() if c.pid not in before]

    def attach_inside(self, number: int, job: str) -> None:
        """Attaches copy `number` to a sidecar that runs in a thread of this very process."""
        self._inside.append(InsideSidecar(job, dist.get_rank()))
        self._trained[number].attach(job)

    def train(self, order: list[int]) -> list[list[float]]:
        """One step of each copy named, in this order; ranks start each together."""
        found = []
        for number in order:
            dist.barrier()
            found.append(self._trained[number].step())
        return found

    def empty_steps(self, number: int, count: int) -> list[float]:
        """Seconds inside the hooks of steps that do nothing else."""
        dist.barrier()
        return [self._trained[number].empty_step() for _ in range(count)]

    def save(self, number: int, kind: str, directory: str) -> float:
        """Asynchronous DCP save of copy `number`; seconds the training stands still for it."""
        if self._saver is None or self._saver.kind != kind:
            self._close_saver()
            self._saver = Saver(kind)
        trained = self._trained[number]
        dist.barrier()
        return self._saver.save(trained.model, Path(directory), partial(trained.step))

    def _close_saver(self) -> None:
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def close(self) -> None:
        self._close_saver()
        for trained in self._trained:
            if trained.attachment is not None:
                trained.attachment.detach()
        for inside in self._inside:
            inside.close()


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    training = Training()
    commands = {
        name: getattr(training, name)
        for name in ("build", "attach", "attach_inside", "train", "empty_steps", "save")
    }
    try:
        obey(commands)
    finally:
        training.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
