"""The loops: each is what a script does for one iteration, as its author writes it.

`Loop.iteration` is given the rank's `Script`. Whatever ends an update successfully is within
`script.record.update()`; `script.forward` and `script.train` are the usual forward, and forward
with backward.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.sequences.model import MOMENTUM, RATE

if TYPE_CHECKING:
    from paramd.trainer.attaching.attachment import Attachment
    from tests.sequences.loops.recorder import Recorder

RESTS_S = 0.8
"""Longer than the half second after which a training counts as resting."""
OF_SETTLED = ("diff", "updates", "logged")
"""Operations that take a state for what its update has left, where weights change late."""
OF_GRADIENTS = ("grads", "open_stream", "made_again", "together", "replay", "reader_killed")
"""Operations with gradients, which are gone once an optimizer has stepped in the backward."""
FEW_FRAMES = 8
"""Of our code that dynamo may go into: the hooks of the model, which return at once then."""
EACH = 12
"""Of so many iterations one does what the loop does now and then."""


class BadBatchError(Exception):
    """What a guard of the script raises."""


@dataclass(eq=False)
class Script:
    """What a script has at hand in its loop."""

    kind: str
    model: nn.Module
    """As it is called: perhaps wrapped."""
    net: nn.Module
    record: Recorder
    optimizers: list[torch.optim.Optimizer]
    attachment: Attachment = None  # type: ignore[assignment]
    number: int = 0
    """Of this iteration."""
    more: dict[str, Any] = field(default_factory=dict)
    """What a loop keeps from one iteration to the next."""

    def forward(self) -> torch.Tensor:
        """A loss, of a batch that nobody has seen before."""
        loss: torch.Tensor = self.model(int.from_bytes(os.urandom(3), "little"))
        return loss

    def train(self) -> None:
        """Forward and backward."""
        self.forward().backward()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.net.parameters() if p.requires_grad]

    def now_and_then(self, each: int = EACH) -> bool:
        return self.number % each == each - 1

    def shards(self) -> list[torch.Tensor]:
        """What an update changes: of FSDP2 the shards, also while it is gathered."""
        named = self.record.named.values()
        return [p._local_tensor if isinstance(p, DTensor) else p.data for p in named]


def usual(script: Script) -> None:
    """The textbook's."""
    script.train()
    with script.record.update():
        script.optimizer.step()
    script.optimizer.zero_grad()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def one_optimizer(script: Script) -> list[torch.optim.Optimizer]:
    return [sgd(script.parameters())]


def _halves(script: Script) -> list[torch.optim.Optimizer]:
    found = script.parameters()
    return [sgd(found[0::2]), sgd(found[1::2])]


def _each_its_own(script: Script) -> list[torch.optim.Optimizer]:
    """Stepped by hooks as soon as a gradient is there."""
    found = {p: sgd([p]) for p in script.parameters()}

    def step(value: nn.Parameter) -> None:
        found[value].step()
        value.grad = None

    for value in found:
        value.register_post_accumulate_grad_hook(step)
    return list(found.values())


def accumulated(script: Script) -> None:
    """Three backwards for one update; only the last one reduces gradients."""
    for micro in range(3):
        last = micro == 2
        with _without_reduction(script.model, last=last):
            script.train()
    with script.record.update():
        script.optimizer.step()
    script.optimizer.zero_grad()


def _without_reduction(model: Any, *, last: bool) -> AbstractContextManager[Any]:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return nullcontext()


def scaled(script: Script) -> None:
    """GradScaler; each fourth batch overflows, and its update is skipped."""
    scaler = script.more.setdefault(
        "scaler", torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**6)
    )
    loss = script.forward()
    overflows = script.number % 4 == 1
    scaler.scale(loss * float("inf") if overflows else loss).backward()
    if overflows:
        # The scale is halved with each.
        scaler.step(script.optimizer)
        scaler.update(4.0)
    else:
        with script.record.update():
            scaler.step(script.optimizer)
        scaler.update(4.0)
    script.optimizer.zero_grad()


def closure(script: Script) -> None:
    """Gradients are computed within the optimizer's step."""

    def evaluate() -> torch.Tensor:
        script.optimizer.zero_grad()
        loss = script.forward()
        loss.backward()
        return loss

    with script.record.update():
        script.optimizer.step(evaluate)  # type: ignore[arg-type]


def at_different_times(script: Script) -> None:
    """Two optimizers, the second of which steps each third time, with what has piled up."""
    script.train()
    for number, one in enumerate(script.optimizers):
        if number == 0 or script.number % 3 == 2:
            with script.record.update():
                one.step()
            one.zero_grad()


def taking_turns(script: Script) -> None:
    """As generator and discriminator do: a forward, backward and step each."""
    for one in script.optimizers:
        script.model.zero_grad()
        script.train()
        with script.record.update():
            one.step()


def in_backward(script: Script) -> None:
    """Each parameter is updated as soon as its gradient is there."""
    loss = script.forward()
    with script.record.update():
        loss.backward()


