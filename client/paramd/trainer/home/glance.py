"""Detect unchanged tables and tensors from a few words of their own memory.

Asking 300 tensors for their addresses, and 226 tables for their entries, takes Python some
40 us. Gathering the words behind those answers takes 3:

    dict            its version: a number that rises with every change (CPython up to 3.13)
    tensor object   -> TensorImpl
    TensorImpl      -> StorageImpl, and the offset in it
    StorageImpl     -> memory

These offsets are undocumented, so none is assumed: each is found by probing objects made for
it, used only if every kind of change shows there, and checked against what torch reports for
each watched tensor. If any of this fails (another Python, another torch), or with
PARAMD_GLANCES=0, there is no glance and every look is a slow one (watch.py).

Only memory of live objects is read. Tables, tensors and storages are kept alive here; a
TensorImpl lives as long as a tensor points to it, so it is read only after its tensor was seen
to do so. A glance never tells where a tensor is, only that it has not moved.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger("paramd")

_WORD_BYTES = 8
_HEAD = 2
"""Words at the start of every object: its type or vtable, and its reference count."""

_IMPL_WORDS, _STORAGE_WORDS = 20, 6
"""Words searched for a place; both objects are larger."""

_ODD_OFFSET = 4099
"""Storage offset of the probe tensor: no other of its words has this value."""


class _Memory:
    """This process's memory as a numpy array of words, from address 8 on."""

    __array_interface__ = {  # noqa: RUF012
        "data": (_WORD_BYTES, True),
        "shape": (1 << 53,),
        "typestr": "=i8",
        "version": 3,
    }


_memory: npt.NDArray[np.int64] = np.asarray(_Memory())


class Places(NamedTuple):
    """Offset of each word from the start of its object, in words."""

    version: int
    impl: int
    storage: int
    offset: int
    memory: int


class Glance:
    """The words of some tables and tensors at the time of its construction."""

    def __init__(
        self, tables: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor], places: Places
    ) -> None:
        """Keeps every storage alive for as long as the glance lives, so none may be one whose
        memory the script expects back.

        Raises:
            ValueError: the words disagree with what torch reports for a tensor.
        """
        self.tensors = tensors
        self._tables = tables
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        impls = [tensor._cdata for tensor in tensors]
        storages = [storage._cdata for storage in self._storages]
        self._kept = _numbers(
            (map(id, tensors), places.impl),
            (storages, places.memory),
            (map(id, tables), places.version),
        )
        self._inner = _numbers((impls, places.storage), (impls, places.offset))
        self._kept_words, self._inner_words = _read(self._kept), _read(self._inner)
        told = [*impls, *(storage.data_ptr() for storage in self._storages)]
        self._told_bytes = _WORD_BYTES * len(told)
        offsets = [int(tensor.storage_offset()) for tensor in tensors]
        if not self._kept_words.startswith(_bytes(told)) or self._inner_words != _bytes(
            [*storages, *offsets]
        ):
            raise ValueError("a tensor's memory is not laid out as expected")

    def same(self) -> bool:
        """Whether no table has changed and no tensor has moved."""
        # In this order: a TensorImpl its tensor no longer points to may have been freed.
        take = _memory.take
        return (
            take(self._kept).tobytes() == self._kept_words
            and take(self._inner).tobytes() == self._inner_words
        )

    def note_tables(self) -> bool:
        """Accept the tables as they are now; False if a tensor has moved as well."""
        now = _read(self._kept)
        told, before = now[: self._told_bytes], self._kept_words[: self._told_bytes]
        if told != before or _read(self._inner) != self._inner_words:
            return False
        self._kept_words = now
        return True


def glance_at(tables: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor]) -> Glance | None:
    """A glance at their present state; None where glances do not work."""
    places = find_places()
    try:
        return Glance(tables, tensors, places) if places is not None else None
    except Exception as error:
        log.debug("paramd: parameters are looked at one by one: %r", error)
        return None


@cache
def find_places() -> Places | None:
    """Where the words are in this process; None if one is missing or misses a kind of change."""
    if os.environ.get("PARAMD_GLANCES") == "0":
        return None
    try:
        places = Places(
            version=_version_place(),
            impl=_place(id(tensor := _tensor()), torch.Tensor.__basicsize__ // 8, tensor._cdata),
            storage=_place(tensor._cdata, _IMPL_WORDS, tensor.untyped_storage()._cdata),
            offset=_place(tensor._cdata, _IMPL_WORDS, _ODD_OFFSET),
            memory=_place(
                tensor.untyped_storage()._cdata, _STORAGE_WORDS, tensor.untyped_storage().data_ptr()
            ),
        )
        return places if all(_notices(places, change) for change in CHANGES) else None
    except Exception as error:
        log.debug("paramd: there are no glances here: %r", error)
        return None


def _replaced(table: dict[str, Any]) -> None:
    table["tensor"] = _tensor()


def _pointed_elsewhere(table: dict[str, Any]) -> None:
    table["tensor"].data = _tensor()


def _moved_in_its_storage(table: dict[str, Any]) -> None:
    tensor = table["tensor"]
    tensor.data = torch.as_strided(tensor.data, (3,), (1,), 0)


def _swapped(table: dict[str, Any]) -> None:
    torch.utils.swap_tensors(table["tensor"], _tensor())


def _given_other_memory(table: dict[str, Any]) -> None:
    table["tensor"].untyped_storage().resize_(1 << 22)


CHANGES: tuple[Callable[[dict[str, Any]], None], ...] = (
    _replaced,
    _pointed_elsewhere,
    _moved_in_its_storage,
    _swapped,
    _given_other_memory,
)
"""The ways in which a table's tensor can move."""


def _notices(places: Places, change: Callable[[dict[str, Any]], None]) -> bool:
    table = {"tensor": _tensor()}
    glance = Glance([table], [table["tensor"]], places)
    before = glance.same()
    change(table)
    return before and not glance.same()


def _tensor() -> torch.Tensor:
    return torch.empty(2 * _ODD_OFFSET, dtype=torch.uint8, device="cpu")[_ODD_OFFSET:][:3]


def _version_place() -> int:
    """The only word of a table that differs after every change of a value."""
    table: dict[str, Any] = {"key": object()}
    size = dict.__basicsize__ // _WORD_BYTES
    places = set(range(_HEAD, size))
    for _ in range(4):
        before = _words(id(table), size)
        table["key"] = object()
        places &= {at for at, word in enumerate(_words(id(table), size)) if word != before[at]}
    (place,) = places
    return place


def _place(address: int, size: int, value: int) -> int:
    """Raises ValueError when `value` is not found."""
    return _words(address, size).index(value, _HEAD)


def _words(address: int, size: int) -> list[int]:
    begin = address // _WORD_BYTES - 1
    found: list[int] = _memory[begin : begin + size].tolist()
    return found


def _numbers(*groups: tuple[Iterable[int], int]) -> npt.NDArray[np.intp]:
    """Indices into `_memory` of the word `place` words after each address of each group."""
    addresses = [a + _WORD_BYTES * place for addresses, place in groups for a in addresses]
    return np.array(addresses, np.intp) // _WORD_BYTES - 1


def _read(numbers: npt.NDArray[np.intp]) -> bytes:
    return _memory.take(numbers).tobytes()


def _bytes(words: Sequence[int]) -> bytes:
    return np.array(words, np.int64).tobytes()
