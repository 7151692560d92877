"""DTensors taken apart and put together again, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from paramd.errors import UsageError
from paramd.trainer.model.flatten import flatten, unflatten, wait_for_gradient


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


def test_a_plain_tensor_comes_back_itself() -> None:
    tensor = torch.ones(2)
    assert flatten(tensor) == (tensor, None)
    assert unflatten(tensor, None) is tensor


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


@pytest.mark.parametrize("requires_grad", [False, True])
def test_frozen_stays_frozen(whole: DTensor, requires_grad: bool) -> None:
    whole.requires_grad_(requires_grad)
    local, spec = flatten(whole)
    assert local.requires_grad is requires_grad
    assert whole._local_tensor.requires_grad is False
    assert unflatten(local, spec).requires_grad is requires_grad


def test_gradients_come_to_the_local_tensor_plain(whole: DTensor) -> None:
    local, spec = flatten(whole)
    (unflatten(local, spec) * 3).sum().backward()
    assert type(local.grad) is torch.Tensor
    assert torch.equal(local.grad, torch.full((3, 4), 3.0))


def test_a_gradient_placed_otherwise_is_placed_like_the_tensor(mesh: DeviceMesh) -> None:
    whole = distribute_tensor(torch.ones(3, 4), mesh, [Replicate(), Shard(1)]).requires_grad_()
    local, spec = flatten(whole)
    assert spec is not None
    gradient = DTensor.from_local(torch.ones(3, 4), mesh, [Partial(), Shard(0)], run_check=False)
    unflatten(local, spec).backward(gradient)
    assert type(local.grad) is torch.Tensor
    assert torch.equal(local.grad, torch.ones(3, 4))


def test_unflattening_often_leaves_no_hooks(whole: DTensor) -> None:
    local, spec = flatten(whole)
    for _ in range(3):
        unflatten(local, spec)
    assert not local._backward_hooks


def test_the_hook_waits_for_asynchronous_collectives_on_its_stream(mesh: DeviceMesh) -> None:
    promise = all_reduce(torch.ones(2), "sum", mesh.get_group("tp"))
    assert isinstance(promise, AsyncCollectiveTensor)
    stream = Recorder()
    complete = wait_for_gradient(promise, stream=stream)
    assert type(complete) is torch.Tensor
    assert torch.equal(complete, torch.ones(2))
    assert (stream.entered, stream.left) == (1, 1)


def test_the_hook_leaves_complete_gradients_and_streams_alone() -> None:
    gradient, stream = torch.ones(2), Recorder()
    assert wait_for_gradient(gradient, stream=stream) is gradient
    assert stream.entered == 0
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(partial(wait_for_gradient, stream=stream))
    (leaf * 2).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2,), 2.0))


def test_a_promised_gradient_is_waited_for_in_backward(whole: DTensor, mesh: DeviceMesh) -> None:
    local, spec = flatten(whole)
    assert spec is not None
    stream = Recorder()
    promise = all_reduce(torch.ones(3, 4), "sum", mesh.get_group("tp"))
    gradient = DTensor(promise, spec, requires_grad=False)
    unflatten(local, spec, stream=stream).backward(gradient)
    assert type(local.grad) is torch.Tensor
    assert (stream.entered, stream.left) == (1, 1)


def test_another_dtype_is_the_dtype_of_the_whole(whole: DTensor) -> None:
    local, spec = flatten(whole)
    back = unflatten(local.detach().bfloat16(), spec)
    assert back.dtype is torch.bfloat16
    assert isinstance(back, DTensor)
    assert back._spec.tensor_meta is not None
    assert back._spec.tensor_meta.dtype is torch.bfloat16


def test_what_is_no_local_tensor_is_refused(whole: DTensor) -> None:
    local, spec = flatten(whole)
    with pytest.raises(UsageError, match=r"expected \[3, 4\] on this rank"):
        unflatten(local[:2], spec)
    with pytest.raises(UsageError, match="got a DTensor"):
        unflatten(whole, spec)
