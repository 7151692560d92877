"""A rank of a training on several hosts, started by torchrun; ends when the file STOP exists.

torchrun --nnodes 2 ... tests/integration/far_trainer.py STOP
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import paramd

NUMEL = 1 << 21


def main(stop: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, NUMEL // 64, bias=False))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    begun_s = time.monotonic()
    attachment = paramd.attach(model, optimizer, job="far")
    took_s = time.monotonic() - begun_s
    if dist.get_rank() == 0:
        print("attached", json.dumps({"url": attachment.url, "took_s": took_s}), flush=True)
    with torch.no_grad():
        parameter = model[0].weight.to_local()
        with attachment.update():
            parameter.fill_(float(dist.get_rank() + 1))
    flag = torch.zeros(1)
    while not flag.item():
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        flag[0] = float(stop.exists())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        time.sleep(0.01)
    attachment.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
