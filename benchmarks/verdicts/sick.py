"""Trainings that fall ill at a named step, and the first line that each must have."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.verdicts.case import (
    CLOCK,
    DRIFT,
    EXPORT,
    LOST,
    SLOW,
    STUCK,
    VALUES,
    Cases,
    Expected,
)
from benchmarks.verdicts.training import CLOCK_FILE, SICK_RANK, Block, Net, Training, of

if TYPE_CHECKING:
    from benchmarks.verdicts.watch import Job

SICK = Cases()

LAYER = 3
_LAYER = f"layers.{LAYER}."
_ONE = frozenset({SICK_RANK})


def _scaled(t: Training, following: Callable[[float], float]) -> None:
    """Gradients of the layer are multiplied, from the onset on.

    Args:
        following: What they are multiplied by in a step, from what it was in the step before.
    """
    net, factor = t.net(), 1.0
    for _, one in of(net, LAYER):
        one.register_hook(lambda gradient: gradient * factor)
    model, optimizer = t.prepare(net)
    for _ in t.steps():
        if t.began():
            factor = following(factor)
        t.update(t.loss(model), optimizer)


@SICK.add(
    "A layer's gradients grow by 2 % in each step.", expected=Expected(rules=VALUES, layer=_LAYER)
)
def explodes_slowly(t: Training) -> None:
    _scaled(t, lambda factor: min(1e6, factor * 1.02))


@SICK.add(
    "A layer's gradients are 10,000 times as large from one step on.",
    expected=Expected(rules=VALUES, layer=_LAYER),
)
def explodes_at_once(t: Training) -> None:
    _scaled(t, lambda _: 1e4)


@SICK.add(
    "A layer's gradients vanish: a 100,000th of what they were.",
    expected=Expected(rules=VALUES, layer=_LAYER),
)
def vanishes(t: Training) -> None:
    _scaled(t, lambda _: 1e-5)


@SICK.add(
    "A bad update leaves all ReLUs of a layer dead.", expected=Expected(rules=VALUES, layer=_LAYER)
)
def dead_relus(t: Training) -> None:
    net = t.net()
    model, optimizer = t.prepare(net)
    layer = net.layers[LAYER]
    assert isinstance(layer, Block)
    for _ in t.steps():
        loss = t.loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
        begins = t.begins()
        with t.attachment.update():
            optimizer.step()
            if begins:
                with torch.no_grad():
                    layer.up.bias -= 100.0
        optimizer.zero_grad()
        t.log(loss)


class _Spare(nn.Module):
    """The usual model beside an embedding of which rows are never used."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.embed = nn.Embedding(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x + self.embed(torch.arange(len(x)) % 8))
        return out


@SICK.add(
    "One tensor of rank 1 gets a NaN, which spreads to nothing.",
    expected=Expected(rules=VALUES | DRIFT, layer="embed"),
)
def nan_in_one_rank(t: Training) -> None:
    spare = _Spare(t.net())
    model, optimizer = t.prepare(spare)
    for _ in t.steps():
        loss = t.loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
        begins = t.begins()
        with t.attachment.update():
            optimizer.step()
            if begins and t.is_sick:
                with torch.no_grad():
                    spare.embed.weight[50, 3] = torch.nan
        optimizer.zero_grad()
        t.log(loss)


@SICK.add(
    "A layer of rank 1 drifts: its update differs a little in each step.",
    expected=Expected(rules=DRIFT, layer=_LAYER),
)
def replicas_drift(t: Training) -> None:
    net = t.net()
    model, optimizer = t.prepare(net)
    for _ in t.steps():
        loss = t.loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
        if t.began() and t.is_sick:
            for _, one in of(net, LAYER):
                assert one.grad is not None
                one.grad *= 1.001
        t.step_with(optimizer, loss)


@SICK.add(
    "One bit of one weight of rank 1 flips.",
    expected=Expected(rules=DRIFT, layer=f"{_LAYER}up.weight"),
)
def flipped_bit(t: Training) -> None:
    net = t.net()
    model, optimizer = t.prepare(net)
    layer = net.layers[LAYER]
    assert isinstance(layer, Block)
    for _ in t.steps():
        t.update(t.loss(model), optimizer)
        if t.begins() and t.is_sick:
            # A silent bit flip, as faulty hardware causes it.
            bits = layer.up.weight.detach().view(torch.int32)
            bits[5, 7] ^= 1 << 19


