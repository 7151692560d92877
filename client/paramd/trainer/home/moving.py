"""Move tensors between memories: find all users of a range, and repoint them together.

A storage may have users that no module knows: an optimizer's bucket, a `p.data` kept in a
list, FSDP's own views. All must move together, or one would silently stop following the
others. Python's garbage collector knows them all.

Persistent buffers are not moved but copied, on request: they change in forward, outside updates,
and modules may rebind them to new tensors, so every copy looks them up in the modules again.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

import torch

from paramd.errors import ConflictError
from paramd.layout.types import Box, Region, TensorKind, is_row_major
from paramd.trainer.model import plain
from paramd.trainer.model.dtensor import split
from paramd.trainer.model.local_shard import LocalShard, dtype_name
from paramd.trainer.model.plain import has_plain_memory

if TYPE_CHECKING:
    from paramd.trainer.home.device import MappedBytes


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
        index = bisect_right(self._begins, address) - 1
        return self.items[index] if index >= 0 and address < self.items[index].end else None

    def touches(self, other: Range) -> bool:
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


def storage(tensor: torch.Tensor) -> int:
    """Names the tensor's storage, see `use_count`."""
    return int(tensor.untyped_storage()._cdata)


def extent(tensor: torch.Tensor) -> Range:
    """Addresses from the tensor's first to its last element."""
    begin = address(tensor)
    if tensor.numel() == 0:
        return Range(begin, begin)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return Range(begin, begin + (last + 1) * tensor.itemsize)


def live_tensors(device_type: str = "cpu") -> Iterator[torch.Tensor]:
    """All tensors with memory on this type of device, owned or shared, that Python knows.

    One pass over all objects of the process: tens of milliseconds. Misses tensors hidden by
    `gc.freeze()` and those held only by C++.
    """
    classes = _classes(torch.Tensor)
    with torch._C.DisableTorchFunctionSubclass():
        for item in [item for item in gc.get_objects() if type(item) in classes]:
            if _has_memory(item, device_type):
                yield item


def _classes(root: type) -> set[type]:
    """A class and all its subclasses, so that objects of other classes are never touched."""
    children: list[type] = root.__subclasses__()
    return {root}.union(*map(_classes, children))


def _has_memory(tensor: torch.Tensor, device_type: str) -> bool:
    try:
        plain = tensor.device.type == device_type and has_plain_memory(tensor)
        return plain and tensor.untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):
        # Wrappers left behind by tracing have no storage and raise.
        return False


