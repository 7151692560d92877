"""A real training for the browser: two ranks, FSDP2, names like attacks, and NaN when told.

Files beside `--stop` tell it, each for as long as it is there: `nan` puts NaN into the first
element of `--nan-name`, `slow` has rank 1 sleep in each step, and `fail` has it raise.
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import paramd
from tests.rank import run
from tests.web.door import JOB

HOSTILE = ("<img src=x onerror=alert(1)>", "\u202egnihtemos", "x" * 300, "a b&c=d#e?f%00")
"""Names of parameters, which may be any text without a dot."""


class Model(nn.Module):
    """A few layers that learn, and one that stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.still = nn.Linear(48, 40)
        self.odd = nn.Module()
        for name in HOSTILE:
            self.odd.register_parameter(name, nn.Parameter(torch.ones(6, 4)))
        with torch.no_grad():
            self.still.weight.copy_(torch.arange(40 * 48).view(40, 48) / 1000)
        self.still.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 32) to the same."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def main(*, stop: Path, nan_name: str = "layers.1.weight", job: str = JOB) -> None:
    """Ends when the file `stop` exists."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Model()
    fully_shard(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1e-4)
    attachment = paramd.attach(model, optimizer, job=job, resume="auto")
    print("attached", flush=True)

    def train() -> None:
        optimizer.zero_grad()
        if dist.get_rank() == 1 and stop.with_name("slow").exists():
            time.sleep(0.3)
        if dist.get_rank() == 1 and stop.with_name("fail").exists():
            raise RuntimeError("a failure that a test has planted")
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        attachment.log(loss=loss)
        if _all(stop.with_name("nan")):
            with attachment.update():
                _put_nan(model, nan_name)
        time.sleep(0.02)

    over = False
    while not over:
        with attachment.rollback_scope():
            while not (over := _all(stop)):
                train()
    attachment.detach()


def _put_nan(model: nn.Module, name: str) -> None:
    local = dict(model.named_parameters())[name]._local_tensor
    if dist.get_rank() == 0:
        local.view(-1)[0] = float("nan")


def _all(path: Path) -> bool:
    wanted = torch.tensor([int(path.exists())])
    dist.all_reduce(wanted, op=dist.ReduceOp.MIN)
    return bool(wanted.item())


if __name__ == "__main__":
    run(main)
