"""DTensors taken apart and put together again, in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

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


class Recorder:
    """A stream that notes when it is the current one."""

    def __init__(self) -> None:
        self.entered = 0
        self.left = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        self.left += 1


def test_there_and_back_is_the_same_tensor_in_the_same_memory(whole: DTensor) -> None:
    local, spec = flatten(whole)
    assert spec is not None
    back = unflatten(local, spec)
    assert isinstance(back, DTensor)
    assert back.placements == whole.placements
    assert back.device_mesh == whole.device_mesh
    assert (back.shape, back.stride(), back.dtype) == (whole.shape, whole.stride(), whole.dtype)
    assert torch.equal(back.full_tensor(), whole.full_tensor())
    assert back._local_tensor.data_ptr() == local.data_ptr() == whole._local_tensor.data_ptr()


def test_a_gradient_placed_otherwise_is_placed_like_the_tensor(mesh: DeviceMesh) -> None:
    whole = distribute_tensor(torch.ones(3, 4), mesh, [Replicate(), Shard(1)]).requires_grad_()
    local, spec = flatten(whole)
    assert spec is not None
    gradient = DTensor.from_local(torch.ones(3, 4), mesh, [Partial(), Shard(0)], run_check=False)
    unflatten(local, spec).backward(gradient)
    assert type(local.grad) is torch.Tensor
    assert torch.equal(local.grad, torch.ones(3, 4))


def test_a_promised_gradient_is_waited_for_in_backward(whole: DTensor, mesh: DeviceMesh) -> None:
    local, spec = flatten(whole)
    assert spec is not None
    stream = Recorder()
    promise = all_reduce(torch.ones(3, 4), "sum", mesh.get_group("tp"))
    gradient = DTensor(promise, spec, requires_grad=False)
    unflatten(local, spec, stream=stream).backward(gradient)
    assert type(local.grad) is torch.Tensor
    assert (stream.entered, stream.left) == (1, 1)


def test_what_is_no_local_tensor_is_refused(whole: DTensor) -> None:
    local, spec = flatten(whole)
    with pytest.raises(UsageError, match=r"expected \[3, 4\] on this rank"):
        unflatten(local[:2], spec)
    with pytest.raises(UsageError, match="got a DTensor"):
        unflatten(whole, spec)