def has_unseen_users(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether anything beyond `tensors`, all distinct, uses one of their storages."""
    known = Counter(t.untyped_storage()._cdata for t in tensors)
    # One reference more than tensors: the storage object made to query it.
    return any(use_count(key) > count + 1 for key, count in known.items())


def use_count(storage: int) -> int:
    """References to a storage, given by its `_cdata`: of tensors, C++, and its Python object."""
    return int(torch._C._storage_Use_Count(storage))


def disjoint(ranges: Iterable[Range]) -> bool:
    """Whether no two of them overlap."""
    ordered = sorted(ranges)
    return all(one.end <= other.begin for one, other in pairwise(ordered))


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one can have the other's memory and stay the same to whoever uses it."""
    return (
        has_plain_memory(one)
        and (one.dtype, one.device, one.shape, one.stride())
        == (other.dtype, other.device, other.shape, other.stride())
        and type(one) in (torch.Tensor, torch.nn.Parameter)
    )


def close_over(known: Ranges, tensors: Sequence[torch.Tensor]) -> Ranges:
    """Grow the ranges until every storage of `tensors` lies wholly inside or outside."""
    storages = {storage_range(tensor) for tensor in tensors}
    while True:
        grown = Ranges([*known.items, *[r for r in storages if known.touches(r)]])
        if grown.items == known.items:
            return known
        known = grown


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as a 1-D uint8 tensor."""
    return placed(torch.uint8, storage, 0, (storage.nbytes(),), (1,))


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's memory from its first to its last element."""
    memory = extent(tensor)
    return memory.end - memory.begin


Memory: TypeAlias = "memoryview | MappedBytes"
"""The memory that parameters are moved into."""


def bytes_at(memory: Memory, begin: int, size_bytes: int) -> torch.Tensor:
    """A span of `memory` as a 1-D uint8 tensor whose storage has exactly that size."""
    if not isinstance(memory, memoryview):
        return memory.at(begin, size_bytes)
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


@dataclass(frozen=True, slots=True)
class Escaped:
    """A shard that left the arena, and the address where it belongs."""

    shard: LocalShard
    home: int


def users(
    shards: Sequence[LocalShard], tensors: Sequence[torch.Tensor], ranges: Ranges
) -> list[torch.Tensor]:
    """Tensors whose storage begins in `ranges`, of `tensors` and those the adapters know."""
    known = chain.from_iterable((shard.tensor, *shard.holders) for shard in shards)
    found: dict[int, torch.Tensor] = {}
    for tensor in chain(known, tensors):
        if ranges.at(tensor.untyped_storage().data_ptr()) is not None:
            found[id(tensor)] = tensor
    return list(found.values())


def moved(tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """`tensor` with the storage of `base`."""
    offset_bytes = int(tensor.storage_offset()) * tensor.itemsize
    return placed(tensor.dtype, base.untyped_storage(), offset_bytes, tensor.shape, tensor.stride())


def strides_of(shard: LocalShard) -> tuple[int, ...] | None:
    """Element strides of a box that is not row-major in memory; else None."""
    strides = tuple(shard.tensor.stride())
    if not isinstance(shard.region, Box) or is_row_major(shard.region.sizes, strides):
        return None
    return strides


def differences(before: Sequence[LocalShard], after: Sequence[LocalShard]) -> dict[str, str]:
    """Changes of a layout: parameter name -> before and after, in words. Their order is no part of
    a layout: see `arranged`.
    """
    old, new = _by_name(before), _by_name(after)
    return {
        name: f"was {old.get(name, 'absent')} and is {new.get(name, 'absent')}"
        for name in old | new
        if old.get(name) != new.get(name)
    }


def arranged(before: Sequence[LocalShard], after: Sequence[LocalShard]) -> list[LocalShard]:
    """`after` in the order of `before`, by name; new names come last.

    A parameter that a module gives up and takes back (`torch.nn.utils.prune`, a parametrization)
    is the last of its module then, and its bytes in the arena are where they were.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(s.fqn for s in before))}
    return sorted(after, key=lambda shard: places.get(shard.fqn, len(places)))


def _by_name(shards: Sequence[LocalShard]) -> dict[str, str]:
    said: dict[str, str] = {}
    for shard in shards:
        if shard.kind is TensorKind.PARAMETER:
            said[shard.fqn] = (f"{said[shard.fqn]}; " if shard.fqn in said else "") + _said(shard)
    return said


def _said(shard: LocalShard) -> str:
    parts = [shard.dtype, str(list(shard.shape)), shard.placement]
    if shard.aliases:
        parts.append(f"also named {', '.join(shard.aliases)}")
    if shard.region.numel:
        parts.append(f"[{shard.region.begin}, {shard.region.end}) strides {strides_of(shard)}")
    return " ".join(parts)


@torch.inference_mode(False)
def bring_back(
    left: Sequence[Escaped], bases: Sequence[torch.Tensor], shards: Sequence[LocalShard]
) -> None:
    """Copy departed shards, `left`, back and point their tensors there.

    Unknown tensors move too when their memory lies wholly within a departed shard. `bases`: the
    arena's storages, ordered by address. `shards`: all of the model's current ones; their tensors
    are not evicted.

    Raises:
        ConflictError: If departed shards newly share memory, one of their tensors does not fit
            its old storage, or the memory they left is used by something that cannot be moved
            out of the way, where writing would change what the training computes.
    """
    if not left:
        return
    evicted = evict(left, bases, shards)
    ways, homes = _Ways(left), _Homes(bases)
    known = {id(t): t for d in left for t in (d.shard.tensor, *d.shard.holders)}
    targets: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in known.values():
        delta = ways.delta(extent(tensor))
        if delta is not None:
            targets.append((tensor, homes.view(tensor, delta)))
    for tensor in live_tensors(left[0].shard.tensor.device.type):
        if id(tensor) not in known and ways.hold(extent(tensor)):
            delta = ways.delta(extent(tensor))
            assert delta is not None
            targets.append((tensor, homes.view(tensor, delta)))
    # Before the arena is written, so that evicted tensors keep the values they had there.
    repoint(evicted)
    with torch.no_grad():
        for departed in left:
            source = departed.shard.tensor
            homes.view(source, departed.home - address(source)).copy_(source)
    repoint(targets)


def evict(
    left: Sequence[Escaped], bases: Sequence[torch.Tensor], shards: Sequence[LocalShard]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Private copies for tensors still using the memory that departed shards left.

    For example an optimizer made earlier, or weights set aside to be swapped back in. They keep
    their identity and values; only their memory changes. Returns each tensor with its new view (see
    `repoint`).

    Raises:
        ConflictError: If something invisible to Python uses that memory.
    """
    ours = {id(base) for base in bases}
    ours.update(id(t) for shard in shards for t in (shard.tensor, *shard.holders))
    storages = {base.untyped_storage()._cdata for base in bases}
    homes = Ranges(
        Range(d.home, d.home + extent(d.shard.tensor).end - extent(d.shard.tensor).begin)
        for d in left
    )
    alive = live_tensors(left[0].shard.tensor.device.type)
    inside = [t for t in alive if t.untyped_storage()._cdata in storages]
    strangers = [t for t in inside if id(t) not in ours and homes.touches(extent(t))]
    touched = {base.untyped_storage()._cdata for base in bases if homes.touches(extent(base))}
    if has_unseen_users([t for t in inside if t.untyped_storage()._cdata in touched]):
        raise ConflictError(
            "parameters were replaced while their old memory is in use by something that Python "
            "does not show, such as a graph that awaits its backward; retrying"
        )
    return _with_copies(strangers)


def _with_copies(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor with its view of a copy of its storage; those of one storage share a copy."""
    copies: dict[int, torch.Tensor] = {}
    moves = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in copies:
            copies[storage._cdata] = bytes_of(storage).clone()
        moves.append((tensor, moved(tensor, copies[storage._cdata])))
    return moves


class _Ways:
    """The byte distance each departed shard's memory has to move."""

    def __init__(self, left: Sequence[Escaped]) -> None:
        ways = sorted(((extent(d.shard.tensor), d) for d in left), key=itemgetter(0))
        self._ways: list[tuple[Range, int]] = []
        for memory, departed in ways:
            delta = departed.home - memory.begin
            last, last_delta = self._ways[-1] if self._ways else (Range(0, 0), delta)
            if memory.begin < last.end and delta != last_delta:
                raise ConflictError(
                    f"parameter {departed.shard.fqn!r} now shares its memory with another one; "
                    "detach and attach again to serve them"
                )
            self._ways.append((memory, delta))
        self._begins = [memory.begin for memory, _ in self._ways]

    def delta(self, memory: Range) -> int | None:
        """The distance for memory overlapping departed shards; None for other memory."""
        deltas = {d for r, d in self._near(memory) if r.begin < memory.end and memory.begin < r.end}
        if len(deltas) > 1:
            raise ConflictError(
                "separate parameters now share one flat tensor; detach and attach again"
            )
        return deltas.pop() if deltas else None

    def hold(self, memory: Range) -> bool:
        """Whether the memory is non-empty and lies wholly in one departed shard."""
        return memory.begin < memory.end and any(
            r.begin <= memory.begin and memory.end <= r.end for r, _ in self._near(memory)
        )

    def _near(self, memory: Range) -> list[tuple[Range, int]]:
        first = max(bisect_right(self._begins, memory.begin) - 1, 0)
        return self._ways[first : bisect_right(self._begins, memory.end)]


class _Homes:
    """The arena's storages, found by address."""

    def __init__(self, bases: Sequence[torch.Tensor]) -> None:
        self._bases = bases
        self._begins = [address(base) for base in bases]

    def view(self, tensor: torch.Tensor, delta: int) -> torch.Tensor:
        """`tensor` shifted by `delta` bytes, into the arena."""
        memory = extent(tensor)
        begin, end = memory.begin + delta, memory.end + delta
        index = bisect_right(self._begins, begin) - 1
        # Storages overlap only if a user built one over another's memory.
        for base in reversed(self._bases[: index + 1]):
            home = storage_range(base)
            if end <= home.end:
                storage, offset_bytes = base.untyped_storage(), begin - home.begin
                return placed(tensor.dtype, storage, offset_bytes, tensor.shape, tensor.stride())
        raise ConflictError(
            f"a tensor of shape {list(tensor.shape)} does not fit the memory that its parameter "
            "had; detach and attach again"
        )


class BufferChangedError(ConflictError):
    """A buffer is not of the shape and dtype that it was attached with, and will not be again."""


class BufferCopies:
    """Row-major copies of buffer shards at fixed places in an arena."""

    def __init__(self, arena: Memory, placed: Sequence[tuple[LocalShard, int]]) -> None:
        """`placed`: each shard with its first byte in the arena."""
        self._shards = [shard for shard, _ in placed]
        self._targets = [_target(arena, shard, begin) for shard, begin in placed]

    def refresh(self) -> None:
        """Copy all buffers; BufferChangedError: another shape, or a dtype that does not fit."""
        with torch.no_grad():
            # One by one: `_foreach_copy_` takes no mixture of devices.
            for live, target in self._pairs():
                target.copy_(live)

    def restore(self) -> None:
        """Copy the arena's bytes into the model's buffers. Raises as `refresh`."""
        with torch.no_grad():
            for live, target in self._pairs():
                live.copy_(target)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = zip(self._shards, self._targets, strict=True)
        return [(_live(shard, target), target) for shard, target in pairs]


def _target(arena: Memory, shard: LocalShard, begin: int) -> torch.Tensor:
    size_bytes = shard.tensor.numel() * shard.tensor.itemsize
    return bytes_at(arena, begin, size_bytes).view(shard.tensor.dtype).view(shard.tensor.shape)


def _live(shard: LocalShard, target: torch.Tensor) -> torch.Tensor:
    value = shard.slot.owner.get(shard.slot.key)
    for region, source in _regions(shard, value):
        fits = torch.promote_types(source.dtype, target.dtype) == target.dtype
        if region == shard.region and source.shape == target.shape and fits:
            return source
    raise BufferChangedError(
        f"buffer {shard.fqn!r} was {shard.dtype} {list(shard.shape)} when attached and is "
        f"{_described(value)} now; detach and attach again to serve it"
    )


def _regions(shard: LocalShard, value: object) -> list[tuple[Region, torch.Tensor]]:
    if not isinstance(value, torch.Tensor):
        return []
    local, spec = split(value)
    if spec is None and local.shape == shard.shape and shard.region.numel == local.numel():
        return [(shard.region, local.detach())]
    found = plain.shards_of((shard.fqn,), value, shard.kind, shard.slot)
    return [(part.region, part.tensor) for part in found]


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    return repr(value)
