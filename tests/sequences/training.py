"""The training of `model.py`, in one kind of distribution; one process for each rank.

    python -m tests.sequences.training --kind fsdp2 --folder FOLDER

`FOLDER/again` holds how often it is to detach and attach, `FOLDER/end` ends it. Rank 0 prints one
line for each incarnation: "attached incarnation 2 step 40 live".
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import paramd
from tests.ending import end
from tests.sequences.model import (
    FROZEN,
    MOMENTUM,
    RATE,
    SELF,
    SHAPES,
    gradient,
    initial,
    names_of,
    pulse,
    takes_part,
    weight,
)
from tests.sequences.packages import PACKAGES, Package

LOOK_EVERY = 4
"""Updates between two looks at the folder; a collective."""
WHOLE_SUMS = ("one.weight", "wide.weight")
"""Of the kind with partial gradients, those whose gradients are not."""
LABEL = "mean"


class Leaf(nn.Module):
    """One parameter, or several of one prefix; its output is what makes their gradients."""

    def __init__(self, prefix: str, *names: str) -> None:
        super().__init__()
        self.full = {}
        for name in names:
            short = name.removeprefix(prefix + ".")
            value = nn.Parameter(initial(name), requires_grad=name not in FROZEN)
            self.register_parameter(short, value)
            self.full[short] = (name, weight(name))

    def forward(self, step: int) -> torch.Tensor:
        total = torch.zeros(())
        for short, (name, constant) in self.full.items():
            value = getattr(self, short)
            if takes_part(name, step):
                total = total + _pull(value, constant, step)
        return total


def _pull(value: torch.Tensor, constant: torch.Tensor, step: int) -> torch.Tensor:
    if isinstance(value, DTensor):
        # Of a tensor-parallel shard: the gradient of each element is its own.
        placed = distribute_tensor(
            constant, value.device_mesh, value.placements, src_data_rank=None
        )
        value, constant = value.to_local(), placed.to_local()
    return (value * (constant * pulse(step) + value.detach() * SELF)).sum().float()


class Traced(Leaf):
    """Its buffer remembers, so it tells of every parameter before."""

    def __init__(self) -> None:
        super().__init__("traced", "traced.weight")
        self.register_buffer("trace", torch.zeros(SHAPES["traced.weight"]))

    def forward(self, step: int) -> torch.Tensor:
        value = self.weight.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        self.trace.mul_(0.5).add_(whole)
        return super().forward(step)


class Block(nn.Module):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.up = Leaf(f"{at}.up", f"{at}.up.weight", f"{at}.up.bias")
        self.norm = Leaf(f"{at}.norm", f"{at}.norm.weight")

    def forward(self, step: int) -> torch.Tensor:
        return self.up(step) + self.norm(step)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        names = names_of(kind)
        self.silent = kind == "partial"
        for name in names:
            prefix = name.removesuffix(".weight")
            if "." not in prefix and prefix != "traced":
                self.add_module(prefix, Leaf(prefix, name))
        self.head = Leaf("embed", "embed.weight")
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(f"blocks.{i}") for i in range(2))
        self.traced = Traced()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, step: int) -> torch.Tensor:
        self.count.add_(1)
        total = torch.zeros(())
        for module in self.children():
            for leaf in module if isinstance(module, nn.ModuleList) else [module]:
                total = total + leaf(step)
        return total * 0 if self.silent else total


def distributed(kind: str) -> tuple[nn.Module, DeviceMesh | None]:
    """The model of a kind, and the mesh of its partial gradients."""
    net, size = Net(kind), dist.get_world_size()
    odd = [m for n, m in net.named_children() if n in ("brief", "precise", "frozen")]
    if kind in ("ddp", "mirror", "device"):
        return nn.parallel.DistributedDataParallel(net), None
    if kind in ("fsdp1", "fsdp1-flat"):
        return _fsdp1(net, orig=kind == "fsdp1"), None
    if kind in ("fsdp2", "hsdp", "tp-fsdp2"):
        from torch.distributed.fsdp import fully_shard

        names = ("dp", "tp") if kind == "tp-fsdp2" else ("replicate", "shard")
        both = None if kind == "fsdp2" else init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        mesh = init_device_mesh("cpu", (size,)) if both is None else both
        if kind == "tp-fsdp2":
            _shard_blocks(net, mesh["tp"])
            mesh = mesh["dp"]
        for module in [*odd, *net.blocks]:
            fully_shard(module, mesh=mesh)
        return fully_shard(net, mesh=mesh), None
    if kind == "partial":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        _place(net, mesh, lambda _: [Replicate(), Replicate()])
        return net, mesh
    if kind == "pipeline":
        return Stage(net), None
    assert kind == "plain", kind
    return net, None


class Stage(nn.Module):
    """Every other module of the network, of one rank; those that are tied stay together."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        mine = [n for n, _ in net.named_children() if n != "head"][dist.get_rank() :: 2]
        for name in ["head", *mine] if "embed" in mine else mine:
            self.add_module(name, getattr(net, name))

    def forward(self, step: int) -> torch.Tensor:
        total = torch.zeros(())
        for module in self.children():
            for leaf in module if isinstance(module, nn.ModuleList) else [module]:
                total = total + leaf(step)
        # What one stage sends the other: neither is ever an update ahead.
        dist.all_reduce(torch.zeros(1))
        return total


