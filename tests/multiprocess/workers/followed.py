"""A bfloat16 model that really trains, and writes what each of its updates left.

Rank 0 appends a line of JSON for every update to `<folder>/truth`: the step, and the SHA-256 of
each full parameter as torch gathers it. `<folder>/seen` holds the number of an update and seconds:
before the next update the ranks wait until the last one has been seen, but no longer than that.
They train until `<folder>/stop` exists.
"""

import hashlib
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import paramd
from tests.gloo import all_see
from tests.rank import run

JOB = "followed"


def main(*, folder: Path) -> None:
    torch.manual_seed(0)
    # Odd sizes: the ranks hold different numbers of rows.
    model = nn.Sequential(nn.Embedding(301, 48), nn.Linear(48, 97), nn.GELU(), nn.Linear(97, 301))
    model.to(torch.bfloat16)
    for part in (model[0], model[1], model[3], model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    attachment = paramd.attach(model, optimizer, job=JOB)
    print("attached", flush=True)
    batches = torch.Generator().manual_seed(dist.get_rank())
    while not all_see(folder / "stop"):
        tokens = torch.randint(0, 301, (8, 16), generator=batches)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        seen, made = attachment.step, attachment.step + 1
        _wait_until_seen(folder, seen)
        optimizer.step()
        _write(folder, model, made)
    attachment.detach()


def sha256_of(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, row-major."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()


def _write(folder: Path, model: nn.Module, step: int) -> None:
    digests = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        digests[name] = sha256_of(param.full_tensor())
    if dist.get_rank() == 0:
        with (folder / "truth").open("a") as file:
            file.write(json.dumps({"step": step, "digests": digests}) + "\n")


def _wait_until_seen(folder: Path, step: int) -> None:
    began_s = time.monotonic()
    while (folder / "seen").exists() and not (folder / "stop").exists():
        seen, patience_s = (folder / "seen").read_text().split()
        if int(seen) >= step or time.monotonic() > began_s + float(patience_s):
            return
        time.sleep(0.005)


if __name__ == "__main__":
    run(main)