def retried(script: Script) -> None:
    """A guard in a step's pre-hook refuses a batch now and then; the next one is taken."""
    if script.number % 3 == 1:

        def guard(*_: Any) -> None:
            raise BadBatchError

        script.train()
        handle = script.optimizer.register_step_pre_hook(guard)
        with suppress(BadBatchError):
            script.optimizer.step()
        handle.remove()
        script.optimizer.zero_grad()
    usual(script)


def abandoned(script: Script) -> None:
    """Once a step raises in the middle, and its optimizer is given up; the other goes on."""
    if script.number == EACH and len(script.optimizers) == 2:
        script.train()
        broken = script.more["broken"] = script.optimizers.pop()
        # One that has a gradient, without which the step would pass it over.
        found = [p for p in broken.param_groups[0]["params"] if p.grad is not None]
        state = broken.state[found[len(found) // 2]]
        state["momentum_buffer"] = torch.zeros(3, 1, 1, 1)
        with suppress(RuntimeError):
            broken.step()
        # What is left of it is read on; state of that shape is refused.
        state.clear()
        script.model.zero_grad()
    script.train()
    for one in script.optimizers:
        with script.record.update():
            one.step()
    script.model.zero_grad()


def dummy(script: Script) -> None:
    """torch's own dummy step, before the first update and whenever state was dropped."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if script.number == 0:
        get_optimizer_state_dict(script.net, script.optimizer)
        script.record.check(script.attachment.step)
    usual(script)


def assigned(script: Script) -> None:
    """`load_state_dict(assign=True)`, after which the optimizer is told of new parameters."""
    if script.now_and_then():
        state = {name: value.clone() for name, value in script.net.state_dict().items()}
        old = dict(script.net.named_parameters())
        script.net.load_state_dict(state, assign=True)
        script.net.head.weight = script.net.embed.weight  # type: ignore[union-attr]
        now = {id(old[name]): value for name, value in script.net.named_parameters()}
        for one in script.optimizers:
            for group in one.param_groups:
                group["params"] = [now[id(p)] for p in group["params"]]
            for value in list(one.state):
                one.state[now[id(value)]] = one.state.pop(value)
        script.record.parameters_changed()
    usual(script)


def assigned_within_an_update(script: Script) -> None:
    """The same, and what steps is written by hand."""
    if script.now_and_then():
        state = {name: value.clone() for name, value in script.net.state_dict().items()}
        script.net.load_state_dict(state, assign=True)
        script.net.head.weight = script.net.embed.weight  # type: ignore[union-attr]
        script.record.parameters_changed()
    script.train()
    found = script.parameters()
    consumed = script.record.gradients(found)
    with (
        script.record.update(consumed=consumed), script.attachment.update(), torch.no_grad()
    ):  # fmt: skip
        for value in found:
            if value.grad is not None:
                value.sub_(value.grad, alpha=RATE)
    script.model.zero_grad()


def schedule_free(script: Script) -> None:
    """Other weights for evaluation, in place, that come back rounded."""
    usual(script)
    if script.now_and_then(4):
        means = script.more.setdefault("means", [p.clone() for p in script.shards()])
        with torch.no_grad():
            for value, mean in zip(script.shards(), means, strict=True):
                value.lerp_(mean, 0.25)
            script.record.variant()
            time.sleep(0.05)
            for value, mean in zip(script.shards(), means, strict=True):
                value.lerp_(mean, -1 / 3)
            script.record.variant()


def averaged(script: Script) -> None:
    """Averaged weights stand in for an evaluation, said so."""
    usual(script)
    found = script.shards()
    means = script.more.setdefault("means", [p.clone() for p in found])
    with torch.no_grad():
        for value, mean in zip(found, means, strict=True):
            mean.lerp_(value, 0.125)
        if script.now_and_then():
            own = [p.clone() for p in found]
            with script.attachment.swapped_weights("mean"):
                for value, mean in zip(found, means, strict=True):
                    value.copy_(mean)
                script.record.variant()
                time.sleep(0.1)
                for value, mine in zip(found, own, strict=True):
                    value.copy_(mine)


def late(script: Script) -> None:
    """Weights that have rested for long are changed after all."""
    usual(script)
    if script.now_and_then(8):
        time.sleep(RESTS_S)
        with torch.no_grad():
            for value in script.shards():
                value.mul_(0.5)
        script.record.variant()


def evaluated(script: Script) -> None:
    """After some updates an evaluation, which leaves FSDP2's root gathered, and a rest."""
    usual(script)
    if script.now_and_then(6):
        script.model.eval()
        with torch.no_grad():
            script.forward()
        script.model.train()
        time.sleep(RESTS_S)


def evaluated_each(script: Script) -> None:
    """As in PPO and GRPO: old log-probabilities before each update."""
    with torch.no_grad():
        script.forward()
    usual(script)
    with torch.no_grad():
        script.forward()


def marked(script: Script) -> None:
    """Evaluates after each update, and says where its iterations end."""
    usual(script)
    with torch.no_grad():
        script.forward()
    script.attachment.end_iteration()


def clamped(script: Script) -> None:
    """`p.data` is replaced after each update."""
    usual(script)
    with torch.no_grad():
        for value in script.net.parameters():
            value.data = value.data.clamp(-60, 60)
    script.record.variant()


def compiled(script: Script) -> None:
    """PyTorch's recipe: the optimizer's step is compiled."""
    from torch._dynamo.convert_frame import input_codes

    if "step" not in script.more:
        script.more["step"] = torch.compile(_step_of(script), backend="eager")
    script.train()
    with script.record.update(consumed=script.record.gradients(script.parameters())):
        script.more["step"]()
    script.optimizer.zero_grad()
    if script.number == EACH:
        seen = [found for code in list(input_codes.seen) if (found := code()) is not None]
        ours = [code.co_qualname for code in seen if "/paramd/" in code.co_filename]
        if len(ours) > FEW_FRAMES:
            script.record.wrong(f"dynamo has traced paramd's {', '.join(ours)}")


def frozen(script: Script) -> None:
    """Some parameters are frozen, and unfrozen again."""
    if script.now_and_then(6):
        up = script.number // 6 % 2 == 0
        for name, value in script.net.named_parameters():
            if name.startswith("blocks.") or name == "wide.weight":
                value.requires_grad_(not up)
    usual(script)


def staged(script: Script) -> None:
    """A pipeline's schedule."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    if "schedule" not in script.more:
        rank, size = dist.get_rank(), dist.get_world_size()
        stage = PipelineStage(script.model, rank, size, torch.device("cpu"))
        # Of products: the gradient of a sum alone is expanded, and torch receives none of that.
        script.more["schedule"] = ScheduleGPipe(
            stage, 2, loss_fn=lambda output, target: (output * target).sum(), scale_grads=False
        )
    schedule = script.more["schedule"]
    batch = torch.rand(4, 1)
    if dist.get_rank() == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch)
    with script.record.update():
        script.optimizer.step()
    script.optimizer.zero_grad()


def _step_of(script: Script) -> Callable[[], None]:
    def step() -> None:
        script.optimizer.step()

    return step


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One of them, and what it needs."""

    iteration: Callable[[Script], None]
    kinds: tuple[str, ...] = ("plain", "ddp", "fsdp2")
    resume: str = "auto"
    optimizers: Callable[[Script], list[torch.optim.Optimizer]] = one_optimizer
    settings: Mapping[str, str] = field(default_factory=dict)
    package: str = ""
    """What has to be installed."""
    without: tuple[str, ...] = ()
    """Operations that it cannot have."""
    rests: bool = True
    """Whether it can be told to rest between two iterations."""
    late_s: float = 0.0
    """How long the first helper needs to start."""


LOOPS: dict[str, Loop] = {
    "usual": Loop(iteration=usual, kinds=("plain", "ddp", "fsdp2", "device")),
    "accumulated": Loop(iteration=accumulated),
    "scaled": Loop(iteration=scaled, kinds=("plain", "ddp")),
    "closure": Loop(iteration=closure),
    "lightning": Loop(
        iteration=usual, kinds=("plain",), resume="never", package="lightning", rests=False
    ),
    "different-times": Loop(
        iteration=at_different_times, optimizers=_halves, resume="never",
        without=("hyperparameters",),
    ),
    "taking-turns": Loop(
        iteration=taking_turns, optimizers=_halves, resume="never", without=("hyperparameters",)
    ),
    "in-backward": Loop(
        iteration=in_backward, kinds=("plain", "fsdp2"), optimizers=_each_its_own, resume="never",
        without=("hyperparameters", *OF_GRADIENTS),
    ),
    "retried": Loop(iteration=retried),
    "abandoned": Loop(
        iteration=abandoned, optimizers=_halves, resume="never", without=("hyperparameters",)
    ),
    "dummy": Loop(iteration=dummy),
    "assigned": Loop(iteration=assigned, kinds=("plain",), resume="never"),
    "assigned-update": Loop(
        iteration=assigned_within_an_update, kinds=("plain",), resume="never",
        without=("hyperparameters",),
    ),
    # At rest its weights may have come back rounded, and are refused then.
    "schedule-free": Loop(
        iteration=schedule_free, resume="never", without=OF_SETTLED, rests=False
    ),
    "averaged": Loop(iteration=averaged),
    "late": Loop(iteration=late, without=OF_SETTLED),
    "evaluated": Loop(iteration=evaluated),
    "evaluated-each": Loop(iteration=evaluated_each),
    "marked": Loop(iteration=marked),
    # What is replaced after an update is back in the arena when training goes on: refused at rest.
    "clamped": Loop(iteration=clamped, kinds=("plain", "ddp"), rests=False),
    "compiled": Loop(iteration=compiled, kinds=("plain", "ddp")),
    "frozen": Loop(iteration=frozen, kinds=("plain",)),
    "stages": Loop(iteration=staged, kinds=("pipeline",), resume="never"),
    "late-helpers": Loop(iteration=usual, late_s=25.0),
}  # fmt: skip
"""By name."""
