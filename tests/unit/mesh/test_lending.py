"""Memory that a client lends: found by address, used again, and let go of."""

import ctypes
import fcntl
import gc
import os
from collections.abc import Iterator

import pytest

from paramd.memory.descriptors import LentMemory, lent_memory
from paramd.mesh.edits.lending import Lender


@pytest.fixture
def lender() -> Iterator[Lender]:
    lender = Lender()
    yield lender
    lender.close()


def test_lent_memory_is_found_by_its_bytes_and_keeps_its_size() -> None:
    memory = LentMemory(5000)
    assert lent_memory(memory.address + 4990, 10) is memory
    assert memory.begin_of(memory.address + 4990, 10) == 4990
    assert lent_memory(memory.address + 4990, 11) is None
    assert lent_memory(memory.address - 1, 1) is None
    for size_bytes in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, size_bytes)
    assert fcntl.fcntl(memory.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    address, descriptor = memory.address, memory.descriptor
    del memory
    gc.collect()
    assert lent_memory(address, 1) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_memory_is_lent_again_once_nothing_uses_it(lender: Lender) -> None:
    first = lender.lend(8192)
    address, second = ctypes.addressof(first), lender.lend(8192)
    assert ctypes.addressof(second) != address
    view = memoryview(first).cast("B")
    del first
    third = lender.lend(8192)  # the view still uses the first
    assert ctypes.addressof(third) not in (address, ctypes.addressof(second))
    view[:] = b"\x07" * len(view)
    assert bytes(third) == bytes(8192)
    address = ctypes.addressof(third)
    del third
    assert ctypes.addressof(lender.lend(4096)) == address
    assert ctypes.addressof(second) != ctypes.addressof(lender.lend(16384))
