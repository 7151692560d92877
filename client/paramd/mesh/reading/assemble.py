"""Destination tensors of a read, and the places within them where snapshots land."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from paramd.errors import UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.landings import Block, Landing, blocks
from paramd.layout.plan import RankRead, ReadPlan, ResultTensor
from paramd.layout.regions import boxes_of_interval, row_major
from paramd.layout.types import Box, Interval
from paramd.mesh.reading.landing import MAX_BLOCK_BYTES, Place

HUGE_BYTES = 4 << 20
"""Results at least this long ask the kernel for huge pages."""

_MADV_HUGEPAGE = 14


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a layout's name for it.

    Raises:
        UsageError: this torch does not have it.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"dtype {name!r} is unknown to torch {torch.__version__}; update torch")
    return found


class Targets:
    """The tensors that a plan fills, one for each of its tensors.

    Args:
        plan: what is read.
        names: the names that matched, for each tensor of the plan.
        dtype: dtype of the results; None keeps each tensor's own. Cast on landing.
        device: device of the results; None means CPU.
        into: tensors to fill, by any of the names; those not named are allocated.

    Raises:
        UsageError: a given tensor has another shape, dtype or device than the result.
    """

    def __init__(
        self,
        plan: ReadPlan,
        names: Sequence[tuple[str, ...]],
        *,
        dtype: torch.dtype | None,
        device: torch.device | None,
        into: Mapping[str, torch.Tensor] | None,
    ) -> None:
        self.plan = plan
        """What is read."""
        self._names = names
        self._device = device if device is not None else torch.device("cpu")
        given = _given_tensors(names, into if into is not None else {})
        self._given = set(given)
        self._tensors = [
            _checked(tensor, given[number], dtype, device)
            if number in given
            else allocate(tensor.shape, _result_dtype(tensor, dtype))
            for number, tensor in enumerate(plan.tensors)
        ]

    def places(self, read: RankRead) -> list[Place]:
        """Where one rank's snapshot lands, sorted by `begin`."""
        found = [
            place
            for landing in read.landings
            for place in _places(
                landing, self.plan.tensors[landing.tensor], self._tensors[landing.tensor]
            )
        ]
        found.sort(key=lambda place: place.begin)
        return found

    def results(self) -> dict[str, torch.Tensor]:
        """The filled tensors under every name that matched; tied names share one object."""
        found: dict[str, torch.Tensor] = {}
        for number, (tensor, names) in enumerate(zip(self._tensors, self._names, strict=True)):
            result = tensor if number in self._given else tensor.to(self._device)
            found.update(dict.fromkeys(names, result))
        return found


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized CPU tensor whose first touch is cheap."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes >= HUGE_BYTES:
        _advise_huge(tensor.data_ptr(), size_bytes)
    return tensor


def _advise_huge(address: int, size_bytes: int) -> None:
    # The kernel faults huge pages in at several times the speed of small ones, and reads
    # into fresh memory are bound by that. It may refuse: then it is only slower.
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(begin, end - begin, _MADV_HUGEPAGE)


def tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory as a flat tensor; the caller keeps the memory alive."""
    size_bytes = numel * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=dtype)


def _result_dtype(tensor: ResultTensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None else torch_dtype(tensor.dtype)


def _given_tensors(
    names: Sequence[tuple[str, ...]], into: Mapping[str, torch.Tensor]
) -> dict[int, torch.Tensor]:
    numbers = {name: number for number, tied in enumerate(names) for name in tied}
    given: dict[int, torch.Tensor] = {}
    for name, tensor in into.items():
        if name not in numbers:
            raise UsageError(f"into: {name!r} is not among the {len(numbers)} names that match")
        if given.setdefault(numbers[name], tensor) is not tensor:
            raise UsageError(f"into: {name!r} is tied to another name; give one tensor for both")
    return given


def _checked(
    tensor: ResultTensor,
    given: torch.Tensor,
    dtype: torch.dtype | None,
    device: torch.device | None,
) -> torch.Tensor:
    expected = _result_dtype(tensor, dtype)
    if tuple(given.shape) != tensor.shape:
        raise UsageError(
            f"into[{tensor.name!r}] has shape {list(given.shape)}; expected {list(tensor.shape)}"
        )
    if given.dtype != expected:
        raise UsageError(
            f"into[{tensor.name!r}] has dtype {given.dtype}; expected {expected} "
            "(dtype= casts while reading)"
        )
    if device is not None and torch.device(device) != given.device:
        raise UsageError(f"into[{tensor.name!r}] is on {given.device}; expected {device}")
    if any(s == 0 and n > 1 for s, n in zip(given.stride(), given.shape, strict=True)):
        raise UsageError(f"into[{tensor.name!r}] is expanded: its elements share memory; clone it")
    return given.detach()


def _places(landing: Landing, tensor: ResultTensor, target: torch.Tensor) -> Iterator[Place]:
    plain = target.device.type == "cpu" and target.is_contiguous()
    if landing.direct and plain and target.dtype == torch_dtype(tensor.dtype):
        assert landing.target_begin_bytes is not None
        address = target.data_ptr() + landing.target_begin_bytes
        yield Place(landing.begin_bytes, landing.end_bytes, address)
        return
    for part in _as_boxes(landing, tensor):
        for block in blocks(part, item_bytes(tensor.dtype), MAX_BLOCK_BYTES):
            store = _store(block, part.strides, torch_dtype(tensor.dtype), target)
            yield Place(block.begin_bytes, block.end_bytes, store=store)


def _as_boxes(landing: Landing, tensor: ResultTensor) -> Iterator[Landing]:
    if isinstance(landing.target, Box):
        yield landing
        return
    assert isinstance(landing.target, Interval)
    begin_bytes = landing.begin_bytes
    for box in boxes_of_interval(landing.target, tensor.shape):
        size_bytes = box.numel * item_bytes(tensor.dtype)
        yield Landing(
            tensor=landing.tensor,
            begin_bytes=begin_bytes,
            sizes=box.sizes,
            strides=row_major(box.sizes),
            target=box,
            size_bytes=size_bytes,
            direct=False,
        )
        begin_bytes += size_bytes


def _store(
    block: Block, strides: tuple[int, ...], dtype: torch.dtype, target: torch.Tensor
) -> Callable[[int], None]:
    region = tuple(slice(b, e) for b, e in zip(block.target.begin, block.target.end, strict=True))
    numel = (block.end_bytes - block.begin_bytes) // dtype.itemsize
    return partial(
        _copy_strided, numel=numel, sizes=block.target.sizes, strides=strides, dtype=dtype,
        target=target[region] if region else target,
    )  # fmt: skip


def _copy_strided(
    address: int,
    *,
    numel: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    target: torch.Tensor,
) -> None:
    with torch.no_grad():
        target.copy_(tensor_at(address, numel, dtype).as_strided(sizes, strides))
