"""Trains with resume="auto" to a last step, however often it is killed and started again.

Every kind has dropout, a scheduler, and a loader that is iterated anew each epoch. At the end each
rank writes a digest of all its state; it must be that of a run that nobody killed.

    <folder>/starts-<rank>     one line a start: how it was resumed
    <folder>/final-<rank>      digests by name, JSON
    <folder>/at-<rank>         step the rank is at
    <folder>/trace-<rank>      with --trace, one line a pass of the loop: its step and digests, JSON
    <folder>/copies-<rank>     step of which all ranks have copies on other hosts
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from xxhash import xxh3_64_hexdigest

import paramd
from tests.gpu.late import finish
from tests.rank import run

WIDTH = 17


class Net(nn.Module):
    """Dropout everywhere; batch norm where the kind can have buffers."""

    def __init__(self, *, buffers: bool, frozen: bool, wide: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, WIDTH)
        self.up = nn.Linear(WIDTH, wide)
        self.norm = nn.BatchNorm1d(wide) if buffers else nn.LayerNorm(wide)
        self.down = nn.Linear(wide, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(not frozen)
        self.head = nn.Linear(WIDTH, 29, bias=False)
        self.drop = nn.Dropout(0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        x = self.frozen(x)
        return self.head(self.drop(self.down(torch.relu(self.norm(self.up(x))))))


Batch = tuple[torch.Tensor, torch.Tensor]


def drawn(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(29, (8,), generator=generator) for _ in range(2))
    return tokens, targets


class Drawn(torch.utils.data.Dataset[Batch]):
    """Batches by their seeds."""

    def __init__(self, seeds: list[int]) -> None:
        self._seeds = seeds

    def __len__(self) -> int:
        return len(self._seeds)

    def __getitem__(self, index: int) -> Batch:
        return drawn(self._seeds[index])


class Loader:
    """Batches in an order drawn anew each epoch; goes on where its state says."""

    def __init__(
        self, rank: int, data_rank: int, folder: Path, *, draws: bool, workers: int = 0
    ) -> None:
        self._rank, self._data_rank, self._folder = rank, data_rank, folder
        self._batches, self._draws, self._workers = 7 if not workers else 20, draws, workers
        self._epoch = self._next = 0

    def __iter__(self) -> Iterator[Batch]:
        if self._draws:
            # As torch's DataLoader does without a generator of its own.
            torch.empty((), dtype=torch.int64).random_()
        order = np.random.RandomState(self._epoch).permutation(self._batches)
        seeds = [10_000 * self._epoch + 100 * self._data_rank + int(one) for one in order]
        for batch in self._read(seeds[self._next :]):
            self._next += 1
            yield batch
        self._epoch, self._next = self._epoch + 1, 0

    def _read(self, seeds: list[int]) -> Iterable[Batch]:
        if not self._workers:
            return map(drawn, seeds)
        # Processes that read ahead: what counts is what was given out.
        own = torch.Generator().manual_seed(self._epoch)
        return torch.utils.data.DataLoader(
            Drawn(seeds), batch_size=None, num_workers=self._workers, generator=own
        )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        strike(self._folder, self._rank, "restore", 0)
        self._epoch, self._next = state["epoch"], state["next"]


class Other:
    """Something else under a name that was kept."""

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state["decay"]


def built(kind: str, wide: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    # FSDP1's flat parameters take no mixture of frozen and trained ones.
    net = Net(buffers=kind in ("plain", "ddp"), frozen=kind != "fsdp1-flat", wide=wide)
    world = dist.get_world_size()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if kind in ("fsdp1", "fsdp1-flat"):
        return FullyShardedDataParallel(
            net, use_orig_params=kind == "fsdp1", device_id=torch.device("cpu")
        )
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(net.up, mesh=mesh)
        fully_shard(net, mesh=mesh)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
        fully_shard(net, mesh=mesh)
    if kind == "tp-fsdp2":
        both = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "tensor"))
        # Its output is replicated, so that ranks of the tensor axis draw the same dropout.
        head = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(net, both["tensor"], {"head": head})
        fully_shard(net, mesh=both["data"])
    return net


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
}


def digests(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    loader: Loader,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, str]:
    found: dict[str, str] = {}

    def note(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            local = getattr(value, "_local_tensor", value).detach()
            value = local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        data = value if isinstance(value, bytes) else repr(value).encode()
        found[name] = xxh3_64_hexdigest(data)

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        note(name, tensor)
    for number, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            note(f"state {number} {key}", value)
    note("groups", [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    note("scheduler", scheduler.state_dict())
    note("loader", loader.state_dict())
    if scaler is not None:
        note("scaler", scaler.state_dict())
    note("torch", torch.get_rng_state())
    note("python", random.getstate())
    note("numpy", [repr(part) for part in np.random.get_state()])
    return found


def await_standing(folder: Path, attachment: paramd.Attachment, step: int) -> None:
    """Before the update in which a rank will die: until this rank's standing snapshot is whole."""
    orders = [path.read_text() for path in folder.glob("die-*")]
    until_s = time.monotonic() + 30.0
    while f"update {step}" in orders and time.monotonic() < until_s:
        cost = attachment.resume_cost()
        if cost is None or cost.standing_step >= step // 10 * 10:
            return
        time.sleep(0.01)


