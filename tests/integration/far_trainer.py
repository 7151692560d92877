"""A rank of a training on several hosts, started by torchrun; ends when the file STOP exists.

torchrun --nnodes 2 ... tests/integration/far_trainer.py STOP [PROGRESS [NUMEL]]

Rank r's half holds r + 1; with a file for its progress, 2 s + r at step s, which it writes there.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import paramd

NUMEL = 1 << 21


def main(stop: Path, progress: Path | None = None, numel: int = NUMEL) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, numel // 64, bias=False))
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
        if progress is None:
            optimizer.step()
        else:
            with attachment.update(), torch.no_grad():
                # This update makes the next step.
                parameter.fill_(float(2 * (attachment.step + 1) + dist.get_rank()))
        optimizer.zero_grad()
        if progress is not None and dist.get_rank() == 0:
            written(progress, str(attachment.step))
        flag[0] = float(stop.exists())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        time.sleep(0.04)
    attachment.detach()
    dist.destroy_process_group()


def written(path: Path, text: str) -> None:
    """Replace a file at once."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(Path, sys.argv[2:3]), *map(int, sys.argv[3:4]))
