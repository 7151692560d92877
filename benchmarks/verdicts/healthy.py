"""Trainings to which nothing is wrong: no first line may say otherwise, at any time."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.verdicts.case import Cases
from benchmarks.verdicts.training import BATCH, WIDTH, Block, Training, of

if TYPE_CHECKING:
    from benchmarks.verdicts.watch import Job

HEALTHY = Cases()

_VOCABULARY = 2000


@HEALTHY.add("An ordinary training with DDP and AdamW.")
def calm(t: Training) -> None:
    t.ordinary()


@HEALTHY.add("The same, sharded with FSDP2.")
def calm_fsdp(t: Training) -> None:
    net = t.net()
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    model, optimizer = t.prepare(net, spread=False)
    for _ in t.steps():
        t.update(t.loss(model), optimizer)


@HEALTHY.add("Forty layers from the first step on, whose gradients grow as training begins.")
def young_and_deep(t: Training) -> None:
    net = t.net(depth=40)
    for layer in range(40):
        for name, one in of(net, layer):
            # As deep networks are often begun: residual branches start at nothing.
            if name.startswith("down"):
                nn.init.zeros_(one)
    model, optimizer = t.prepare(net, lr=3e-3)
    for _ in t.steps():
        t.update(t.loss(model), optimizer)


def _scheduled(t: Training, schedule_of: Callable[[Optimizer], LRScheduler]) -> None:
    model, optimizer = t.prepare(t.net(), lr=1e-2)
    schedule = schedule_of(optimizer)
    for _ in t.steps():
        t.update(t.loss(model), optimizer)
        schedule.step()


@HEALTHY.add("The learning rate warms up over 600 steps, to a high one.")
def warm_up(t: Training) -> None:
    _scheduled(t, lambda optimizer: lr_scheduler.LinearLR(optimizer, 1e-3, 1.0, 600))


@HEALTHY.add("A cosine schedule that restarts every 250 steps.")
def cosine_restarts(t: Training) -> None:
    _scheduled(t, lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 250))


@HEALTHY.add("The learning rate falls tenfold every 400 steps.")
def step_decay(t: Training) -> None:
    _scheduled(t, lambda optimizer: lr_scheduler.StepLR(optimizer, 400, 0.1))


@HEALTHY.add("Gradients with heavy tails, clipped in most steps, paramd told.")
def clipping(t: Training) -> None:
    model, optimizer = t.prepare(t.net())
    chance = random.Random(0)
    for _ in t.steps():
        x, y = t.batch()
        loss = functional.mse_loss(model(x), y) * chance.lognormvariate(0.0, 1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        t.attachment.clipped(norm, 0.3)
        t.step_with(optimizer, loss)


@HEALTHY.add("A GradScaler that skips the first steps, and one in a hundred later.")
def grad_scaler(t: Training) -> None:
    model, optimizer = t.prepare(t.net())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=60)
    for step in t.steps():
        loss = t.loss(model)
        # What half precision does by itself: a scale that is too high overflows.
        overflows = step < 8 or step % 100 == 99
        scaled = scaler.scale(loss * torch.inf if overflows else loss)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        t.log(loss)


@HEALTHY.add("Each step accumulates eight batches.", pace_s=0.4)
def accumulation(t: Training) -> None:
    net = t.net()
    net.slow_down(1 / 8, t.pace_s)
    model, optimizer = t.prepare(net)
    for _ in t.steps():
        for _ in range(7):
            (t.loss(model) / 8).backward()  # type: ignore[no-untyped-call]
        t.update(t.loss(model) / 8, optimizer)


class _Experts(nn.Module):
    """A router and four experts, of which each row takes one."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Block(WIDTH, pause_s / 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        top, which = shares.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (which == number).float()[:, None]
            out = out + expert(x) * rows
        return x + out * top[:, None]


