"""Prints how much memory a summon of 1 GiB takes above the shards; 2 ranks.

One line a set of flags: flags, bytes of this rank's shards, bytes taken at most.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import paramd

WIDTH = 4096
LAYERS = 16


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, shard_bytes = build(sys.argv[1])
    # What is imported and set up once is not the price of a summon.
    with paramd.summon_full_params(fully_shard(nn.Linear(4, 4), mesh=mesh()), rank0_only=True):
        pass
    for writeback in (False, True):
        flags = {"writeback": writeback, "rank0_only": True, "offload_to_cpu": True}
        before_bytes = memory_bytes("VmRSS", reset_peak=True)
        with paramd.summon_full_params(model, **flags) as params:
            for param in params.values():
                assert bool((param[0, :2] == 3).all())
        taken_bytes = memory_bytes("VmHWM") - before_bytes
        print(json.dumps([flags, shard_bytes, taken_bytes]), flush=True)
    dist.destroy_process_group()


def mesh() -> object:
    return init_device_mesh("cpu", (2,))


def build(kind: str) -> tuple[nn.Module, int]:
    net = nn.Sequential()
    for _ in range(LAYERS):
        layer = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False)
        layer.weight.requires_grad_(False).fill_(3)
        if kind == "fsdp1":
            layer = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
        else:
            fully_shard(layer, mesh=mesh())
        net.append(layer)
    model = FullyShardedDataParallel(net, device_id=torch.device("cpu")) if kind == "fsdp1" else net
    local_bytes = 4 * WIDTH * WIDTH * LAYERS // 2
    return model, local_bytes


def memory_bytes(field: str, *, reset_peak: bool = False) -> int:
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
