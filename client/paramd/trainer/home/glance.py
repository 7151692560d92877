"""Whether tables and tensors are as they were, told by a few words of their own memory.

To ask 300 tensors where they are, and 226 tables what stands in them, takes Python some 40 us.
To gather the words that such answers come from takes 3:

    dict            its version: a number that rises with every change (CPython up to 3.13)
    tensor object   -> TensorImpl
    TensorImpl      -> StorageImpl, and the offset in it
    StorageImpl     -> memory

Nobody promises where these words are, so nothing is assumed: each place is found in objects made
for it, used only if every kind of change shows there, and compared with what torch says of each
tensor that is watched. Where one of that fails (another Python, another torch) there is no
glance, and every look is a slow one (watch.py); so it is with PARAMD_GLANCES=0.

Only memory of living objects is read. Tables, tensors and storages are kept alive here; a
TensorImpl lives as long as a tensor has it, so it is read after its tensor was seen to have it.
A glance never tells where a tensor is, only that it is where it was.
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
"""Words at the begin of every object: its type or methods, and its count of references."""

_IMPL_WORDS, _STORAGE_WORDS = 20, 6
"""Words in which a place is looked for; both objects are larger."""

_ODD_OFFSET = 4099
"""Of a tensor made to find the place of its offset: no other of its words has this value."""


class _Memory:
    """The memory of this process to numpy: words, from address 8 on."""

    __array_interface__ = {  # noqa: RUF012
        "data": (_WORD_BYTES, True),
        "shape": (1 << 53,),
        "typestr": "=i8",
        "version": 3,
    }


_memory: npt.NDArray[np.int64] = np.asarray(_Memory())


class Places(NamedTuple):
    """How many words behind the begin of its object each word stands."""

    version: int
    impl: int
    storage: int
    offset: int
    memory: int


class Glance:
    """The words of some tables and tensors, as they were when it was made."""

    def __init__(
        self, tables: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor], places: Places
    ) -> None:
        """Each storage must be one that nobody misses: it is kept as long as the glance is.

        Raises:
            ValueError: the words are not what torch says of a tensor.
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
        """Whether no table and no tensor's place in memory has changed."""
        # In this order: a TensorImpl that its tensor has lost may be gone.
        take = _memory.take
        return (
            take(self._kept).tobytes() == self._kept_words
            and take(self._inner).tobytes() == self._inner_words
        )

    def note_tables(self) -> bool:
        """Takes the tables as they are now; False when a tensor's place has changed as well."""
        now = _read(self._kept)
        told, before = now[: self._told_bytes], self._kept_words[: self._told_bytes]
        if told != before or _read(self._inner) != self._inner_words:
            return False
        self._kept_words = now
        return True


def glance_at(tables: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor]) -> Glance | None:
    """A glance at them as they are now; None where there is no way to have one."""
    places = find_places()
    try:
        return Glance(tables, tensors, places) if places is not None else None
    except Exception as error:
        log.debug("paramd: parameters are looked at one by one: %r", error)
        return None


@cache
def find_places() -> Places | None:
    """Where the words are in this process; None when not all are found, or tell too little."""
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
"""The ways in which a table's tensor comes to be elsewhere."""


def _notices(places: Places, change: Callable[[dict[str, Any]], None]) -> bool:
    table = {"tensor": _tensor()}
    glance = Glance([table], [table["tensor"]], places)
    before = glance.same()
    change(table)
    return before and not glance.same()


def _tensor() -> torch.Tensor:
    return torch.empty(2 * _ODD_OFFSET, dtype=torch.uint8, device="cpu")[_ODD_OFFSET:][:3]


def _version_place() -> int:
    """The only word of a table that is another one after each change of a value."""
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
    """Raises ValueError when `value` does not stand there."""
    return _words(address, size).index(value, _HEAD)


def _words(address: int, size: int) -> list[int]:
    begin = address // _WORD_BYTES - 1
    found: list[int] = _memory[begin : begin + size].tolist()
    return found


def _numbers(*groups: tuple[Iterable[int], int]) -> npt.NDArray[np.intp]:
    """For numpy: the word `place` words behind each address of each group."""
    addresses = [a + _WORD_BYTES * place for addresses, place in groups for a in addresses]
    return np.array(addresses, np.intp) // _WORD_BYTES - 1


def _read(numbers: npt.NDArray[np.intp]) -> bytes:
    return _memory.take(numbers).tobytes()


def _bytes(words: Sequence[int]) -> bytes:
    return np.array(words, np.int64).tobytes()