@HEALTHY.add("A mixture of experts whose router prefers others now and then.")
def moe_router(t: Training) -> None:
    net = nn.Sequential(_Experts(t.pace_s), _Experts(t.pace_s), nn.Linear(WIDTH, WIDTH))
    model, optimizer = t.prepare(net, lr=3e-3)
    for step in t.steps():
        x, y = t.batch()
        # Topics come and go, and with them the experts that are used.
        x = x + 2.0 * math.sin(step / 40)
        t.update(functional.mse_loss(model(x), y), optimizer)


class _Words(nn.Module):
    """An embedding, most of whose rows are seldom used, below the usual model."""

    def __init__(self, rest: nn.Module, *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(_VOCABULARY, WIDTH, mode="sum", sparse=sparse)
        self.rest = rest

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.rest(self.embed(words))
        return out


def words_of(t: Training) -> Tensor:
    """(batch, 8) words, few of which are common."""
    ranks = torch.rand(BATCH, 8) ** 6 * _VOCABULARY
    return ranks.long().clamp(0, _VOCABULARY - 1)


@HEALTHY.add("An embedding with sparse gradients and rows that are seldom used.")
def sparse_embeddings(t: Training) -> None:
    net = _Words(t.net(), sparse=True)
    model = DistributedDataParallel(net)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SparseAdam(list(net.embed.parameters()), lr=1e-2),
        torch.optim.AdamW(net.rest.parameters(), lr=1e-3),
    ]
    t.attach(model, optimizers)
    for _ in t.steps():
        words = words_of(t)
        target = torch.sin(words.float().mean(-1, keepdim=True)).expand(-1, WIDTH)
        loss = functional.mse_loss(model(words), target)
        loss.backward()  # type: ignore[no-untyped-call]
        for one in optimizers:
            one.step()
            one.zero_grad()
        t.log(loss)


