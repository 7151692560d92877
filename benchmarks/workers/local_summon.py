"""One rank of a sharded model whose parameters are summoned inside, by PyTorch or by paramd."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import paramd
from benchmarks.ranks import obey
from tests.ending import end


class Rank:
    """What the rank has been told to build."""

    def __init__(self) -> None:
        self._model: nn.Module = nn.Module()

    def build(self, kind: str, width: int, layers: int) -> int:
        """Layers of `width` x `width` float32; returns the bytes of this rank's shards.

        Args:
            kind: "nested" FSDP1, one module a layer; "flat" FSDP1, one for all; or "fsdp2".
        """
        torch.manual_seed(0)
        # What is imported and set up once is not the price of a summon.
        with paramd.summon_full_params(fully_shard(nn.Linear(4, 4)), rank0_only=True):
            pass
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        device = torch.device("cpu")
        if kind == "fsdp2":
            for layer in net:
                fully_shard(layer)
            self._model = fully_shard(net)
            locals = [param.to_local() for param in self._model.parameters()]
            return sum(local.numel() * local.itemsize for local in locals)
        if kind == "nested":
            net = nn.Sequential(*(FullyShardedDataParallel(x, device_id=device) for x in net))
        self._model = FullyShardedDataParallel(net, device_id=device)
        return sum(param.numel() * param.itemsize for param in self._model.parameters())

    def summon(self, by: str, flags: dict[str, bool], edit: bool) -> dict[str, float]:
        """Enters and leaves once; returns seconds, and bytes of memory at most taken for it."""
        call: Any = paramd.summon_full_params
        if by == "torch":
            call = FullyShardedDataParallel.summon_full_params
        dist.barrier()
        before_bytes = _memory_bytes("VmRSS", reset_peak=True)
        begin_s = time.perf_counter()
        with call(self._model, **flags):
            entered_s = time.perf_counter()
            if edit:
                with torch.no_grad():
                    next(self._model.parameters()).view(-1)[0].add_(1)
            leave_s = time.perf_counter()
        end_s = time.perf_counter()
        taken_bytes = _memory_bytes("VmHWM") - before_bytes
        dist.barrier()
        return {
            "seconds": entered_s - begin_s + end_s - leave_s,
            "enter_s": entered_s - begin_s,
            "leave_s": end_s - leave_s,
            "taken_bytes": taken_bytes,
        }


def _memory_bytes(field: str, *, reset_peak: bool = False) -> int:
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    rank = Rank()
    obey({"build": rank.build, "summon": rank.summon})
    dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
