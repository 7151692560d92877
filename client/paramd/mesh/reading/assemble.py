"""Tensors of a read: `Targets`, which snapshots are copied into, and zero-copy `SnapshotView`s."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from paramd.errors import NotFoundError, UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.plan import Block, Landing, RankRead, ReadPlan, ResultTensor, as_boxes, blocks
from paramd.layout.types import Region, full_box
from paramd.memory.left import check_client
from paramd.mesh.reading.places import MAX_BLOCK_BYTES, Place
from paramd.mesh.results import text_table

HUGE_BYTES = 4 << 20
"""Results of at least this size ask the kernel for huge pages."""

_MADV_HUGEPAGE = 14


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a layout's dtype name; UsageError if this version of torch lacks it."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"dtype {name!r} is unknown to torch {torch.__version__}; update torch")
    return found


_SHORT = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32",
    "fp64": "float64", "f16": "float16", "f32": "float32", "f64": "float64", "i8": "int8",
    "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8",
}  # fmt: skip
"""Short names that other programs have for dtypes, and torch's."""


def dtype_of(given: torch.dtype | str) -> torch.dtype:
    """A dtype from itself or its name, such as "bfloat16". Raises UsageError."""
    if isinstance(given, torch.dtype):
        return given
    name = str(given).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        meant = _SHORT.get(name.lower())
        hint = f"did you mean {meant!r}?" if meant else "expected torch's name, such as 'bfloat16'"
        raise UsageError(f"dtype: {given!r}; {hint}")
    return found


class Targets:
    """Destination tensors, one for each tensor of `plan`, the read; `names`: its matching names.

    Cast to `dtype` while copying (None keeps each tensor's own), on `device` (None means CPU).
    `into`: tensors to fill, by any of their names; the others are allocated. Raises UsageError if
    one of them does not fit in shape, dtype or device, CapacityError if this process has too little
    memory for those that are allocated.
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
        self._names = names
        self._device = device if device is not None else torch.device("cpu")
        given = _given_tensors(names, into if into is not None else {})
        self._given = set(given)
        # Before anything is taken: the kernel would end this process, or the training beside it.
        check_client(
            sum(
                math.prod(tensor.shape) * _result_dtype(tensor, dtype).itemsize
                for number, tensor in enumerate(plan.tensors)
                if number not in given
            )
        )
        self._tensors = [
            _checked(tensor, given[number], dtype, device)
            if number in given
            else allocate(tensor.shape, _result_dtype(tensor, dtype))
            for number, tensor in enumerate(plan.tensors)
        ]

    def places(self, read: RankRead) -> list[Place]:
        """Destinations of one rank's snapshot, sorted by `begin`."""
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
        """The filled tensors by every matching name; tied names share one object."""
        found: dict[str, torch.Tensor] = {}
        for number, (tensor, names) in enumerate(zip(self._tensors, self._names, strict=True)):
            result = tensor if number in self._given else tensor.to(self._device)
            found.update(dict.fromkeys(names, result))
        return found


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized CPU tensor, in huge pages if it is large."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes >= HUGE_BYTES:
        _advise_huge(tensor.data_ptr(), size_bytes)
    return tensor


def _advise_huge(address: int, size_bytes: int) -> None:
    # Page faults bound reads into fresh memory, and huge pages fault in several times faster.
    # A refusal only costs speed.
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
    # Bytes are values only without a pending conjugation or negation: `copy_` knows of both.
    lazy = target.is_conj() or target.is_neg()
    plain = target.device.type == "cpu" and target.is_contiguous() and not lazy
    if landing.direct and plain and target.dtype == torch_dtype(tensor.dtype):
        assert landing.target_begin_bytes is not None
        address = target.data_ptr() + landing.target_begin_bytes
        yield Place(landing.begin_bytes, landing.end_bytes, address)
        return
    size = item_bytes(tensor.dtype)
    for part in as_boxes(landing, tensor.shape, size):
        for block in blocks(part, size, MAX_BLOCK_BYTES):
            store = _store(block, part.strides, torch_dtype(tensor.dtype), target)
            yield Place(block.begin_bytes, block.end_bytes, store=store)


