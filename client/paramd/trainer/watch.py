"""Notices parameters that left the arena, for a few microseconds a call.

What is compared is the address of the memory of whatever stands in the module's tables
now. So a replaced parameter, a replaced `.data` and a replaced local tensor all show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Any

import torch

from paramd.trainer.dtensor import is_dtensor, split
from paramd.trainer.local_shard import Slot
from paramd.trainer.plain import has_plain_memory

CHUNK_COUNT = 100
"""Tensors looked at in one call."""

_DTENSOR_COST = 2
"""One DTensor takes as long as this many plain tensors."""

_address = torch.Tensor.data_ptr
_local = attrgetter("_local_tensor")


@dataclass(frozen=True, slots=True)
class Watched:
    """A slot, the address its memory must have, and the name to report."""

    fqn: str
    slot: Slot
    address: int


class _Chunk:
    """Columns instead of rows, so that `map` runs over them without Python code between."""

    def __init__(self, items: Sequence[Watched]) -> None:
        plain = [w for w in items if not is_dtensor(w.slot.tensor())]
        distributed = [w for w in items if is_dtensor(w.slot.tensor())]
        self.items = items
        self.plain = _columns(plain)
        self.distributed = _columns(distributed)

    def in_place(self) -> bool:
        owners, keys, expected = self.plain
        if tuple(map(_address, map(getitem, owners, keys))) != expected:
            return False
        owners, keys, expected = self.distributed
        return tuple(map(_address, map(_local, map(getitem, owners, keys)))) == expected


def _columns(
    items: Sequence[Watched],
) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...], tuple[int, ...]]:
    return (
        tuple(w.slot.owner for w in items),
        tuple(w.slot.key for w in items),
        tuple(w.address for w in items),
    )


class Watch:
    """Looks at all watched slots in turn, a chunk a call."""

    def __init__(self, items: Sequence[Watched]) -> None:
        self._chunks: list[_Chunk] = []
        chunk: list[Watched] = []
        cost = 0
        for item in items:
            item_cost = _DTENSOR_COST if is_dtensor(item.slot.tensor()) else 1
            if cost + item_cost > CHUNK_COUNT:
                self._chunks.append(_Chunk(chunk))
                chunk, cost = [], 0
            chunk.append(item)
            cost += item_cost
        self._chunks.append(_Chunk(chunk))
        self._next = 0

    def look(self) -> list[str]:
        """Names of the next chunk's tensors that are not where they should be."""
        chunk = self._chunks[self._next]
        self._next = (self._next + 1) % len(self._chunks)
        return _look_at(chunk)

    def look_at_all(self) -> list[str]:
        """Names of all tensors that are not where they should be."""
        return [name for chunk in self._chunks for name in _look_at(chunk)]


def _look_at(chunk: _Chunk) -> list[str]:
    try:
        if chunk.in_place():
            return []
    except (KeyError, TypeError, AttributeError, RuntimeError):
        # Something else stands there now, or nothing: the slow way says which.
        pass
    return [w.fqn for w in chunk.items if not _stands(w)]


def _stands(watched: Watched) -> bool:
    value = watched.slot.owner.get(watched.slot.key)
    if not isinstance(value, torch.Tensor):
        return False
    local, _ = split(value)
    return has_plain_memory(local) and local.data_ptr() == watched.address
