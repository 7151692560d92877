"""See at a glance that no tensor of a table has moved.

Looking at 300 tensors and 226 tables (watch.py) takes Python some 40 us. A glance takes 3: it
gathers the words of memory behind those answers, and skips the look when none has changed:

    dict            its version: a number that rises with every change (CPython up to 3.13)
    tensor object   -> TensorImpl
    TensorImpl      -> StorageImpl, the offset in it, and the sizes and strides
    StorageImpl     -> memory

These offsets are undocumented, so none is assumed: each is found by probing objects made for
it, used only if every kind of change shows there, and checked against what torch reports for
each watched tensor. If any of this fails (another Python, another torch), or with
PARAMD_GLANCES=0, every look is a full one.

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

_ODD_SIZES, _ODD_STRIDES = (3, 7, 11, 13, 19), (23, 29, 31, 37, 41)
"""Sizes and strides of another one."""

INLINE_DIMS = 5
"""Most dims whose sizes and strides lie in the TensorImpl itself."""


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
    sizes: int
    """The first one; the word before it is the number of dims."""
    strides: int
    memory: int


class Glance:
    """The words of some tables and tensors at the time of its construction."""

    def __init__(
        self, tables: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor], places: Places
    ) -> None:
        """Keeps every storage alive for as long as the glance lives: none whose memory the script
        expects back.

        Raises:
            ValueError: If the words disagree with torch's report for a tensor.
        """
        self.tensors = tensors
        self._tables = tables
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        impls = [tensor._cdata for tensor in tensors]
        storages = [storage._cdata for storage in self._storages]
        having = _by_dim(tensors)
        self._kept = _numbers(
            (map(id, tensors), places.impl),
            (storages, places.memory),
            (map(id, tables), places.version),
        )
        self._inner = _inner_numbers(tensors, having, places)
        self._kept_words, self._inner_words = _read(self._kept), _read(self._inner)
        known = [*impls, *(storage.data_ptr() for storage in self._storages)]
        self._known_bytes = _WORD_BYTES * len(known)
        inner = _inner_reported(tensors, having, storages)
        if not self._kept_words.startswith(_bytes(known)) or self._inner_words != _bytes(inner):
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
        known, before = now[: self._known_bytes], self._kept_words[: self._known_bytes]
        if known != before or _read(self._inner) != self._inner_words:
            return False
        self._kept_words = now
        return True


def _by_dim(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Of each dim, the tensors that have it."""
    return [[tensor for tensor in tensors if tensor.dim() > dim] for dim in range(INLINE_DIMS)]


def _inner_numbers(
    tensors: Sequence[torch.Tensor], having: Sequence[Sequence[torch.Tensor]], places: Places
) -> npt.NDArray[np.intp]:
    """The words of the tensors' TensorImpls: storages, offsets, dims, sizes and strides."""
    impls = [tensor._cdata for tensor in tensors]
    dims = [[tensor._cdata for tensor in those] for those in having]
    return _numbers(
        (impls, places.storage),
        (impls, places.offset),
        (impls, places.sizes - 1),
        *((those, places.sizes + dim) for dim, those in enumerate(dims)),
        *((those, places.strides + dim) for dim, those in enumerate(dims)),
    )


def _inner_reported(
    tensors: Sequence[torch.Tensor],
    having: Sequence[Sequence[torch.Tensor]],
    storages: Sequence[int],
) -> list[int]:
    """What torch reports of the same, in the order of `_inner_numbers`."""
    return [
        *storages,
        *(int(tensor.storage_offset()) for tensor in tensors),
        *(tensor.dim() for tensor in tensors),
        *(tensor.size(dim) for dim, those in enumerate(having) for tensor in those),
        *(tensor.stride(dim) for dim, those in enumerate(having) for tensor in those),
    ]


def glance_at(tables: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor]) -> Glance | None:
    """A glance at their present state; None where glances do not work."""
    places = find_places()
    try:
        return Glance(tables, tensors, places) if places is not None else None
    except Exception as error:
        log.debug("paramd: parameters are compared one at a time: %r", error)
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
            sizes=_place_of_all((shaped := _shaped())._cdata, _ODD_SIZES),
            strides=_place_of_all(shaped._cdata, _ODD_STRIDES),
            memory=_place(
                tensor.untyped_storage()._cdata, _STORAGE_WORDS, tensor.untyped_storage().data_ptr()
            ),
        )
        return places if all(_notices(places, change) for change in CHANGES) else None
    except Exception as error:
        log.debug("paramd: glances are not available: %r", error)
        return None


def _replaced(table: dict[str, Any]) -> None:
    table["tensor"] = _tensor()


def _pointed_elsewhere(table: dict[str, Any]) -> None:
    table["tensor"].data = _tensor()


def _moved_in_its_storage(table: dict[str, Any]) -> None:
    tensor = table["tensor"]
    tensor.data = torch.as_strided(tensor.data, (3,), (1,), 0)


def _shortened(table: dict[str, Any]) -> None:
    tensor = table["tensor"]
    tensor.data = tensor.data[:2]


def _spread(table: dict[str, Any]) -> None:
    tensor = table["tensor"]
    tensor.data = torch.as_strided(tensor.data, (3,), (2,))


def _given_another_dim(table: dict[str, Any]) -> None:
    tensor = table["tensor"]
    tensor.data = tensor.data.view(3, 1)


def _swapped(table: dict[str, Any]) -> None:
    torch.utils.swap_tensors(table["tensor"], _tensor())


def _given_other_memory(table: dict[str, Any]) -> None:
    table["tensor"].untyped_storage().resize_(1 << 22)


CHANGES: tuple[Callable[[dict[str, Any]], None], ...] = (
    _replaced,
    _pointed_elsewhere,
    _moved_in_its_storage,
    _shortened,
    _spread,
    _given_another_dim,
    _swapped,
    _given_other_memory,
)
"""All ways in which a table's tensor can move."""


def _notices(places: Places, change: Callable[[dict[str, Any]], None]) -> bool:
    table = {"tensor": _tensor()}
    glance = Glance([table], [table["tensor"]], places)
    before = glance.same()
    change(table)
    return before and not glance.same()


def _tensor() -> torch.Tensor:
    return torch.empty(2 * _ODD_OFFSET, dtype=torch.uint8, device="cpu")[_ODD_OFFSET:][:3]


def _shaped() -> torch.Tensor:
    last = sum((n - 1) * step for n, step in zip(_ODD_SIZES, _ODD_STRIDES, strict=True))
    memory = torch.empty(last + 1, dtype=torch.uint8, device="cpu")
    return memory.as_strided(_ODD_SIZES, _ODD_STRIDES)


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


def _place_of_all(address: int, values: tuple[int, ...]) -> int:
    """The place of the first of values that stand side by side. Raises as `_place`."""
    at = _place(address, _IMPL_WORDS, values[0])
    if _words(address, _IMPL_WORDS)[at : at + len(values)] != list(values):
        raise ValueError("the values are not side by side")
    return at


def _words(address: int, size: int) -> list[int]:
    begin = address // _WORD_BYTES - 1
    words: list[int] = _memory[begin : begin + size].tolist()
    return words


def _numbers(*groups: tuple[Iterable[int], int]) -> npt.NDArray[np.intp]:
    addresses = [a + _WORD_BYTES * place for addresses, place in groups for a in addresses]
    return np.array(addresses, np.intp) // _WORD_BYTES - 1


def _read(numbers: npt.NDArray[np.intp]) -> bytes:
    return _memory.take(numbers).tobytes()


def _bytes(words: Sequence[int]) -> bytes:
    return np.array(words, np.int64).tobytes()
