"""What all trainings share: a small model whose steps mostly sleep, data, and the onset."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import paramd
from paramd.trainer.attaching.attachment import Attachment

JOB = "case"
WIDTH = 32
BATCH = 16
ONSET_FILE = "onset.json"
CLOCK_FILE = "clock"
SICK_RANK = 1
AGREE_EVERY = 5
"""Steps between two questions whether the sickness begins."""
MEASURED = 21
"""Ends of steps whose distances are the usual time of a step."""


class Block(nn.Module):
    """A residual block of a norm and two linear layers, which takes as long as a large one."""

    def __init__(self, width: int, pause_s: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.pause_s = pause_s

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same."""
        if self.pause_s:
            time.sleep(self.pause_s)
        down: Tensor = self.down(functional.relu(self.up(self.norm(x))))
        return x + down


class Net(nn.Module):
    """A residual network that sleeps `pace_s` in each forward pass, in its first layer: on a busy
    machine each sleep is longer than it should be."""

    def __init__(self, pace_s: float, *, width: int = WIDTH, depth: int = 6) -> None:
        super().__init__()
        pauses_s = [pace_s, *[0.0] * (depth - 1)]
        self.layers = nn.ModuleList(Block(width, pause_s) for pause_s in pauses_s)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same."""
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out

    def slow_down(self, factor: float, step_s: float) -> None:
        """Make each step, which takes `step_s` now, take `factor` times as long."""
        first = self.layers[0]
        assert isinstance(first, Block)
        first.pause_s += (factor - 1.0) * step_s


class Training:
    """One rank's training: it runs until the campaign ends it."""

    def __init__(self, *, rank: int, folder: Path, onset_s: float, pace_s: float) -> None:
        """Joins the process group.

        Args:
            onset_s: Seconds of usual steps before a sickness begins.
            pace_s: Seconds of a usual step.
        """
        self.rank = rank
        self.folder = folder
        self.pace_s = pace_s
        self._ends_s: deque[float] = deque(maxlen=MEASURED)
        self.onset_step = -1
        """The step in which the sickness begins; -1 until the ranks have agreed on it."""
        self.step = 0
        self._onset_s = onset_s
        self._began = False
        self._attachment: Attachment | None = None
        self._noise = torch.Generator().manual_seed(rank + 1)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._teacher = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        dist.init_process_group("gloo")

    @property
    def is_sick(self) -> bool:
        """Whether this is the rank that falls ill, where one alone does."""
        return self.rank == SICK_RANK

    @property
    def attachment(self) -> Attachment:
        assert self._attachment is not None, "the case has not attached yet"
        return self._attachment

    def net(self, **options: int) -> Net:
        """The usual model, with the same values on all ranks."""
        return Net(self.pace_s, **options)

    def attach(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
    ) -> None:
        """Attach with default settings."""
        self._attachment = paramd.attach(model, optimizer, job=JOB)

    def prepare(
        self, net: nn.Module, *, lr: float = 1e-3, spread: bool = True
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap in DDP, make an AdamW and attach.

        Args:
            spread: Wrap in DDP; otherwise the case averages gradients itself (`average`).
        """
        model = DistributedDataParallel(net) if spread else net
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
        self.attach(model, optimizer)
        return model, optimizer

    def steps(self) -> Iterator[int]:
        """Numbers of steps, for ever."""
        began_s = time.monotonic()
        while True:
            if self.onset_step < 0 and self.step % AGREE_EVERY == AGREE_EVERY - 1:
                self._agree(due=time.monotonic() - began_s >= self._onset_s)
            yield self.step
            self._ends_s.append(time.monotonic())
            self.step += 1

    @property
    def step_s(self) -> float:
        """Seconds of a step lately: on a busy machine they are more than `pace_s`."""
        times_s = [later - earlier for earlier, later in pairwise(self._ends_s)]
        return median(times_s) if times_s else self.pace_s

    def _agree(self, *, due: bool) -> None:
        """Agree on the step of the onset: by time, because steps are few on a busy machine."""
        told = torch.tensor(float(due))
        dist.all_reduce(told, dist.ReduceOp.MAX)
        if told:
            self.onset_step = self.step + 1

    def batch(self, size: int = BATCH, *, noise: float = 0.1) -> tuple[Tensor, Tensor]:
        """Inputs and what the teacher says of them, (size, width) each; other ones on each rank."""
        x = torch.randn(size, WIDTH, generator=self._noise)
        y = torch.tanh(x @ self._teacher)
        return x, y + noise * torch.randn(size, WIDTH, generator=self._noise)

    def loss(self, model: nn.Module, size: int = BATCH) -> Tensor:
        """Loss of one batch."""
        x, y = self.batch(size)
        return functional.mse_loss(model(x), y)

    def update(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Backward, one step, and the loss into paramd's log."""
        loss.backward()  # type: ignore[no-untyped-call]
        self.step_with(optimizer, loss)

    def step_with(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """One step with the gradients that there are, and the loss into paramd's log."""
        optimizer.step()
        optimizer.zero_grad()
        self.log(loss)

    def log(self, loss: Tensor) -> None:
        """Log the loss, as scripts do, on rank 0."""
        if self.rank == 0:
            self.attachment.log(loss=loss.item())

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients that there are over all ranks."""
        for one in parameters:
            if one.grad is not None:
                dist.all_reduce(one.grad)
                one.grad /= dist.get_world_size()

    def ordinary(self, *, lr: float = 1e-3) -> None:
        """A training to which nothing happens."""
        model, optimizer = self.prepare(self.net(), lr=lr)
        for _ in self.steps():
            self.update(self.loss(model), optimizer)

    def begins(self) -> bool:
        """Whether the sickness begins with this step; true once, and then it is recorded."""
        if self._began or not 0 <= self.onset_step <= self.step:
            return False
        self._began = True
        if self.rank == 0:
            self.record_onset()
        return True

    def began(self) -> bool:
        """Whether the sickness has begun."""
        self.begins()
        return self._began

    def record_onset(self) -> None:
        """Note time and step of the onset for the campaign."""
        told = {"step": self.attachment.step, "monotonic_s": time.monotonic()}
        path = self.folder / ONSET_FILE
        # Both ranks may do so at once.
        new = path.with_suffix(f".{self.rank}")
        new.write_text(json.dumps(told))
        os.replace(new, path)


def of(net: nn.Module, layer: int) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of one layer, by name within it."""
    layers = net.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    yield from layers[layer].named_parameters()
