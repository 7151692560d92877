"""One rank of a DDP model that trains; passes over its gradients as W&B makes them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import paramd
from benchmarks.ranks import obey
from benchmarks.workers.clocked import clocked
from paramd.trainer.attaching.attachment import Attachment
from tests.ending import end

JOB = "bench"
BINS = 64
"""As many as `wandb.watch` counts."""


class GradientRank:
    """What the rank has been told to build."""

    def __init__(self) -> None:
        self._model: nn.Module = nn.Module()
        self._optimizer: torch.optim.Optimizer | None = None
        self._attachment: Attachment | None = None
        self._input = torch.empty(0)
        self._marks: list[int] = []
        self._passes: dict[str, Callable[[torch.Tensor], Any]] = {
            "bare": lambda gradient: None,
            "histc": lambda gradient: torch.histc(gradient, BINS),
            "watch": watch,
        }

    def build(self, width: int, layers: int, batch: int) -> int:
        """`layers` of a norm and a linear layer; returns the bytes of the parameters."""
        torch.manual_seed(0)
        net = nn.Sequential(
            *(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
                for _ in range(layers)
            )
        )
        self._model = DistributedDataParallel(net)
        kind: Any = clocked(torch.optim.SGD, self._mark_behind)
        self._optimizer = kind(self._model.parameters(), lr=1e-4)
        self._input = torch.randn(batch, width)
        return 4 * sum(parameter.numel() for parameter in net.parameters())

    def attach(self) -> list[int]:
        """Attaches with clocks around paramd's pre-hook; returns the helpers' pids."""
        assert self._optimizer is not None
        # Before paramd's first one; the step itself has the clock behind its last one.
        register_optimizer_step_pre_hook(self._mark)
        self._attachment = paramd.attach(self._model, self._optimizer, job=JOB)
        return [child.pid for child in psutil.Process().children()]

    def train(self, kind: str, count: int) -> list[list[float]]:
        """Steps with a pass of that kind on rank 0: number, seconds, CPU s of the pre-hook."""
        found = []
        dist.barrier()
        for _ in range(count):
            found.append(self._step(self._passes[kind]))
        return found

    def memcpy(self) -> tuple[float, float]:
        """CPU seconds to copy all gradients of the rank, right after a backward, into warm memory.

        And those to read the copies once (`torch.sum`). CPU time: others on a shared machine would
        show in the clock.
        """
        targets = [torch.zeros_like(parameter) for parameter in self._model.parameters()]
        times, reads = [], []
        for _ in range(7):
            self._model(self._input).square().mean().backward()
            begin_s = time.thread_time()
            with torch.no_grad():
                for target, parameter in zip(targets, self._model.parameters(), strict=True):
                    assert parameter.grad is not None
                    target.copy_(parameter.grad)
            times.append(time.thread_time() - begin_s)
            begin_s = time.thread_time()
            for target in targets:
                target.sum()
            reads.append(time.thread_time() - begin_s)
        return sorted(times)[3], sorted(reads)[3]

    def empty_hooks(self, count: int) -> list[float]:
        """CPU seconds in the pre-hook of steps without gradients and without a reader."""
        assert self._optimizer is not None
        self._optimizer.zero_grad()
        found = []
        for _ in range(count):
            self._marks.clear()
            self._optimizer.step()
            found.append((self._marks[1] - self._marks[0]) / 1e9)
        return found

    def _step(self, work: Callable[[torch.Tensor], Any]) -> list[float]:
        assert self._optimizer is not None
        self._marks.clear()
        begin_s = time.perf_counter()
        self._model(self._input).square().mean().backward()
        if dist.get_rank() == 0:
            for parameter in self._model.parameters():
                assert parameter.grad is not None
                work(parameter.grad)
        self._optimizer.step()
        seconds = time.perf_counter() - begin_s
        hook_s = (self._marks[1] - self._marks[0]) / 1e9 if self._marks else 0.0
        number = self._attachment.step if self._attachment is not None else 0
        return [number, seconds, hook_s]

    def _mark(self, *_: Any) -> None:
        self._marks.append(time.thread_time_ns())

    def _mark_behind(self, _: object) -> None:
        if self._marks:
            self._mark()

    def detach(self) -> None:
        if self._attachment is not None:
            self._attachment.detach()


def watch(gradient: torch.Tensor) -> tuple[list[float], list[float]]:
    """What `wandb.watch(log="gradients")` does with each gradient (wandb/integration/torch)."""
    flat = gradient.reshape(-1)
    if bool((torch.isnan(flat) | torch.isinf(flat)).all()):
        return [], []
    if not bool(torch.isfinite(flat).all()):
        flat = flat[torch.isfinite(flat)]
    low, high = flat.min().item(), flat.max().item()
    counts = flat.histc(bins=BINS, min=low, max=high)
    return counts.tolist(), torch.linspace(low, high, steps=BINS + 1).tolist()


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    rank = GradientRank()
    commands: dict[str, Any] = {
        name: getattr(rank, name) for name in ("build", "attach", "train", "memcpy", "empty_hooks")
    }
    try:
        obey(commands)
    finally:
        rank.detach()
        dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