def strike(folder: Path, rank: int, point: str, step: int) -> None:
    """Dies here if told to: `<folder>/die-<rank>` holds "point step"."""
    order = folder / f"die-{rank}"
    if order.exists() and order.read_text() == f"{point} {step}":
        finish()
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


Begun = tuple[nn.Module, torch.optim.Optimizer, Any, Loader]


def begun(
    folder: Path, kind: str, optimizer: str, *, width: int = 31, steps: int = 10_000, **given: Any
) -> Begun:
    """Model, optimizer, scheduler and loader of this rank, with all randomness seeded."""
    logging.basicConfig(level=logging.INFO)
    rank = dist.get_rank()
    model = built(kind, width)
    # Ranks of one tensor axis train on the same batches.
    data_rank = rank if kind != "tp-fsdp2" else 0
    torch.manual_seed(100 + data_rank)
    random.seed(rank)
    np.random.seed(rank)
    updating = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(updating, steps)
    return model, updating, scheduler, Loader(rank, data_rank, folder, **given)


def main(
    folder: Path, *, kind: str = "plain", optimizer: str = "adamw", steps: int = 40,
    pause_s: float = 0.0, resume: str = "auto", workers: int = 0, explicit: bool = False,
    wider: bool = False, without_loader: bool = False, other_keep: bool = False,
    scaler: bool = False, trace: bool = False,
) -> None:  # fmt: skip
    rank = dist.get_rank()
    given = {"width": 37 if wider else 31, "draws": not explicit, "workers": workers}
    begin = model, updating, scheduler, loader = begun(
        folder, kind, optimizer, steps=steps, **given
    )
    # Grows every few steps, so that a lost or repeated one shows.
    scaling = torch.amp.GradScaler("cpu", 16.0, growth_interval=9, enabled=scaler)
    keep: dict[str, Any] = {"scheduler": scheduler if not other_keep else Other()}
    keep |= {} if without_loader else {"loader": loader}
    keep |= {"scaler": scaling} if scaler else {}
    # After the update's last byte, and before paramd's own hook: still inside.
    updating.register_step_post_hook(lambda *_: strike(folder, rank, "inside-end", attachment.step))
    attachment = paramd.attach(model, updating, job="resuming", resume=resume, extra_state=keep)
    updating.register_step_pre_hook(
        lambda *_: strike(folder, rank, "inside-begin", attachment.step)
    )
    with (folder / f"starts-{rank}").open("a") as starts:
        starts.write(f"{json.dumps(told(attachment))}\n")
    while attachment.step < steps:
        for step in epoch(folder, attachment, begin, scaling, explicit=explicit, trace=trace):
            time.sleep(pause_s)
            if step >= steps:
                break
    found = digests(*begin, scaling)
    (folder / f"final-{rank}").write_text(json.dumps(found, indent=1))
    attachment.detach()


def told(attachment: paramd.Attachment) -> dict[str, Any] | None:
    resumed = attachment.resumed
    if resumed is None:
        return None
    return {"step": resumed.step, "how": resumed.how, "lost": resumed.lost_steps}


def epoch(
    folder: Path, attachment: paramd.Attachment, begin: Begun, scaler: torch.amp.GradScaler, *,
    explicit: bool, trace: bool,
) -> Iterator[int]:  # fmt: skip
    """One epoch; the step after each update."""
    rank, (model, optimizer, scheduler, loader) = dist.get_rank(), begin
    for tokens, targets in loader:
        step = attachment.step
        if trace:
            with (folder / f"trace-{rank}").open("a") as lines:
                lines.write(f"{json.dumps([step, digests(*begin)])}\n")
        random.random()
        np.random.random()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), targets)
        strike(folder, rank, "forward", step)
        scaler.scale(loss).backward()
        strike(folder, rank, "backward", step)
        await_standing(folder, attachment, step)
        scaler.step(optimizer)
        scaler.update()
        strike(folder, rank, "update", step)
        scheduler.step()
        if explicit:
            attachment.end_iteration()
            strike(folder, rank, "kept", step)
        (folder / f"at-{rank}").write_text(str(attachment.step))
        cost = attachment.resume_cost()
        if cost is not None and cost.copies_step:
            (folder / f"copies-{rank}").write_text(str(cost.copies_step))
        yield attachment.step


if __name__ == "__main__":
    run(main)
