"""Tensors in a module's own tables: plain modules, DDP, tensor parallelism.

Each is either a local tensor, whole on every rank, or a DTensor. Memory that is dense but not
row-major (channels-last, transposed) stays as it is; memory with gaps is described as several
dense boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paramd.errors import ConflictError
from paramd.layout.types import Box, TensorKind, full_box, is_dense
from paramd.trainer.model import dtensor
from paramd.trainer.model.local_shard import Entry, LocalShard, Names, Slot, dtype_name

MAX_DENSE_PARTS = 4096
"""Most boxes one tensor may consist of before it is refused."""


def entry(slot: Slot, kind: TensorKind) -> Entry:
    """The entry of the tensor in `slot`; slots with the same object are one tensor."""
    value = slot.tensor()
    local, spec = dtensor.split(value)
    if spec is not None and local is value:
        # The first forward removes a localized parameter from the module's table for good.
        slot = Slot({slot.key: value}, slot.key)
    return Entry(id(local), lambda names: shards_of(names, value, kind, slot))


def localized_for_ddp(modules: Iterable[nn.Module]) -> set[int]:
    """Ids of all modules inside those prepared by torch's `_pre_dp_module_transform`."""
    return {
        id(inner)
        for module in modules
        for hook in module._forward_pre_hooks.values()
        if getattr(hook, "__name__", "") == "_reconstruct_dtensor"
        for inner in module.modules()
    }


def localized_slots(module: nn.Module) -> Iterator[Slot]:
    """Parameters kept as bare DTensor attributes.

    torch's `_pre_dp_module_transform` leaves them so from the first forward on; their local
    memory is still that of the optimizer's parameters.
    """
    for name, value in vars(module).items():
        if dtensor.is_dtensor(value):
            yield Slot(vars(module), name)


def shards_of(
    names: Names,
    value: torch.Tensor,
    kind: TensorKind,
    slot: Slot,
    holders: tuple[torch.Tensor, ...] = (),
) -> list[LocalShard]:
    """The shards of one tensor: whole on this rank, or a DTensor's boxes.

    `holders`: other local tensors that use the same memory.

    Raises:
        ConflictError: If the tensor is lazy, not dense and strided, or overlaps itself.
    """
    fqn = names[0]
    if is_lazy(value):
        raise ConflictError(
            f"parameter {fqn!r} is not initialized yet; run one forward before paramd.attach"
        )
    local, spec = dtensor.split(value)
    check_supported(fqn, local)
    if spec is None:
        shape, placement = tuple(local.shape), "replicated"
        boxes = [(full_box(shape), local.detach())]
    else:
        shape, placement = tuple(spec.shape), dtensor.describe(spec)
        boxes = dtensor.local_boxes(fqn, spec, local.detach())
    return [
        LocalShard(
            fqn=fqn,
            aliases=names[1:],
            dtype=dtype_name(local.dtype),
            shape=shape,
            kind=kind,
            placement=placement,
            region=region,
            tensor=view,
            slot=slot,
            holders=(local, *holders),
        )
        for region, view in dense_parts(fqn, boxes)
    ]


def check_supported(fqn: str, local: torch.Tensor) -> None:
    """Raise ConflictError unless a tensor's values are simply its bytes.

    Refused are subclasses with their own operators, and sparse, quantized, lazily conjugated or
    negated tensors.
    """
    if not has_plain_memory(local):
        raise ConflictError(
            f"tensor {fqn!r} is a {type(local).__name__} with layout {local.layout}; "
            "expected a dense strided torch.Tensor or a DTensor of such"
        )


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are its bytes: dense layout, no custom operators."""
    return (
        getattr(type(tensor), "__torch_dispatch__", None) is torch._C._disabled_torch_dispatch_impl
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def dense_parts(fqn: str, boxes: list[tuple[Box, torch.Tensor]]) -> list[tuple[Box, torch.Tensor]]:
    """Cut boxes with gaps into dense ones; ConflictError: shared memory, or too many parts."""
    parts: list[tuple[Box, torch.Tensor]] = []
    for box, view in boxes:
        for part in _dense(box, view):
            parts.append(part)
            if len(parts) > MAX_DENSE_PARTS:
                raise ConflictError(
                    f"tensor {fqn!r} with strides {list(view.stride())} is in more than "
                    f"{MAX_DENSE_PARTS} parts in memory; make it contiguous"
                )
    for _, view in parts:
        if not (view.numel() == 0 or is_dense(view.shape, view.stride())):
            raise ConflictError(
                f"tensor {fqn!r} with strides {list(view.stride())} overlaps itself in memory; "
                "make it contiguous"
            )
    return parts


def _dense(box: Box, view: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    if view.numel() == 0 or is_dense(view.shape, view.stride()):
        yield box, view
        return
    dim = max(range(view.dim()), key=lambda d: (view.shape[d] > 1, view.stride(d)))
    if view.shape[dim] <= 1 or view.stride(dim) == 0:
        yield box, view
        return
    for index in range(view.shape[dim]):
        at = box.begin[dim] + index
        begin = (*box.begin[:dim], at, *box.begin[dim + 1 :])
        end = (*box.end[:dim], at + 1, *box.end[dim + 1 :])
        yield from _dense(Box(begin, end), view.narrow(dim, index, 1))
