"""A training whose evaluations leave FSDP's parameters gathered before each update's boundary.

Every forward that trains is compared with the same forward of the shards as they are then: what an
edit or a rollback wrote to the shards has reached it. Files in --folder: "rest" lets the script
rest after an evaluation, with its parameters in `rest.safetensors`, until "go"; "stop" ends it.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.func import functional_call

import paramd
from tests.gloo import all_see, use_one_thread
from tests.rank import run

WIDTH = 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.tanh(self.block(torch.tanh(self.inp(x)))))
        return found


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    if kind == "fsdp1":
        # The root's parameters stay gathered after any forward.
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    world_size = dist.get_world_size()
    shape, names = ((2, world_size // 2), ("replicas", "shards"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if kind == "hsdp" else None
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


def main(*, folder: Path, kind: str, ahead: bool) -> None:
    """`ahead`: begin the root's gather before each forward, as FSDP2's users do to overlap it."""
    use_one_thread()
    model = built(kind)
    shards = dict(model.named_parameters())
    rank = dist.get_rank()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        model.train()

    def full() -> dict[str, torch.Tensor]:
        return {name: p.detach().full_tensor() for name, p in shards.items()}  # type: ignore[attr-defined]

    plain = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    evaluate()
    attachment = paramd.attach(model, optimizer, job="gathered", resume="auto")
    print(f"attached {attachment.url}", flush=True)
    rested = False
    while not all_see(folder / "stop"):
        with attachment.rollback_scope():
            edits = attachment.edits
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(attachment.step))
            if ahead:
                model.unshard(async_op=True)  # type: ignore[operator]
            found = model(x)
            if kind != "fsdp1":
                assert torch.equal(found, functional_call(plain, full(), (x,))), attachment.step
            if attachment.edits > edits:
                used = "numbers" if found.any() else "zeros"
                print(f"edit {attachment.edits}: {used}", flush=True)
            optimizer.zero_grad()
            found.square().mean().backward()
            optimizer.step()
            evaluate()
            if all_see(folder / "rest") and not rested:
                rested = True
                if kind != "fsdp1":
                    now = full()
                    if rank == 0:
                        save_file(now, folder / "rest.safetensors")
                print(f"rests {attachment.step}", flush=True)
                while not all_see(folder / "go"):
                    time.sleep(0.01)
            time.sleep(0.01)
    attachment.detach()


if __name__ == "__main__":
    run(main)