@SICK.add(
    "A bad batch: the loss jumps ten thousandfold, and takes long to come back.",
    expected=Expected(rules=VALUES),
)
def bad_batch(t: Training) -> None:
    net = t.net()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    t.attach(model, optimizer)
    for _ in t.steps():
        x, y = t.batch()
        if t.begins():
            y = y * 100.0
        t.update(functional.mse_loss(model(x), y), optimizer)


def _hundredfold(job: Job) -> None:
    job.set_lr(0.3)


@SICK.add(
    "Somebody multiplies the learning rate by 100.",
    act=_hundredfold,
    expected=Expected(rules=VALUES),
)
def rate_times_100(t: Training) -> None:
    model, optimizer = t.prepare(t.net(), lr=3e-3)
    for _ in t.steps():
        t.begins()
        t.update(t.loss(model), optimizer)


class _Detaching(Net):
    """A model of which one layer's output can be cut from the graph, as by a forgotten detach."""

    cut = False

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            out = layer(x)
            x = x + (out - x).detach() if self.cut and number == LAYER else out
        last: Tensor = self.head(x)
        return last


@SICK.add(
    "A layer is frozen by mistake: it is to be trained, and gets no gradient any more.",
    expected=Expected(rules=VALUES, layer=_LAYER),
)
def frozen_by_mistake(t: Training) -> None:
    net = _Detaching(t.pace_s)
    model, optimizer = t.prepare(net, spread=False)
    for _ in t.steps():
        net.cut = t.began()
        loss = t.loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
        t.average(net.parameters())
        t.step_with(optimizer, loss)


@SICK.add(
    "The optimizer's state is lost, and its first steps are far too long.",
    expected=Expected(rules=VALUES),
)
def optimizer_state_lost(t: Training) -> None:
    net = t.net()
    model = nn.parallel.DistributedDataParallel(net)
    # A long memory of squares, as it is common: without it steps are a thousand times as long.
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, alpha=0.9999, eps=1e-8)
    t.attach(model, optimizer)
    for _ in t.steps():
        loss = t.loss(model)
        if t.begins():
            for state in optimizer.state.values():
                state["square_avg"].zero_()
        t.update(loss, optimizer)


# Steps of 0.1 s vary by more than that on a busy machine.
@SICK.add(
    "Steps of rank 1 take 1.3 times as long.",
    expected=Expected(rules=SLOW, ranks=_ONE),
    pace_s=0.5,
)
def slower_by_30_percent(t: Training) -> None:
    _slower(t, 1.3)


@SICK.add("Steps of rank 1 take three times as long.", expected=Expected(rules=SLOW, ranks=_ONE))
def three_times_slower(t: Training) -> None:
    _slower(t, 3.0)


def _slower(t: Training, factor: float) -> None:
    net = t.net()
    model, optimizer = t.prepare(net)
    for _ in t.steps():
        if t.begins() and t.is_sick:
            net.slow_down(factor, t.step_s)
        t.update(t.loss(model), optimizer)


class _Reading(torch.utils.data.Dataset[int]):
    """Items of which each takes `pause_s` to read."""

    def __init__(self) -> None:
        self.pause_s = 0.0

    def __getitem__(self, index: int) -> int:
        time.sleep(self.pause_s)
        return index

    def __len__(self) -> int:
        return 1 << 40


def _starves(t: Training, *, all_ranks: bool) -> None:
    model, optimizer = t.prepare(t.net())
    data = _Reading()
    in_order = torch.utils.data.SequentialSampler(range(1 << 40))
    items = iter(torch.utils.data.DataLoader(data, 1, sampler=in_order))
    for _ in t.steps():
        if t.begins() and (all_ranks or t.is_sick):
            data.pause_s = 5 * t.step_s
        next(items)
        t.update(t.loss(model), optimizer)


@SICK.add(
    "The data loader of rank 1 takes five times as long as a step.",
    expected=Expected(rules=SLOW, ranks=_ONE, says=("data", "DataLoader")),
)
def starving_one(t: Training) -> None:
    _starves(t, all_ranks=False)


@SICK.add(
    "The data loaders of all ranks take five times as long as a step.",
    expected=Expected(rules=SLOW, says=("data", "DataLoader")),
)
def starving_all(t: Training) -> None:
    _starves(t, all_ranks=True)


def _until_onset(t: Training) -> Iterator[tuple[Net, nn.Module, torch.optim.Optimizer]]:
    """Train; at the onset yield, once, before the forward of that step."""
    net = t.net()
    model, optimizer = t.prepare(net)
    for _ in t.steps():
        if t.begins():
            yield net, model, optimizer
        t.update(t.loss(model), optimizer)


