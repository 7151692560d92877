"""Trains until told to end, and writes what its optimizer's state is at each step.

<folder>/moments-<rank>    one line a step: {"step", "lr", name: [sum of v, of v * v, numel], ...}
<folder>/flip-<rank>       order: {"name", "key", "element", "bit"}; key "" is the parameter
                           itself. Done within the next update, then renamed to flipped-<rank>
<folder>/end               training ends
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paramd
from tests.ending import end

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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", default="ddp")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--resume", default="auto")
    parser.add_argument("--pause-s", type=float, default=0.01)
    parser.add_argument("--width", type=int, default=31)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--quiet", action="store_true", help="write times, no moments")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = built(args.kind, args.width, args.layers)
    names = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    optimizer = OPTIMIZERS[args.optimizer](list(names.values()))

    def flip(*_: object) -> None:
        once, each = args.folder / f"flip-{rank}", args.folder / f"flip-each-{rank}"
        path = once if once.exists() else each
        try:
            order = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return
        param = names[order["name"]]
        tensor = param if not order["key"] else optimizer.state[param][order["key"]]
        words = local_of(tensor).view(-1).view(torch.int32)
        words[order["element"]] ^= 1 << order["bit"]
        once.unlink(missing_ok=True)
        (args.folder / f"flipped-{rank}").write_text(str(attachment.step + 1))

    optimizer.register_step_post_hook(flip)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
    attachment = paramd.attach(
        model, optimizer, job=JOB, resume=args.resume, extra_state={"scheduler": scheduler}
    )
    data_rank = rank if args.kind != "plain" else 0
    over = torch.zeros(1)
    with (args.folder / f"moments-{rank}").open("a", buffering=1) as lines:
        while not over.item():
            generator = torch.Generator().manual_seed(1000 * attachment.step + data_rank)
            x = torch.randn(args.batch, 19, generator=generator)
            optimizer.zero_grad()
            lr = optimizer.param_groups[0]["lr"]
            nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
            optimizer.step()
            scheduler.step()
            line: dict[str, Any] = {"step": attachment.step, "time_s": time.time(), "lr": lr}
            for name, param in names.items():
                state = optimizer.state[param]
                if "exp_avg_sq" in state and not args.quiet:
                    v = local_of(state["exp_avg_sq"]).double()
                    line[name] = [float(v.sum()), float(v.square().sum()), v.numel()]
            lines.write(json.dumps(line) + "\n")
            over.fill_((args.folder / "end").exists())
            dist.all_reduce(over)
            time.sleep(args.pause_s)
    attachment.detach()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    end(main)