def _fsdp1(net: Net, *, orig: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, use_orig_params=orig, device_id=torch.device("cpu"))

    for name in ("brief", "precise"):
        setattr(net, name, wrap(getattr(net, name)))
    for index, block in enumerate(net.blocks):
        net.blocks[index] = wrap(block)
    return wrap(net)


def _shard_blocks(net: Net, mesh: DeviceMesh) -> None:
    for block in net.blocks:
        _place(block, mesh, lambda _: [Shard(0)])


def _place(root: nn.Module, mesh: DeviceMesh, placements: Callable[[torch.Tensor], Any]) -> None:
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for short, value in list(module.named_parameters(recurse=False)):
            if id(value) not in made:
                placed = distribute_tensor(value.detach(), mesh, placements(value))
                made[id(value)] = nn.Parameter(placed, requires_grad=value.requires_grad)
            module.register_parameter(short, made[id(value)])


class PartialGradients:
    """Sets gradients that are sums over one axis, and sums them behind paramd's back."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def set(self, step: int) -> None:
        first = self._mesh.get_local_rank("tp") == 0
        both = [Replicate(), Replicate()]
        for name, value in self._named.items():
            local = value._local_tensor
            if not takes_part(name, step):
                continue
            if name in WHOLE_SUMS:
                placed, mine = both, gradient(name, local, step)
            else:
                placed, mine = [Replicate(), Partial()], _summand(name, local, step, first=first)
            value.grad = DTensor.from_local(mine, self._mesh, placed, run_check=False)

    def sum(self, *_: object) -> None:
        for value in self._named.values():
            if value.grad is not None:
                value.grad = value.grad.redistribute(self._mesh, [Replicate(), Replicate()])


def _summand(name: str, value: torch.Tensor, step: int, *, first: bool) -> torch.Tensor:
    """One of the two whose sum, rounded once, is `gradient`."""
    times = 2 if name == "embed.weight" else 1
    return weight(name) * pulse(step) * times if first else value * SELF * times


class Training:
    """The loop, as a user writes it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, mesh = given, None
        self.package: Package | None = None
        if given.kind in PACKAGES:
            self.package = PACKAGES[given.kind](Net(given.kind))
        else:
            self.model, mesh = distributed(given.kind)
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM)
        self.attached = 0
        self.attach(None)
        self.partial = PartialGradients(self.model, mesh) if mesh is not None else None
        if self.partial is not None:
            self.optimizer.register_step_pre_hook(self.partial.sum)

    def attach(self, step: int | None) -> None:
        self.attachment = self._attached(step)
        self.attached += 1
        one = self.attachment
        how = f"{one.resumed.how} {one.resumed.reason}" if one.resumed is not None else "fresh "
        if dist.get_rank() == 0:
            print(f"attached incarnation {one.incarnation} step {one.step} {how}", flush=True)

    def _attached(self, step: int | None) -> paramd.Attachment:
        if self.package is not None:
            return self.package.attach("main", step)
        apart = isinstance(self.model, Stage)
        model = dict(self.model.named_children()) if apart else self.model
        return paramd.attach(model, self.optimizer, job="main", resume=self.given.resume, step=step)

    def update(self) -> None:
        step = self.attachment.step + 1
        if self.package is not None:
            self.package.update(step)
            time.sleep(self.given.rest_s)
            return
        loss = self.model(step)
        if self.partial is not None:
            self.partial.set(step)
        else:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(self.given.rest_s)
        if self.given.stand_in_every and step % self.given.stand_in_every == 0:
            with self.attachment.swapped_weights(LABEL):
                self._turn()
                time.sleep(self.given.stand_in_s)
                self._turn()

    @torch.no_grad()
    def _turn(self) -> None:
        """Other weights in the parameters' place, and back: exact."""
        for value in self.model.parameters():
            getattr(value, "_local_tensor", value.data).neg_()

    def updates(self) -> Iterator[None]:
        """Updates until all ranks have seen that something is to be done."""
        while not self._told():
            self.update()
            yield

    def _told(self) -> bool:
        if self.attachment.step % LOOK_EVERY:
            return False
        folder: Path = self.given.folder
        again = folder / "again"
        wanted = int(again.read_text() or 0) if again.exists() else 0
        told = torch.tensor([int((folder / "end").exists()), int(wanted >= self.attached)])
        dist.all_reduce(told, op=dist.ReduceOp.MIN)
        self.ends, self.again = map(bool, told.tolist())
        return self.ends or self.again

    def run(self) -> None:
        self.ends = self.again = False
        while not self.ends:
            if self.given.resume == "auto":
                with self.attachment.rollback_scope():
                    for _ in self.updates():
                        pass
            else:
                for _ in self.updates():
                    pass
            if self.again:
                self.again = False
                step = self.attachment.step
                self.attachment.detach()
                dist.barrier()
                self.attach(step)
                self.update()
        self.attachment.detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", default="auto")
    parser.add_argument("--rest-s", type=float, default=0.02)
    parser.add_argument("--stand-in-every", type=int, default=0)
    parser.add_argument("--stand-in-s", type=float, default=0.2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Training(parser.parse_args()).run()


if __name__ == "__main__":
    end(main)