@SICK.add(
    "Rank 1 hangs, waiting for a lock of its own, while the other waits in a collective.",
    expected=Expected(rules=STUCK, ranks=_ONE),
)
def hang_in_a_collective(t: Training) -> None:
    for _ in _until_onset(t):
        if t.is_sick:
            threading.Event().wait()


@SICK.add(
    "Rank 1 is in a collective of another group than rank 0.",
    expected=Expected(rules=STUCK, says=("collective",)),
)
def another_collective(t: Training) -> None:
    other = dist.new_group()
    for _ in _until_onset(t):
        value = torch.zeros(1000)
        dist.all_reduce(value, group=other if t.is_sick else None)


@SICK.add(
    "Rank 1 is killed with SIGKILL.", expected=Expected(rules=LOST, ranks=_ONE, says=("SIGKILL",))
)
def killed(t: Training) -> None:
    for _ in _until_onset(t):
        if t.is_sick:
            t.record_onset()
            os.kill(os.getpid(), signal.SIGKILL)


@SICK.add(
    "Rank 1 runs out of memory, and its allocation fails.",
    expected=Expected(rules=LOST, ranks=_ONE),
    simulated="the limit is the process's own (RLIMIT_AS), because that of the host would hit "
    "its other programs",
)
def out_of_memory(t: Training) -> None:
    for net, _, _ in _until_onset(t):
        if t.is_sick:
            t.record_onset()
            used = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
            kept = [torch.ones(1 << 20) for _ in range(1000)]
            net.head(kept[0])


@SICK.add(
    "The kernel kills rank 1 because memory is short.",
    expected=Expected(rules=LOST, ranks=_ONE, says=("SIGKILL", "memory")),
    simulated="SIGKILL at that step stands for the kernel's: no memory is short",
)
def killed_for_memory(t: Training) -> None:
    for _ in _until_onset(t):
        if t.is_sick:
            t.record_onset()
            _kept = torch.ones(32 << 20)
            os.kill(os.getpid(), signal.SIGKILL)


@SICK.add(
    "Rank 1 raises an exception.",
    expected=Expected(rules=LOST, ranks=_ONE, says=("code 1", "ValueError")),
)
def an_exception(t: Training) -> None:
    for _ in _until_onset(t):
        if t.is_sick:
            t.record_onset()
            raise ValueError("a batch without rows")


def _export_to_a_full_disk(job: Job) -> None:
    job.limit_files(1 << 12)
    job.export()


@SICK.add(
    "The disk is full while an export is written.",
    act=_export_to_a_full_disk,
    expected=Expected(rules=EXPORT, says=("full", "space", "File too large")),
    simulated="the full disk is a limit of the size of files of the sidecars (RLIMIT_FSIZE)",
)
def full_disk(t: Training) -> None:
    model, optimizer = t.prepare(t.net())
    for _ in t.steps():
        t.begins()
        t.update(t.loss(model), optimizer)


@SICK.add(
    "The host of rank 1 is lost: its trainer and its sidecar end at once.",
    expected=Expected(rules=LOST, ranks=_ONE),
    simulated="both processes of the rank are killed: a host would take its network, too",
)
def lost_host(t: Training) -> None:
    for _ in _until_onset(t):
        if t.is_sick:
            t.record_onset()
            for one in psutil.process_iter():
                if _is_sidecar_of(one, t):
                    one.kill()
            os.kill(os.getpid(), signal.SIGKILL)


def _is_sidecar_of(process: psutil.Process, t: Training) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    here = any(str(t.folder) in part for part in command)
    return here and "paramd_service.sidecar" in command and str(SICK_RANK) in command


@SICK.add(
    "Rank 1 is stopped with SIGSTOP.", expected=Expected(rules=STUCK, ranks=_ONE, says=("stopped",))
)
def stopped(t: Training) -> None:
    for _ in _until_onset(t):
        if t.is_sick:
            os.kill(os.getpid(), signal.SIGSTOP)


@SICK.add(
    "The clock of the host of rank 1 jumps ahead by an hour.",
    expected=Expected(rules=CLOCK, ranks=_ONE, says=("clock",)),
    own_clock=True,
    simulated="time.time is patched in the trainer of rank 1 and in its sidecar",
)
def clock_jumps(t: Training) -> None:
    model, optimizer = t.prepare(t.net())
    for _ in t.steps():
        if t.begins() and t.is_sick:
            (t.folder / CLOCK_FILE).write_text("3600")
        t.update(t.loss(model), optimizer)
