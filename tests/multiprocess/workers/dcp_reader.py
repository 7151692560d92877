"""Reads an export with torch.distributed.checkpoint into shards of its world; compares them."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from tests.multiprocess.truth import assert_same_bytes, read_truth
from tests.rank import run


def main(*, checkpoint: Path, truth: Path) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world_size,))
    _, wholes = read_truth(truth)
    state = {
        # What has no dim to be cut along is whole on every rank.
        name: zeros(whole.shape, dtype=whole.dtype, device_mesh=mesh, placements=[Shard(0)])
        if whole.dim()
        else torch.zeros_like(whole)
        for name, whole in wholes.items()
    }
    dcp.load({"model": state}, checkpoint_id=str(checkpoint))
    found, wanted = {}, {}
    for name, whole in wholes.items():
        read = state[name]
        found[name] = read.to_local() if isinstance(read, DTensor) else read
        parts = [*whole.chunk(world_size)] if whole.dim() else [whole] * world_size
        wanted[name] = parts[rank] if rank < len(parts) else whole[:0]
    assert_same_bytes(found, wanted)
    elements = sum(one.numel() for one in found.values())
    print(f"equal in {len(found)} tensors, {elements} elements", flush=True)


if __name__ == "__main__":
    run(main)
