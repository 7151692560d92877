"""Tensor memory by address: who uses it, and how to point tensors at other memory.

A storage may have users that no module knows: an optimizer's bucket, a `p.data` kept in a
list, FSDP's own views. All must move together, or one would silently stop following the
others. Python's garbage collector knows them all.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from paramd.trainer.model.plain import has_plain_memory


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Half-open address range `[begin, end)` of this process."""

    begin: int
    end: int


class Ranges:
    """Disjoint ranges, searchable by address. Overlapping ones are merged."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.items: list[Range] = []
        for item in sorted(r for r in ranges if r.begin < r.end):
            if self.items and item.begin < self.items[-1].end:
                last = self.items.pop()
                self.items.append(Range(last.begin, max(last.end, item.end)))
            else:
                self.items.append(item)
        self._begins = [item.begin for item in self.items]

    def at(self, address: int) -> Range | None:
        """The range containing `address`, if any."""
        index = bisect_right(self._begins, address) - 1
        return self.items[index] if index >= 0 and address < self.items[index].end else None

    def touches(self, other: Range) -> bool:
        """Whether `other` overlaps a range."""
        index = bisect_right(self._begins, other.end - 1) - 1
        return other.begin < other.end and index >= 0 and self.items[index].end > other.begin


def storage_range(tensor: torch.Tensor) -> Range:
    """Addresses of a tensor's whole storage."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    return Range(begin, begin + int(storage.nbytes()))


def address(tensor: torch.Tensor) -> int:
    """The tensor's first address; unlike `data_ptr`, also for one without elements."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize


def extent(tensor: torch.Tensor) -> Range:
    """Addresses from the tensor's first to its last element."""
    begin = address(tensor)
    if tensor.numel() == 0:
        return Range(begin, begin)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return Range(begin, begin + (last + 1) * tensor.itemsize)


def live_tensors() -> Iterator[torch.Tensor]:
    """All CPU tensors with memory, owned or shared, that Python knows.

    One pass over all objects of the process: tens of milliseconds. Misses tensors hidden by
    `gc.freeze()` and those held only by C++.
    """
    classes = _classes(torch.Tensor)
    with torch._C.DisableTorchFunctionSubclass():
        for item in [item for item in gc.get_objects() if type(item) in classes]:
            if _has_host_memory(item):
                yield item


def _classes(root: type) -> set[type]:
    """A class and all its subclasses, so that objects of other classes are never touched."""
    children: list[type] = root.__subclasses__()
    return {root}.union(*map(_classes, children))


def _has_host_memory(tensor: torch.Tensor) -> bool:
    try:
        plain = tensor.device.type == "cpu" and has_plain_memory(tensor)
        return plain and tensor.untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):
        # Wrappers left behind by tracing have no storage and raise.
        return False


def has_unseen_users(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether anything beyond `tensors`, all distinct, uses one of their storages."""
    known = Counter(t.untyped_storage()._cdata for t in tensors)
    # One reference more than tensors: the storage object made to query it.
    return any(torch._C._storage_Use_Count(key) > count + 1 for key, count in known.items())


def close_over(known: Ranges, tensors: Sequence[torch.Tensor]) -> Ranges:
    """Grow the ranges until no storage of `tensors` lies only partly in them."""
    storages = {storage_range(tensor) for tensor in tensors}
    while True:
        touched = [r for r in storages if known.touches(r)]
        grown = Ranges([*known.items, *touched])
        if grown.items == known.items:
            return known
        known = grown


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as a 1-D uint8 tensor."""
    return placed(torch.uint8, storage, 0, (storage.nbytes(),), (1,))


def bytes_at(memory: memoryview, begin: int, size_bytes: int) -> torch.Tensor:
    """A span of `memory` as a 1-D uint8 tensor whose storage has exactly that size."""
    return torch.frombuffer(memory, dtype=torch.uint8, count=size_bytes, offset=begin)


def placed(
    dtype: torch.dtype,
    storage: torch.UntypedStorage,
    offset_bytes: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """A tensor over given memory; `strides` are in elements."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    offset, rest = divmod(offset_bytes, empty.itemsize)
    assert rest == 0, "an element would begin between two elements of its storage"
    # The stub wants typed storages, but torch's own tensor rebuilding passes untyped ones.
    return empty.set_(storage, offset, tuple(shape), tuple(strides))


def repoint(targets: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Point each tensor at the memory of its new view; all or none.

    Preserves identity, `requires_grad`, gradients and version counters. Views must match their
    tensors in dtype, shape and strides.
    """
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor, view in targets:
            old = tensor.data
            tensor.data = view
            done.append((tensor, old))
    except BaseException:
        for tensor, old in reversed(done):
            tensor.data = old
        raise
