"""What trainings are made of, with each other: without paramd and with it, bit for bit the same.

    combinations fused-replicated in-backward

Each combination trains a network with tied weights twice from the same seed. In the second training
rank 0 reads the job after some step, as any other program would.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paramd
from paramd.errors import ConflictError
from tests.multiprocess.workers.trainers import READ_AT, STEPS, digest, full, read_and_compare
from tests.rank import run

WORDS, WIDTH = 29, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return found


class Net(nn.Module):
    """Blocks between an embedding and a head that has the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


@dataclass
class Made:
    """A training: what it trains, and how a step goes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    """None: it steps within the backward."""
    micro_batches: int = 1
    max_norm: float = 0.0
    after: Callable[[int, Any], None] = lambda step, attachment: None
    """Called after each step, with the attachment if there is one."""


COMBINATIONS: dict[str, Callable[[], Made]] = {}


def combination(function: Callable[[], Made]) -> Callable[[], Made]:
    COMBINATIONS[function.__name__.replace("_", "-")] = function
    return function


def sharded(net: Net, *, compiled: bool = False, checkpointed: bool = False) -> Net:
    """With FSDP2 around each block and the whole, as torchtitan does it."""
    for index, block in enumerate(net.blocks):
        if checkpointed:
            net.blocks[index] = checkpoint_wrapper(block)  # type: ignore[no-untyped-call]
        if compiled:
            net.blocks[index].compile(backend="aot_eager")
        fully_shard(net.blocks[index])
    return fully_shard(net)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def made(model: nn.Module, *, micro_batches: int = 1, max_norm: float = 0.0, **how: Any) -> Made:
    """With AdamW, made `how` it says."""
    return Made(model, adamw(model, **how), micro_batches, max_norm)


def whole(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


COMBINATIONS |= {
    "fused-replicated": lambda: made(whole(Net()), fused=True, micro_batches=2),
    "foreach": lambda: made(sharded(Net()), foreach=True, micro_batches=2),
    "compiled-checkpointed-fused": lambda: made(
        sharded(Net(), compiled=True, checkpointed=True), fused=True, micro_batches=2, max_norm=0.5
    ),
    "compiled-replicated": lambda: made(
        whole(torch.compile(Net(), backend="aot_eager")), foreach=True
    ),
    "in-backward": lambda: _stepping_in_backward(sharded(Net())),
    "in-backward-checkpointed-compiled": lambda: _stepping_in_backward(
        sharded(Net(), compiled=True, checkpointed=True)
    ),
}


def _stepping_in_backward(model: nn.Module) -> Made:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            _stepping(torch.optim.AdamW([parameter], lr=1e-2))
        )
    return Made(model, None)


def _stepping(own: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def step(_: torch.Tensor) -> None:
        own.step()
        own.zero_grad()

    return step


@combination
def schedule_free() -> Made:
    """Evaluates at other weights than it trains; a reader is told, or gets them by that name."""
    from schedulefree import AdamWScheduleFree

    model = DistributedDataParallel(Net())
    optimizer: Any = AdamWScheduleFree(model.parameters(), lr=1e-2, foreach=False)
    optimizer.train()

    def evaluate(step: int, attachment: Any) -> None:
        if step != READ_AT:
            return
        with _standing_in(attachment, "schedule-free"):
            optimizer.eval()
            _read_stand_in(model, attachment, "schedule-free")
            optimizer.train()

    return Made(model, optimizer, after=evaluate)


@combination
def averaged() -> Made:
    """Keeps an average beside the model, and evaluates it in the model's place."""
    model = DistributedDataParallel(Net())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]

    def update(step: int, attachment: Any) -> None:
        ema.update_parameters(model)
        if step != READ_AT:
            return
        trained = copy.deepcopy(model.state_dict())
        with _standing_in(attachment, "ema"):
            model.load_state_dict(ema.module.state_dict())
            _read_stand_in(model, attachment, "ema")
            model.load_state_dict(trained)

    return Made(model, adamw(model), after=update)


def _standing_in(attachment: Any, label: str) -> Any:
    from contextlib import nullcontext

    return attachment.swapped_weights(label) if attachment is not None else nullcontext()


def _read_stand_in(model: nn.Module, attachment: Any, label: str) -> None:
    """Rank 0 reads: refused with the label, or what is there under it."""
    if attachment is not None and attachment.rank == 0:
        mine = full(model)
        with paramd.connect(job=attachment.job, timeout=30) as mesh:
            with pytest.raises(ConflictError, match=label):
                mesh.summon("*")
            found = mesh.summon("*", unsettled=True)
        assert found.label == label
        for name, value in mine.items():
            assert torch.equal(found[name], value), name
    dist.barrier()


@combination
def eight_bit() -> Made:
    """bitsandbytes' AdamW with 8-bit states, which runs on the CPU."""
    from bitsandbytes.optim import AdamW8bit

    model = DistributedDataParallel(Net())
    optimizer = AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=16)
    return Made(model, optimizer, micro_batches=2)


@combination
def adapters() -> Made:
    """LoRA over a frozen base that is sharded with it."""
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(Net(), LoraConfig(r=2, target_modules=["up"]))  # type: ignore[arg-type]
    for block in model.base_model.model.blocks:
        fully_shard(block)
    fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Made(model, torch.optim.AdamW(trained, lr=1e-2, fused=True))


def train(name: str, *, attached: bool) -> str:
    """Train one combination; the digest of its parameters after the last step."""
    torch.manual_seed(0)
    made = COMBINATIONS[name]()
    attachment = paramd.attach(made.model, made.optimizer, job=name) if attached else None
    for step in range(1, STEPS + 1):
        for micro in range(made.micro_batches):
            torch.manual_seed(100 * step + 10 * micro + dist.get_rank())
            tokens = torch.randint(WORDS, (8,))
            loss = nn.functional.cross_entropy(made.model(tokens), tokens.roll(1))
            loss.backward()  # type: ignore[no-untyped-call]
        if made.optimizer is not None:
            if made.max_norm:
                clip_grad_norm_(made.model.parameters(), made.max_norm)
            made.optimizer.step()
            made.optimizer.zero_grad()
        if attachment is not None:
            assert attachment.step == step, (name, attachment.step, step)
            if step == READ_AT:
                read_and_compare(made.model, attachment, step)
        made.after(step, attachment)
    if attachment is not None:
        attachment.detach()
    return digest(full(made.model))


def main(names: list[str]) -> None:
    for name in names:
        begin_s = time.monotonic()
        plain = train(name, attached=False)
        assert train(name, attached=True) == plain, f"paramd changed {name}"
        print(f"{name}: the same, {time.monotonic() - begin_s:.1f} s", flush=True)


if __name__ == "__main__":
    run(main)
