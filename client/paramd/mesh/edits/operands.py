"""Tensor operands of an edit, cut into the bytes that each rank's sidecar stages."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeAlias

import torch

from paramd.errors import ExhaustedError, UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.edits.ops import OpSpec, edit_ops
from paramd.layout.edits.plan import EditItem, EditPlan, RankEdit, plan_edit
from paramd.layout.select import NameIndex, SelectedTensor, Selection
from paramd.memory.descriptors import LentMemory, lent_memory
from paramd.mesh.edits.lending import Lender
from paramd.mesh.reading.assemble import torch_dtype
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import CHUNK_BYTES

_ALIGNMENT = 64


class SupportsArray(Protocol):
    """An array of NumPy's or of its like."""

    def __array__(self) -> Any: ...


Operand: TypeAlias = float | torch.Tensor | Sequence[Any] | SupportsArray
"""An edit's operand: a number, a tensor, or an array or nested list of numbers."""


def tensor_of(given: Any) -> torch.Tensor:
    """A tensor of an array's or a list's values.

    Raises:
        UsageError: They are none.
    """
    try:
        return torch.as_tensor(_plain(given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"operand: {type(given).__name__} is not a tensor of numbers: {error}"
        ) from error


def _plain(given: Any) -> Any:
    """An array in memory that torch can take: it knows no negative strides (a reversed or flipped
    array), no other byte order, and warns of memory that is read-only."""
    if isinstance(given, list | tuple) and any(map(_is_array, given)):
        import numpy as np

        given = np.asarray(given)
    if not _is_array(given):
        return given
    array = given.__array__()
    reversed_ = any(stride < 0 for stride in array.strides)
    if reversed_ or not array.dtype.isnative or not array.flags.writeable:
        return array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return array


def _is_array(given: Any) -> bool:
    return hasattr(given, "__array__") and not isinstance(given, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Operands:
    """A planned edit and its tensor operands, by index of the operation."""

    ops: Sequence[pb.EditOp]
    plan: EditPlan
    tensors: dict[int, torch.Tensor]
    """On the CPU, row-major, in the parameter's dtype."""


def prepare(index: NameIndex, ops: Sequence[OpSpec], *, allow_nonfinite: bool) -> Operands:
    """Plan an edit with tensor operands.

    Raises:
        UsageError: If an operand's shape differs from its region's, or several regions match.
        NotFoundError: If a pattern matches nothing.
    """
    planned: list[pb.EditOp] = []
    given: dict[int, torch.Tensor] = {}
    for op in ops:
        found = edit_ops(index, [op])
        if op.operand is not None:
            if len(found) != 1:
                raise UsageError(
                    f"{op.pattern!r} matches {len(found)} parameters, but one tensor was given; "
                    f"give a mapping from names to tensors ({op.op}={{name: tensor, ...}})"
                )
            given[len(planned)] = op.operand
        planned += found
    plan = plan_edit(index.layout, planned, allow_nonfinite=allow_nonfinite)
    tensors = {
        number: _converted(
            tensor, plan.ops[number].tensor.dtype, plan.ops[number].box.sizes, planned[number].fqn
        )
        for number, tensor in given.items()
    }
    return Operands(planned, plan, tensors)


def _converted(tensor: torch.Tensor, dtype: str, sizes: tuple[int, ...], fqn: str) -> torch.Tensor:
    if tuple(tensor.shape) != sizes:
        raise UsageError(
            f"the operand for {fqn!r} has shape {list(tensor.shape)}; expected {list(sizes)}"
        )
    # Memory is sent, so a conjugate must not only be noted.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.to(device="cpu", dtype=torch_dtype(dtype)).contiguous()


def lent_tensors(
    lender: Lender, selection: Selection, *, from_bytes: int
) -> dict[str, torch.Tensor]:
    """An uninitialized tensor in lent memory for each selected one, by its name.

    None if there are fewer than `from_bytes`, or no memory for them: plain memory costs one more
    copy.
    """
    places: dict[str, tuple[int, SelectedTensor]] = {}
    end = 0
    for item in selection:
        places[item.name] = (end, item)
        size_bytes = item.box.numel * item_bytes(item.tensor.dtype)
        end += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
    if end < max(from_bytes, 1):
        return {}
    try:
        memory = lender.lend(end)
    except ExhaustedError:
        return {}
    found: dict[str, torch.Tensor] = {}
    for name, (begin, item) in places.items():
        if numel := item.box.numel:
            dtype = torch_dtype(item.tensor.dtype)
            flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=begin)
            found[name] = flat.view(item.box.sizes)
    return found


def lent_memories(operands: Operands) -> list[LentMemory]:
    """The memories lent to sidecars in which operands lie, each once."""
    places = [(one.data_ptr(), one.nbytes) for one in operands.tensors.values() if one.nbytes]
    found = (lent_memory(address, size_bytes) for address, size_bytes in places)
    return list(dict.fromkeys(one for one in found if one is not None))


def parts(operands: Operands, rank: RankEdit, offset_bytes: int = 0) -> Iterator[memoryview]:
    """Parts of a rank's data from `offset_bytes` on, each valid until the next is requested."""
    at = 0
    for item in rank.items:
        if item.data_begin < 0:
            continue
        yield from _from(at, item.data_begin - at, offset_bytes)
        yield from _item_parts(item, operands.tensors[item.op], offset_bytes - item.data_begin)
        at = item.data_begin + item.size_bytes
    yield from _from(at, rank.data_bytes - at, offset_bytes)


def _from(begin: int, size_bytes: int, offset_bytes: int) -> Iterator[memoryview]:
    """Zeros between items."""
    left = begin + size_bytes - max(begin, offset_bytes)
    if size_bytes and left > 0:
        yield memoryview(bytearray(left))


def _item_parts(item: EditItem, tensor: torch.Tensor, skip_bytes: int) -> Iterator[memoryview]:
    # Not the third argument of `as_strided`, which would count from the storage's beginning.
    view = tensor.reshape(-1)[item.source_begin :].as_strided(item.sizes, item.source_strides)
    if item.size_bytes <= skip_bytes:
        return
    begin = 0
    for block in _blocks(view):
        memory = _bytes_of(block.contiguous())
        for at in range(0, len(memory), CHUNK_BYTES):
            part = memory[at : at + CHUNK_BYTES]
            cut = max(0, skip_bytes - begin)
            begin += len(part)
            if cut < len(part):
                yield part[cut:]


def _blocks(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views in row-major order; those that are not dense have about `CHUNK_BYTES` at most."""
    size_bytes = prod(view.shape) * view.element_size()
    if view.is_contiguous() or size_bytes <= CHUNK_BYTES or view.dim() == 0:
        yield view
        return
    rows = max(1, CHUNK_BYTES * view.shape[0] // size_bytes)
    for part in view.split(rows):
        if rows == 1:
            yield from _blocks(part[0])
        else:
            yield part


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    size_bytes = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    # Keeps the tensor's memory alive for as long as the view.
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