@HEALTHY.add("A GAN: two models that take turns, each gaining on the other.")
def gan(t: Training) -> None:
    def small() -> nn.Module:
        return nn.Sequential(Block(WIDTH, t.pace_s / 4), nn.Linear(WIDTH, WIDTH))

    maker, judge = small(), nn.Sequential(small(), nn.Linear(WIDTH, 1))
    models = {"maker": DistributedDataParallel(maker), "judge": DistributedDataParallel(judge)}
    optimizers = [
        torch.optim.Adam(one.parameters(), lr=2e-3, betas=(0.5, 0.99)) for one in (maker, judge)
    ]
    t.attach(models, [*optimizers])
    binary = functional.binary_cross_entropy_with_logits
    for _ in t.steps():
        _, real = t.batch()
        made = maker(torch.randn(BATCH, WIDTH))
        told = models["judge"](torch.cat([real, made.detach()]))
        truth = torch.cat([torch.ones(BATCH, 1), torch.zeros(BATCH, 1)])
        t.update(binary(told, truth), optimizers[1])
        for one in judge.parameters():
            one.requires_grad_(False)
        loss = binary(judge(models["maker"](torch.randn(BATCH, WIDTH))), torch.ones(BATCH, 1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[0].step()
        optimizers[0].zero_grad()
        for one in judge.parameters():
            one.requires_grad_(True)


@HEALTHY.add("PPO: rollouts of four seconds, 16 quick updates, an evaluation now and then.")
def ppo_with_evaluation(t: Training) -> None:
    net = t.net()
    model, optimizer = t.prepare(net)
    for turn in itertools.count():
        time.sleep(4.0)  # The rollout.
        x, _ = t.batch(64)
        advantage = torch.randn(64, 1) * (1 + 3 * (turn % 5 == 0))
        old = net(x).detach()
        for _ in range(16):
            ratio = (model(x) - old).clamp(-5, 5).mean(-1, keepdim=True).exp()
            clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            t.update(-clipped.mean(), optimizer)
        if turn % 8 == 7:
            with torch.no_grad():
                for _ in range(60):
                    net(x)


@HEALTHY.add("Schedule-free AdamW, with evaluations at its averaged weights.")
def schedule_free(t: Training) -> None:
    import schedulefree

    net = t.net()
    model = DistributedDataParallel(net)
    optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=5e-3, warmup_steps=50)
    optimizer.train()
    t.attach(model, optimizer)
    for step in t.steps():
        t.update(t.loss(model), optimizer)
        if step % 200 == 199:
            with t.attachment.update():
                optimizer.eval()
            with torch.no_grad():
                for _ in range(20):
                    t.loss(net)
            with t.attachment.update():
                optimizer.train()


@HEALTHY.add("A curriculum whose batches grow, so that steps take up to five times as long.")
def curriculum(t: Training) -> None:
    net = t.net()
    model, optimizer = t.prepare(net)
    for step in t.steps():
        if step in (150, 300, 450, 600):
            net.slow_down(1.5, t.pace_s)
        t.update(t.loss(model, 8 * (1 + step // 150)), optimizer)


class _Dropping(nn.Module):
    """The usual model with dropout before and behind."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.before, self.net, self.behind = nn.Dropout(0.3), net, nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.behind(self.net(self.before(x)))
        return out


@HEALTHY.add("Dropout on for 200 steps, off for 200, and so on.")
def dropout_on_and_off(t: Training) -> None:
    model, optimizer = t.prepare(_Dropping(t.net()))
    for step in t.steps():
        model.train(step // 200 % 2 == 0)
        t.update(t.loss(model), optimizer)


@HEALTHY.add(
    "Lower layers are frozen on purpose (requires_grad), then unfrozen, then frozen again."
)
def freezing_and_unfreezing(t: Training) -> None:
    net = t.net()
    model, optimizer = t.prepare(net, spread=False)
    for step in t.steps():
        if step % 300 == 0:
            for layer in range(3):
                for _, one in of(net, layer):
                    one.requires_grad_(step // 300 % 2 == 1)
        loss = t.loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
        t.average(net.parameters())
        t.step_with(optimizer, loss)


@HEALTHY.add("Only small adapters are trained, which begin at nothing.")
def adapters(t: Training) -> None:
    net = t.net()
    for one in net.parameters():
        one.requires_grad_(False)
    for layer in net.layers:
        assert isinstance(layer, Block)
        layer.up = nn.Sequential(layer.up, nn.Linear(2 * WIDTH, 4), nn.Linear(4, 2 * WIDTH))
        nn.init.zeros_(layer.up[2].weight)
    model = DistributedDataParallel(net)
    trained = [one for one in net.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    t.attach(model, optimizer)
    for _ in t.steps():
        t.update(t.loss(model), optimizer)


@HEALTHY.add(
    "Two minutes of compiling in the first step (a sleep of that length).",
    simulated="the compiler is a sleep: torch.compile of so small a model takes seconds",
)
def first_step_compiles(t: Training) -> None:
    net = t.net()
    model, optimizer = t.prepare(net)
    for step in t.steps():
        if step == 0:
            time.sleep(120.0)
        t.update(t.loss(model), optimizer)


@HEALTHY.add(
    "A large model: the first three steps take 30, 20 and 10 s, later ones one.",
    pace_s=1.0,
    simulated="size is a sleep",
)
def first_steps_long(t: Training) -> None:
    model, optimizer = t.prepare(t.net())
    for step in t.steps():
        time.sleep((30.0, 20.0, 10.0)[step] if step < 3 else 0.0)
        t.update(t.loss(model), optimizer)


@HEALTHY.add("Steps of 40 s.", pace_s=40.0)
def long_steps(t: Training) -> None:
    t.ordinary()


@HEALTHY.add("An evaluation of 45 s on all ranks every 60 s.")
def long_evaluation(t: Training) -> None:
    net = t.net()
    model, optimizer = t.prepare(net)
    for step in t.steps():
        t.update(t.loss(model), optimizer)
        if step % 150 == 149:
            began_s = time.monotonic()
            with torch.no_grad():
                while time.monotonic() < began_s + 45:
                    t.loss(net)


@HEALTHY.add("An evaluation of 30 s on rank 0 alone, while the other one waits.")
def evaluation_on_one(t: Training) -> None:
    net = t.net()
    model, optimizer = t.prepare(net)
    for step in t.steps():
        t.update(t.loss(model), optimizer)
        if step % 300 == 299:
            if t.rank == 0:
                began_s = time.monotonic()
                with torch.no_grad():
                    while time.monotonic() < began_s + 30:
                        t.loss(net)
            dist.barrier()


@HEALTHY.add(
    "Rank 0 writes a checkpoint for 45 s, while the other one waits.",
    simulated="the slow disk is a sleep within torch.save",
)
def long_checkpoint(t: Training) -> None:
    net = t.net()
    model, optimizer = t.prepare(net)

    class Slow:
        """Pickled for 45 s."""

        def __reduce__(self) -> tuple[type[list[int]], tuple[()]]:
            time.sleep(45.0)
            return list, ()

    for step in t.steps():
        t.update(t.loss(model), optimizer)
        if step % 400 == 399:
            if t.rank == 0:
                told = {"model": net.state_dict(), "slow": Slow()}
                torch.save(told, t.folder / "checkpoint.pt")
            dist.barrier()


@HEALTHY.add("Data arrives in bursts: 2.5 s of waiting every 10 s, on both ranks.")
def bursts_of_data(t: Training) -> None:
    model, optimizer = t.prepare(t.net())

    class Bursts(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            time.sleep(2.5 if index % 100 == 99 else 0.0)
            return index

        def __len__(self) -> int:
            return 1 << 40

    in_order = torch.utils.data.SequentialSampler(range(1 << 40))
    for _ in zip(
        t.steps(), torch.utils.data.DataLoader(Bursts(), 1, sampler=in_order), strict=False
    ):
        t.update(t.loss(model), optimizer)


_BURN = "import time\nend = time.monotonic() + 8\nwhile time.monotonic() < end: pass"


@HEALTHY.add("A laptop under load: other programs take the processors 8 s in 20.")
def laptop_under_load(t: Training) -> None:
    model, optimizer = t.prepare(t.net())
    for step in t.steps():
        t.update(t.loss(model), optimizer)
        if t.rank == 0 and step % 200 == 100:
            for _ in range(os.cpu_count() or 1):
                subprocess.Popen([sys.executable, "-c", _BURN])


@HEALTHY.add("Steps of both ranks vary between half and three times their usual length.")
def jitter(t: Training) -> None:
    model, optimizer = t.prepare(t.net())
    chance = random.Random(t.rank)
    for _ in t.steps():
        time.sleep(t.pace_s * chance.lognormvariate(-1.0, 0.8))
        t.update(t.loss(model), optimizer)


@HEALTHY.add("Rewards that are seldom: gradients are small for long, then large for one step.")
def seldom_rewards(t: Training) -> None:
    model, optimizer = t.prepare(t.net())
    chance = random.Random(0)
    for _ in t.steps():
        scale = 6.0 if chance.random() < 0.05 else 1.0
        t.update(t.loss(model) * scale, optimizer)


@HEALTHY.add("Parameters in bfloat16, trained with SGD and momentum.")
def bfloat16(t: Training) -> None:
    net = t.net().bfloat16()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=3e-3, momentum=0.9)
    t.attach(model, optimizer)
    for _ in t.steps():
        x, y = t.batch()
        t.update(functional.mse_loss(model(x.bfloat16()).float(), y), optimizer)


def _halve_the_rate(job: Job) -> None:
    job.set_lr(5e-4)


@HEALTHY.add("Somebody halves the learning rate, and nothing comes of it.", act=_halve_the_rate)
def an_edit_without_harm(t: Training) -> None:
    model, optimizer = t.prepare(t.net())
    for _ in t.steps():
        t.begins()
        t.update(t.loss(model), optimizer)
