"""Ordinary trainings that change parameters in other places than `optimizer.step()`.

Each pattern trains a model under a job of its own, until a file says that enough was read. An
update of number s leaves `final(s)` in every element, whatever is there in between; so an
answer that mixes states, or is of another one than it says, shows at once.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paramd
from tests.gloo import all_see
from tests.rank import run

LAYERS, WIDTH = 6, 192
PAUSE_S = 0.001
"""Between two parameters of a loop, so that readers have a chance to see half of it."""
AWAY = 1000.0
"""Added to what must never be read under a step."""


class Stamp(torch.optim.Optimizer):
    """Fills each parameter with the number of the update, with pauses in between."""

    def __init__(self, parameters: Any, *, numbered: list[int] | None = None) -> None:
        super().__init__(list(parameters), {})
        self.numbered = numbered if numbered is not None else [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.numbered[0] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.fill_(self.numbered[0])
                time.sleep(PAUSE_S)


class Net(nn.Module):
    """A chain of layers; its output does not depend on their values but for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x * 1e-6))
        return x


class Renormed(Net):
    """Changes its parameters in forward, as `nn.Embedding(max_norm=...)` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(AWAY)
                time.sleep(PAUSE_S)
        return super().forward(x)


@dataclass
class Run:
    """One training: what a pattern may look at and replace."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    round: int = 0
    aside: dict[str, torch.Tensor] = field(default_factory=dict)

    def forward_backward(self) -> None:
        self.model(torch.ones(2, WIDTH)).sum().backward()
        time.sleep(4 * PAUSE_S)

    def plain(self) -> None:
        self.optimizer.zero_grad()
        self.forward_backward()
        self.optimizer.step()


@torch.no_grad()
def _add_half(parameters: Any) -> None:
    for parameter in parameters:
        parameter.add_(0.5)
        time.sleep(PAUSE_S)


def clamped(run: Run) -> None:
    run.plain()
    _add_half(run.model.parameters())


def data_replaced(run: Run) -> None:
    run.plain()
    for parameter in run.model.parameters():
        parameter.data = parameter.data + 0.5
        time.sleep(PAUSE_S)


def state_loaded(run: Run) -> None:
    run.plain()
    run.model.load_state_dict({k: v + 0.5 for k, v in run.model.state_dict().items()})


def hook_of_the_user(run: Run) -> None:
    if run.round == 0:
        run.optimizer.register_step_post_hook(lambda o, *_: _add_half(o.param_groups[0]["params"]))
    run.plain()


