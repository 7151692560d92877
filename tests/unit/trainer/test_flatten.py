"""DTensors taken apart and put together again, in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from paramd.errors import UsageError
from paramd.trainer.model.flatten import flatten, unflatten


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.fixture
def whole(mesh: DeviceMesh) -> DTensor:
    values = torch.arange(12.0).view(3, 4)
    return distribute_tensor(values, mesh, [Shard(0), Shard(1)]).requires_grad_()


def test_what_is_no_local_tensor_is_refused(whole: DTensor) -> None:
    local, spec = flatten(whole)
    with pytest.raises(UsageError, match=r"expected \[3, 4\] on this rank"):
        unflatten(local[:2], spec)
    with pytest.raises(UsageError, match="got a DTensor"):
        unflatten(whole, spec)
