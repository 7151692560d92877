"""FSDP1 whose parameters get new memory after each update, beside the same training alone.

Ends with 1 if a parameter differs by a bit, or if the process was searched for users of memory
though nobody else has it, or not searched though somebody has.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import paramd
from paramd.trainer.home import moving
from tests.rank import run

UPDATES, WIDTH = 7, 24


class Pair:
    """A model that is attached, and one of the same weights that is not."""

    def __init__(self, net: nn.Module, other: nn.Module, *, original: bool) -> None:
        other.load_state_dict(net.state_dict())
        self.models = [
            FullyShardedDataParallel(
                one,
                use_orig_params=original,
                device_id=torch.device("cpu"),
            )
            for one in (net, other)
        ]
        self.optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in self.models]

    def update(self, number: int) -> None:
        """Raises AssertionError if their parameters differ by a bit then."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            generator = torch.Generator().manual_seed(number)
            model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data = parameter.data.clamp(-0.2, 0.2)
        ours, theirs = (one.parameters() for one in self.models)
        assert all(map(torch.equal, ours, theirs)), number


def original_parameters() -> None:
    nets = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3, bias=False))
        for _ in range(2)
    ]
    pair = Pair(*nets, original=True)
    attachment = paramd.attach(pair.models[0], pair.optimizers[0], job="new-memory", resume="auto")
    searches, search = [], moving.live_tensors

    def counted(device_type: str = "cpu") -> Iterator[torch.Tensor]:
        searches.append(device_type)
        return search(device_type)

    moving.live_tensors = counted
    kept: list[torch.Tensor] = []
    for number in range(UPDATES):
        pair.update(number)
        if number == UPDATES - 2:
            assert not searches, "the process is searched"
            # Somebody else has the new memory now: only a search finds out who.
            kept += (parameter.data for parameter in pair.models[0].parameters())
    assert searches, kept
    moving.live_tensors = search
    # All but the last update had a boundary, which brought its parameters back.
    count, cost = attachment.stalls().count, attachment.resume_cost()
    assert count >= UPDATES - 1, count
    assert cost is not None
    assert cost.count >= UPDATES - 1, cost
    attachment.detach()


def flat_parameter() -> None:
    """FSDP drops its new memory after the next forward, so it must not be copied anywhere."""
    nets = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
    pair = Pair(*nets, original=False)
    attachment = paramd.attach(pair.models[0], pair.optimizers[0], job="new-memory")
    for number in range(UPDATES):
        pair.update(number)
    attachment.detach()


def main() -> None:
    torch.manual_seed(0)
    original_parameters()
    flat_parameter()


if __name__ == "__main__":
    run(main)