class _Wrapper:
    """Like Lookahead: no optimizer of torch's, and it goes on after the inner step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()
        _add_half(self.inner.param_groups[0]["params"])


def wrapped(run: Run) -> None:
    run.optimizer.zero_grad()
    run.forward_backward()
    _Wrapper(run.optimizer).step()


@contextmanager
def _swapped_in(run: Run) -> Iterator[None]:
    run.aside = {k: v.detach().clone() for k, v in run.model.named_parameters()}
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(AWAY)
            time.sleep(PAUSE_S)
    yield
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            parameter.copy_(run.aside[name])
            time.sleep(PAUSE_S)


def averaged_for_evaluation(run: Run) -> None:
    run.plain()
    with _swapped_in(run), torch.no_grad():
        run.model.eval()
        for _ in range(3 if run.round % 8 else 300):
            run.model(torch.ones(2, WIDTH))
            time.sleep(2 * PAUSE_S)
        run.model.train()


def sharpness_aware(run: Run) -> None:
    """SAM: the second forward and backward run on perturbed weights."""
    run.optimizer.zero_grad()
    run.forward_backward()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(AWAY)
            time.sleep(PAUSE_S)
    run.forward_backward()
    run.optimizer.step()


def parameter_replaced(run: Run) -> None:
    """The object is another one, and so is the optimizer that has it."""
    run.plain()
    for layer in run.model.layers:  # type: ignore[union-attr]
        layer.weight = nn.Parameter(layer.weight.detach() + 0.5)
        layer.bias = nn.Parameter(layer.bias.detach() + 0.5)
        time.sleep(PAUSE_S)
    run.optimizer = Stamp(run.model.parameters(), numbered=_numbers(run))


def module_replaced(run: Run) -> None:
    run.plain()
    layers: Any = run.model.layers
    for index, layer in enumerate(layers):
        with torch.no_grad():
            layers[index] = copy.deepcopy(layer)
            for parameter in layers[index].parameters():
                parameter.add_(0.5)
        time.sleep(PAUSE_S)
    run.optimizer = Stamp(run.model.parameters(), numbered=_numbers(run))


def optimizer_has_the_old(run: Run) -> None:
    """Replaced after the optimizer was made: what is trained is no longer used."""
    run.plain()
    if run.round == 3:
        for layer in run.model.layers:  # type: ignore[union-attr]
            layer.weight = nn.Parameter(torch.full_like(layer.weight, AWAY))
            layer.bias = nn.Parameter(torch.full_like(layer.bias, AWAY))


def renormed_in_forward(run: Run) -> None:
    run.plain()


def functional(run: Run) -> None:
    run.optimizer.zero_grad()
    state = {k: v.clone() for k, v in run.model.named_parameters()}
    torch.func.functional_call(run.model, state, (torch.ones(2, WIDTH),)).sum().backward()
    time.sleep(4 * PAUSE_S)
    run.optimizer.step()


def swapped(run: Run) -> None:
    run.plain()
    for layer in run.model.layers:  # type: ignore[union-attr]
        torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.detach() + 0.5))
        layer.bias.data.add_(0.5)
        time.sleep(PAUSE_S)


def in_eval_mode(run: Run) -> None:
    """Fine-tuned without `train()`, as models come from `from_pretrained`."""
    run.model.eval()
    clamped(run)


def made_bfloat16(run: Run) -> None:
    if run.round == 3:
        run.model.to(torch.bfloat16)
    if run.round >= 3:
        run.model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
        run.optimizer.step()
        return
    run.plain()


def parametrized(run: Run) -> None:
    run.plain()
    if run.round == 3:
        layers: Any = run.model.layers
        nn.utils.parametrizations.weight_norm(layers[0])


def declared(run: Run) -> None:
    """The explicit way: what belongs to the update stands in one window with it."""
    run.optimizer.zero_grad()
    run.forward_backward()
    with paramd.trainer.attaching.attachment.attached[id(run.model)].update():  # type: ignore[attr-defined]
        run.optimizer.step()
        _add_half(run.model.parameters())


def skipped_on_one_rank(run: Run) -> None:
    """One rank's update raises once, and the loop continues with the next. Each replica can be
    read, and is right for itself; what needs all ranks is refused.
    """
    if run.round == 5 and dist.get_rank() == 1:
        run.optimizer.zero_grad()
        run.forward_backward()
        return
    run.plain()


def _numbers(run: Run) -> list[int]:
    assert isinstance(run.optimizer, Stamp)
    return run.optimizer.numbered


PATTERNS: dict[str, Callable[[Run], None]] = {
    function.__name__: function
    for function in (
        clamped,
        data_replaced,
        state_loaded,
        hook_of_the_user,
        wrapped,
        averaged_for_evaluation,
        sharpness_aware,
        parameter_replaced,
        module_replaced,
        optimizer_has_the_old,
        renormed_in_forward,
        functional,
        swapped,
        in_eval_mode,
        made_bfloat16,
        parametrized,
        declared,
    )
}

OF_TWO_RANKS: dict[str, Callable[[Run], None]] = {"skipped_on_one_rank": skipped_on_one_rank}

HALVES = {
    "clamped", "data_replaced", "state_loaded", "hook_of_the_user", "wrapped", "parameter_replaced",
    "module_replaced", "swapped", "in_eval_mode", "declared",
}  # fmt: skip
"""Patterns that add a half after each update."""

REFUSED = {
    "functional": "functional_call.*attachment.update",
    "made_bfloat16": "bfloat16",
    "parametrized": "changed their layout",
}
"""Patterns that cannot be served after a while, and what their readers are told."""

EDITS_REFUSED = {
    "skipped_on_one_rank": (
        "rank [01].*not at the same step of training|not at the same step of training.*by rank [01]"
    )
}
"""Patterns that each replica can be read in, but not edited, which takes all ranks."""


def final(pattern: str, step: int) -> float:
    """What every element holds once update `step` is settled; anything goes for step 0."""
    if pattern == "optimizer_has_the_old" and step > 3:
        return AWAY
    return step + 0.5 * (pattern in HALVES)


def train(pattern: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = Renormed() if pattern == "renormed_in_forward" else Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(final(pattern, 0))
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    run = Run(model, Stamp(model.parameters()))
    attachment = paramd.attach(model, run.optimizer, job=pattern)
    (folder / f"attached-{pattern}").touch()
    while not all_see(folder / f"stop-{pattern}"):
        (PATTERNS | OF_TWO_RANKS)[pattern](run)
        run.round += 1
    attachment.detach()


def main(patterns: list[str], *, folder: Path) -> None:
    for pattern in patterns:
        train(pattern, folder)


if __name__ == "__main__":
    run(main, alone=True)
