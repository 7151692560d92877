"""Trains with paramd attached, and damages its own parameters when told to.

Files beside `--stop` tell it, each one once:

    flip-<rank>     JSON {"fqn", "element", "bit"}: the rank flips one bit of its local shard
    nan             JSON {"fqn"}: all ranks put NaN into the first element of their shard
    mend            JSON {"fqn"}: all ranks put 0 there

A file that has been followed is renamed to <name>.done-<rank>.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paramd
from tests.ending import end
from tests.multiprocess import kinds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--stop", type=Path, required=True, help="ends when this file exists")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    built = kinds.named(arguments.kind).build()
    trainable = [p for p in built.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.01)
    attachment = paramd.attach(built.model, optimizer, job="corrupt")
    print("attached", flush=True)
    damage = Damage(built.model, arguments.stop.parent)
    step = 0
    while not _all(arguments.stop):
        optimizer.zero_grad()
        built.loss(step).backward()
        optimizer.step()
        damage.when_told()
        time.sleep(0.01)
        step += 1
    attachment.detach()
    dist.destroy_process_group()


class Damage:
    """Follows the files of its rank."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._rank = int(os.environ["RANK"])

    def when_told(self) -> None:
        self._follow(f"flip-{self._rank}", self._flip)
        self._follow("nan", lambda told: self._put(told, float("nan")))
        self._follow("mend", lambda told: self._put(told, 0.0))

    def _follow(self, name: str, do: object) -> None:
        path = self._folder / name
        done = self._folder / f"{name}.done-{self._rank}"
        if path.exists() and not done.exists():
            assert callable(do)
            with torch.no_grad():
                do(json.loads(path.read_text()))
            done.write_text(str(time.time()))

    def _local(self, fqn: str) -> torch.Tensor:
        ddp = isinstance(self._model, nn.parallel.DistributedDataParallel)
        model = self._model.module if ddp else self._model
        for name, parameter in model.named_parameters():
            if name.replace("_checkpoint_wrapped_module.", "") == fqn:
                return getattr(parameter, "_local_tensor", parameter.data)
        raise LookupError(fqn)

    def _flip(self, told: dict[str, object]) -> None:
        words = self._local(str(told["fqn"])).view(torch.int32).reshape(-1)
        assert isinstance(told["element"], int)
        assert isinstance(told["bit"], int)
        words[told["element"]] ^= 1 << told["bit"]

    def _put(self, told: dict[str, object], value: float) -> None:
        local = self._local(str(told["fqn"])).reshape(-1)
        if local.numel():
            local[0] = value


def _all(path: Path) -> bool:
    wanted = torch.tensor([int(path.exists())])
    dist.all_reduce(wanted, op=dist.ReduceOp.MIN)
    return bool(wanted.item())


if __name__ == "__main__":
    end(main)
