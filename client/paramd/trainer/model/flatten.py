"""DTensors as local tensors with a spec, and back, with gradients that arrive complete.

    local, spec = flatten(dtensor)          # the same memory
    dtensor = unflatten(local, spec)        # the same memory; gradients flow to `local`

For code that handles only plain tensors (bucketing, flattening, DDP) but must compute with
DTensors. Unlike torch's `_flatten_tensor` and `_unflatten_tensor`, a frozen tensor stays frozen,
and repeated unflattening does not pile up hooks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from paramd.errors import UsageError
from paramd.trainer.model.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

Stream = AbstractContextManager[Any]
"""A `torch.Stream` of any device; entering it makes it the current one."""


def flatten(tensor: torch.Tensor) -> tuple[torch.Tensor, DTensorSpec | None]:
    """The local tensor of a DTensor, and the spec that turns it back; a plain tensor, and None.

    No copy and no communication; detached from the autograd graph. The local tensor is complete
    (asynchronous collectives waited for) and requires a gradient exactly if `tensor` does.
    """
    if not is_dtensor(tensor):
        return tensor, None
    distributed: Any = tensor
    local = wait_for_gradient(distributed._local_tensor).detach()
    return local.requires_grad_(tensor.requires_grad), distributed._spec


def unflatten(
    tensor: torch.Tensor, spec: DTensorSpec | None, *, stream: Stream | None = None
) -> torch.Tensor:
    """The inverse of `flatten`: a DTensor over `tensor`, this rank's, of the spec's local shape.

    Differentiable: the gradient reaches `tensor` as a plain tensor with the placements of `tensor`,
    once its asynchronous collectives are done; `stream` is where to wait for it, None the current
    one. Without `spec`, which is from `flatten`, returns `tensor` itself.

    Raises:
        UsageError: If `tensor` is already a DTensor, or does not have the local shape.
    """
    if spec is None:
        return tensor
    if is_dtensor(tensor):
        raise UsageError(
            "unflatten expects the local tensor of a DTensor, got a DTensor; pass what flatten "
            "returned"
        )
    whole: torch.Tensor = AsDTensor.apply(tensor, matching(spec, tensor), stream)  # type: ignore[no-untyped-call]
    return whole


def matching(spec: DTensorSpec, local: torch.Tensor) -> DTensorSpec:
    """The spec for a local tensor, perhaps of another dtype; UsageError: not this rank's shape."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, _ = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    if tuple(local.shape) != tuple(shape):
        raise UsageError(
            f"a tensor of shape {list(local.shape)} is no shard of {list(spec.shape)} with "
            f"placements {spec.placements}; expected {list(shape)} on this rank"
        )
    assert spec.tensor_meta is not None
    if spec.tensor_meta.dtype == local.dtype:
        return spec
    meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)


def wait_for_gradient(gradient: torch.Tensor, *, stream: Stream | None = None) -> torch.Tensor:
    """The gradient, once the asynchronous collective producing it is done.

    For `tensor.register_hook(partial(wait_for_gradient, stream=...))`, so that the next consumer
    (DDP's buckets, an optimizer) gets values, not a pending collective. Waits on `stream`; None is
    the current one. Tensors other than an `AsyncCollectiveTensor` need no wait.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if not isinstance(gradient, AsyncCollectiveTensor):
        return gradient
    with stream if stream is not None else nullcontext():
        complete: torch.Tensor = gradient.wait()
    return complete


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over the memory of `local`; no gradient flows back to it."""
    # The constructor does nothing more than `__new__`, but takes longer.
    cls = _dtensor_class()
    whole: DTensor = cls.__new__(cls, local.detach(), spec, requires_grad=local.requires_grad)
    return whole


@lru_cache(maxsize=1)
def _dtensor_class() -> type[DTensor]:
    from torch.distributed.tensor import DTensor

    return DTensor


class AsDTensor(torch.autograd.Function):
    """`DTensor.from_local` without its checks, for a spec known to be right."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec, stream: Stream | None) -> DTensor:
        ctx.spec, ctx.stream = spec, stream
        ctx.set_materialize_grads(False)
        return as_dtensor(local, spec)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[torch.Tensor | None, None, None]:
        if gradient is None:
            return None, None, None
        if gradient.placements != ctx.spec.placements:
            from torch.distributed.tensor import Replicate

            # Each summand of a sum receives the sum's whole gradient.
            placements = [Replicate() if one.is_partial() else one for one in ctx.spec.placements]
            gradient = gradient.redistribute(ctx.spec.mesh, placements)
        return wait_for_gradient(gradient.to_local(), stream=ctx.stream), None, None
