"""The parameters of the training, and the arithmetic of an update.

Every factor is a power of two, so products are exact and each sum rounds once: whatever shards,
vectorizes or reduces a tensor computes the same bits. The gradient of update k is

    weight(name) * pulse(k) + parameter / 128

so parameters, gradients and momentum tell of every update and edit before them, and a step that
is made again after a rollback and an edit has other values than the first time.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace

import torch

RATE, MOMENTUM, SELF = 2.0**-6, 0.5, 2.0**-7

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (37, 8), "wide.weight": (64, 96), "blocks.0.up.weight": (13, 8),
    "blocks.0.up.bias": (13,), "blocks.0.norm.weight": (8,), "blocks.1.up.weight": (13, 8),
    "blocks.1.up.bias": (13,), "blocks.1.norm.weight": (8,), "one.weight": (1,),
    "row.weight": (1, 5), "frozen.weight": (7, 5), "brief.weight": (9, 5), "precise.weight": (6, 7),
    "dot.weight": (), "rare.weight": (5, 3), "traced.weight": (4, 3),
}  # fmt: skip
TIED = {"head.weight": "embed.weight"}
TRACE, COUNT = "traced.trace", "count"
FROZEN = frozenset({"frozen.weight"})
DTYPES = {"brief.weight": torch.bfloat16, "precise.weight": torch.float64}
RARELY = 4
"""Of how many updates one has a gradient for `rare.weight`."""

WORLD_SIZES = {
    "plain": 1, "ddp": 2, "fsdp1": 2, "fsdp1-flat": 2, "fsdp2": 2, "hsdp": 4, "tp-fsdp2": 4,
    "partial": 4, "mirror": 2, "device": 2, "pipeline": 2, "deepspeed": 2, "megatron": 2,
}  # fmt: skip
PARTITIONED = ("deepspeed", "megatron")
"""Kinds of packages, of the group `integrations`, that not everybody has."""
KINDS = tuple(kind for kind in WORLD_SIZES if kind not in PARTITIONED)
UNSHARDED = frozenset({"plain", "ddp", "mirror", "device", "partial", "pipeline", *PARTITIONED})


def names_of(kind: str) -> list[str]:
    """The parameters that a training of this kind has, without tied names."""
    left = set()
    if kind not in UNSHARDED or kind == "deepspeed":
        left.add("dot.weight")  # FSDP and DeepSpeed take nothing without a dim
    if kind not in ("plain", "partial", "pipeline"):
        left.add("rare.weight")  # DDP and FSDP reduce what all ranks have
    if kind == "fsdp1-flat":
        left |= FROZEN  # a flat parameter is frozen as a whole
    if kind in PARTITIONED:
        left |= set(DTYPES)  # partitions have one dtype
    return [name for name in SHAPES if name not in left]


def initial(name: str) -> torch.Tensor:
    """What a parameter begins with."""
    return (_drawn(name, "begin", 64) / 8).to(DTYPES.get(name, torch.float32))


def weight(name: str) -> torch.Tensor:
    """The part of its gradient that is the same in each update, up to `pulse`."""
    return _drawn(name, "weight", 8).to(DTYPES.get(name, torch.float32))


def pulse(step: int) -> float:
    """A factor that differs between any two updates that follow each other."""
    return float(step * 5 % 11 - 5)


def takes_part(name: str, step: int) -> bool:
    """Whether update `step` has a gradient for a parameter."""
    return name not in FROZEN and (name != "rare.weight" or step % RARELY == 0)


def gradient(name: str, value: torch.Tensor, step: int) -> torch.Tensor:
    """Of update `step`, for what the parameter was before it. A tied one is used twice."""
    found = weight_of(name) * pulse(step) + value * SELF
    return found + found if name in TIED.values() else found


@dataclass(frozen=True)
class State:
    """A training between two updates. Never changed: what follows is another one."""

    parameters: dict[str, torch.Tensor]
    momentum: dict[str, torch.Tensor]
    """Of those that had a gradient before."""
    trace: torch.Tensor
    count: int = 0
    rates: dict[str, float] = field(default_factory=lambda: {"lr": RATE, "momentum": MOMENTUM})

    def updated(self, step: int) -> State:
        """After update `step`, with the operations that torch.optim.SGD makes."""
        parameters, momentum = dict(self.parameters), dict(self.momentum)
        for name, value in self.parameters.items():
            if not takes_part(name, step):
                continue
            grad = gradient(name, value, step)
            before = momentum.get(name)
            momentum[name] = (
                grad if before is None else before.mul(self.rates["momentum"]).add_(grad)
            )
            parameters[name] = value.add(momentum[name], alpha=-self.rates["lr"])
        trace = self.trace * 0.5 + self.parameters["traced.weight"]
        return replace(
            self, parameters=parameters, momentum=momentum, trace=trace, count=self.count + 1
        )


def beginning(kind: str) -> State:
    """Before the first update."""
    names = names_of(kind)
    return State({name: initial(name) for name in names}, {}, torch.zeros(SHAPES["traced.weight"]))


_WEIGHTS: dict[str, torch.Tensor] = {}


def weight_of(name: str) -> torch.Tensor:
    """As `weight`, made once."""
    return _WEIGHTS.setdefault(name, weight(name))


def _drawn(name: str, what: str, most: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{what} {name}".encode()))
    return torch.randint(-most, most + 1, SHAPES[name], generator=generator).float()
