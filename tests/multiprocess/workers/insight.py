"""Trains until told to end, and writes what its optimizer's state is at each step.

<folder>/moments-<rank>    one line a step: {"step", "lr", name: [sum of v, of v * v, numel], ...}
<folder>/flip-<rank>       order: {"name", "key", "element", "bit"}; key "" is the parameter
                           itself. Done within the next update, then renamed to flipped-<rank>
<folder>/end               training ends
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paramd
from tests.rank import run

JOB = "insight"
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
}


class Net(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.up = nn.Linear(19, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.up(x))
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(self.norm(x))


def built(kind: str, width: int, layers: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = Net(width, layers)
    if kind in ("fsdp2", "hsdp"):
        shape = (2, 2) if kind == "hsdp" else (dist.get_world_size(),)
        names = ("replica", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(net.up, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    return nn.parallel.DistributedDataParallel(net) if kind == "ddp" else net


def local_of(value: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(value, "_local_tensor", value).detach()
    return found


def told(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


@torch.no_grad()
def halve(parameters: Iterable[nn.Parameter], *, data: bool) -> None:
    """What a script may do to its weights; `data`: in a way that torch does not count."""
    for value in parameters:
        local = local_of(value)
        (local.data if data else local).mul_(0.5)


def main(
    folder: Path, *, kind: str = "ddp", optimizer: str = "adamw", resume: str = "auto",
    pause_s: float = 0.01, width: int = 31, layers: int = 0, batch: int = 16, quiet: bool = False,
) -> None:  # fmt: skip
    """With `quiet` it writes times, no moments."""
    rank = dist.get_rank()
    model = built(kind, width, layers)
    names = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    updating = OPTIMIZERS[optimizer](list(names.values()))

    def flip(*_: object) -> None:
        once, each = folder / f"flip-{rank}", folder / f"flip-each-{rank}"
        path = once if once.exists() else each
        try:
            order = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return
        param = names[order["name"]]
        tensor = param if not order["key"] else updating.state[param][order["key"]]
        words = local_of(tensor).view(-1).view(torch.int32)
        words[order["element"]] ^= 1 << order["bit"]
        once.unlink(missing_ok=True)
        (folder / f"flipped-{rank}").write_text(str(attachment.step + 1))

    updating.register_step_post_hook(flip)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(updating, 0.9999)
    attachment = paramd.attach(
        model, updating, job=JOB, resume=resume, extra_state={"scheduler": scheduler}
    )
    data_rank = rank if kind != "plain" else 0
    over = torch.zeros(1)
    with (folder / f"moments-{rank}").open("a", buffering=1) as lines:
        while not over.item():
            generator = torch.Generator().manual_seed(1000 * attachment.step + data_rank)
            x = torch.randn(batch, 19, generator=generator)
            updating.zero_grad()
            lr = updating.param_groups[0]["lr"]
            nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
            if told(folder / "late-lr"):
                # As many scripts do: after the forward, from the number of the step.
                updating.param_groups[0]["lr"] = lr * 0.5
            updating.step()
            updating.param_groups[0]["lr"] = lr
            if changed := told(folder / "changes"):
                halve(names.values(), data="data" in changed)
            scheduler.step()
            line: dict[str, Any] = {"step": attachment.step, "time_s": time.time(), "lr": lr}
            for name, param in names.items():
                state = updating.state[param]
                if "exp_avg_sq" in state and not quiet:
                    v = local_of(state["exp_avg_sq"]).double()
                    line[name] = [float(v.sum()), float(v.square().sum()), v.numel()]
            lines.write(json.dumps(line) + "\n")
            over.fill_((folder / "end").exists())
            dist.all_reduce(over)
            time.sleep(pause_s)
    attachment.detach()


if __name__ == "__main__":
    run(main)