def _store(
    block: Block, strides: tuple[int, ...], dtype: torch.dtype, target: torch.Tensor
) -> Callable[[int], None]:
    part = target[tuple(map(slice, block.target.begin, block.target.end))]
    numel = (block.end_bytes - block.begin_bytes) // dtype.itemsize

    def store(address: int) -> None:
        with torch.no_grad():
            part.copy_(tensor_at(address, numel, dtype).as_strided(part.shape, strides))

    return store


Shard: TypeAlias = tuple[Region, torch.Tensor]
"""Region in the coordinates of the requested tensor or slice, and its values."""


class SnapshotView(Mapping[str, Sequence[Shard]]):
    """Shards by name, all at one step, in the sidecars' snapshot memory.

    The values never change, neither as training continues nor after the view has ended.
    Writing to a tensor is safe: the mapping is private, so only this process sees it.
    """

    def __init__(
        self,
        plan: ReadPlan,
        names: Sequence[tuple[str, ...]],
        memories: Mapping[int, mmap.mmap],
        *,
        job: str,
        incarnation: int,
        step: int,
        unsettled: bool = False,
    ) -> None:
        self.job = job
        """Name of the job."""
        self.incarnation = incarnation
        """Incarnation of the job."""
        self.step = step
        """Number of finished updates that every value here is of."""
        self.unsettled = unsettled
        """As in `Summoned`."""
        self._shards = _shards(plan, names, memories)
        self._shapes = {
            name: tensor.shape
            for tensor, tied in zip(plan.tensors, names, strict=True)
            for name in tied
        }

    def __getitem__(self, name: str) -> Sequence[Shard]:
        return self._shards[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, if one rank holds it in one piece.

        Raises:
            NotFoundError: No such name in the view.
            UsageError: It has several shards; `summon` assembles them.
        """
        if name not in self._shards:
            raise NotFoundError(f"{name!r} is not in this view; it has {len(self)} names")
        shards, shape = self._shards[name], self._shapes[name]
        if len(shards) != 1:
            raise UsageError(
                f"{name!r} consists of {len(shards)} shards; take them one by one "
                f"(view[{name!r}]), or summon it"
            )
        ((_, tensor),) = shards
        return tensor if tensor.shape == shape else tensor.view(shape)

    def __repr__(self) -> str:
        rows = [[name, str(list(self._shapes[name])), str(len(s))] for name, s in self.items()]
        below = f"{len(self)} tensors of {self.job!r} at step {self.step} (run {self.incarnation})"
        return text_table(["name", "shape", "shards"], rows[:40], below)

    def drop(self) -> None:
        """Drop the view's references to its tensors."""
        self._shards = {}


def _shards(
    plan: ReadPlan, names: Sequence[tuple[str, ...]], memories: Mapping[int, mmap.mmap]
) -> dict[str, list[Shard]]:
    found: list[list[Shard]] = [[] for _ in plan.tensors]
    for read in plan.ranks:
        for landing in read.landings:
            dtype = torch_dtype(plan.tensors[landing.tensor].dtype)
            tensor = _shard(memories[read.rank], landing, dtype)
            found[landing.tensor].append((landing.target, tensor))
    for number, result in enumerate(plan.tensors):
        if 0 in result.shape:
            empty = torch.empty(result.shape, dtype=torch_dtype(result.dtype))
            found[number].append((full_box(result.shape), empty))
    return {name: found[number] for number, tied in enumerate(names) for name in tied}


def _shard(memory: mmap.mmap, landing: Landing, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.frombuffer(
        memory, dtype=torch.uint8, count=landing.size_bytes, offset=landing.begin_bytes
    )
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()  # after spans of odd lengths; torch needs aligned memory
    return flat.view(dtype).as_strided(landing.sizes, landing.strides)
