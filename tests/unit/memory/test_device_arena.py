"""The driver's binding and arenas on a device, on the simulated driver of tests/gpu/driver."""

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paramd.errors import ExhaustedError
from paramd.memory import device_arena
from paramd.memory.control_page import Word
from paramd.memory.device_arena import (
    BASE,
    LOCKED_BYTES,
    STATE_BASE,
    WINDOW_BYTES,
    WINDOWS,
    Addresses,
    DeviceMap,
    DeviceReader,
    TrainerDevice,
    create,
    create_allocation,
)
from paramd.memory.device_driver import CUDA, HIP, HIP_VARIABLE, VARIABLE, DeviceError, Driver
from paramd.memory.device_symbols import CURES
from paramd.memory.gate import CopySpan, LateError
from paramd.trainer.home.device import _kind
from tests.gpu.driver import POISON, Standin, driver_in

ARENA_BYTES = 3 * WINDOW_BYTES * WINDOWS // 2 + 4096
WORD = 0x01010101


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Driver, Standin]]:
    monkeypatch.setenv("PARAMD_STANDIN_LATE_US", "3000")
    with driver_in(tmp_path) as (driver, standin):
        monkeypatch.setattr(device_arena, "load", lambda *_: driver)
        yield driver, standin


class Both:
    """A trainer's device and a sidecar's reader of one arena."""

    def __init__(self, driver: Driver, arena_bytes: int = ARENA_BYTES) -> None:
        self.driver = driver
        self.words = [0] * 512
        self.descriptor = create(driver, 0, arena_bytes)
        self.trainer = TrainerDevice(driver, 0)
        self.map = self.trainer.open(self.descriptor, arena_bytes, self.words)
        self.reader = DeviceReader(self.trainer.request, self.descriptor, arena_bytes, self.words)

    def update(self, value: int) -> None:
        """Queue an update; it is not done when this returns."""
        self.driver.fill(self.map.address, value * WORD, self.map.size_bytes // 4, 0)

    def read(self) -> set[int]:
        """The values of the bytes that a reader gets."""
        room = ctypes.create_string_buffer(self.map.size_bytes)
        self.reader.move([CopySpan(BASE, ctypes.addressof(room), self.map.size_bytes)])
        return set(room.raw)

    def close(self) -> None:
        self.trainer.finish()
        self.reader.close()
        self.map.close()
        self.trainer.close()
        os.close(self.descriptor)


@pytest.fixture
def both(loaded: tuple[Driver, Standin]) -> Iterator[Both]:
    made = Both(loaded[0])
    yield made
    made.close()


def test_an_arena_is_made_without_a_context_and_read_with_one(
    both: Both, loaded: tuple[Driver, Standin]
) -> None:
    _, standin = loaded
    before = standin.contexts  # the trainer's, in this process
    assert not both.reader.is_open
    both.update(1)
    both.trainer.publish()
    assert both.read() == {1}
    assert both.reader.is_open
    assert standin.contexts == before == 1


def test_a_copy_waits_for_the_update_that_was_published(both: Both) -> None:
    for value in range(1, 6):
        both.update(value)
        both.trainer.publish()
        assert both.read() == {value}


def test_scattered_spans_are_copied_behind_one_look_at_the_fence(both: Both) -> None:
    both.update(1)
    both.driver.fill(both.map.address + 4096, 2 * WORD, 1024, 0)
    both.trainer.publish()
    size = 3 * WINDOW_BYTES // 2
    room = ctypes.create_string_buffer(size + 8 + 100)
    target = ctypes.addressof(room)
    host = ctypes.create_string_buffer(b"h" * 100)
    both.reader.move(
        [
            CopySpan(BASE + 4096 + 1024 * 4, target, size),
            CopySpan(BASE + 4096, target + size, 8),
            CopySpan(ctypes.addressof(host), target + size + 8, 100),
        ]
    )
    assert room.raw == bytes([1]) * size + bytes([2]) * 8 + b"h" * 100


def test_a_copy_that_no_event_orders_is_seen(both: Both, loaded: tuple[Driver, Standin]) -> None:
    both.update(1)
    both.trainer.publish()
    assert both.read() == {1}
    assert loaded[1].unordered == 0
    both.words[Word.DEVICE_FENCE] = 0
    both.update(2)
    assert both.read() == {POISON}
    assert loaded[1].unordered > 0


def test_a_device_that_does_not_finish_costs_the_reader_a_deadline(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_arena, "LATE_S", 0.05)
    monkeypatch.setenv("PARAMD_STANDIN_LATE_US", "400000")
    both.update(1)
    both.trainer.publish()
    with pytest.raises(LateError):
        both.read()
    monkeypatch.setenv("PARAMD_STANDIN_LATE_US", "0")
    both.trainer.finish()
    assert both.read() == {1}


def test_the_fence_tells_whether_the_device_finished_what_was_told(both: Both) -> None:
    assert both.reader.is_whole()  # nothing was told
    both.update(1)
    both.trainer.publish()
    assert both.reader.is_whole()
    told = both.words[Word.DEVICE_FENCE]
    both.words[Word.DEVICE_FENCE] = told + 1  # as if killed before the device came to it
    assert not both.reader.is_whole()
    with pytest.raises(LateError):
        both.read()
    both.reader.trainer_ended = True
    with pytest.raises(LateError):
        both.read()
    both.words[Word.DEVICE_FENCE] = told
    assert both.read() == {1}


def test_page_locked_memory_is_filled_by_the_device_beside_other_targets(
    both: Both, loaded: tuple[Driver, Standin]
) -> None:
    room, other = ctypes.create_string_buffer(ARENA_BYTES), ctypes.create_string_buffer(4096)
    address = ctypes.addressof(room)
    assert not both.reader.lock(address, LOCKED_BYTES - 1)  # not worth it
    assert both.reader.lock(address, ARENA_BYTES)
    assert loaded[1].locked == 1
    for value in range(1, 4):
        both.update(value)
        both.trainer.publish()
        both.reader.move(
            [CopySpan(BASE, address, ARENA_BYTES), CopySpan(BASE, ctypes.addressof(other), 4096)]
        )
        assert set(room.raw) == set(other.raw) == {value}
    both.reader.unlock(address)
    both.reader.unlock(address)
    assert loaded[1].locked == 0
    assert both.reader.lock(address, ARENA_BYTES)
    both.reader.close()
    assert loaded[1].locked == 0


def test_memory_whose_copy_was_given_up_is_late_until_the_end(
    both: Both, loaded: tuple[Driver, Standin], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = ctypes.create_string_buffer(ARENA_BYTES)
    address = ctypes.addressof(room)
    assert both.reader.lock(address, ARENA_BYTES)
    assert not both.reader.is_late(address)
    both.update(1)
    both.trainer.publish()
    both.trainer.finish()
    monkeypatch.setattr(device_arena, "LATE_S", 0.05)
    monkeypatch.setenv("PARAMD_STANDIN_LATE_US", "200000")
    with pytest.raises(LateError):
        both.reader.move([CopySpan(BASE, address, ARENA_BYTES)])
    assert both.reader.is_late(address)
    both.reader.unlock(address)
    assert loaded[1].locked == 1  # its pages stay the device's
    monkeypatch.setenv("PARAMD_STANDIN_LATE_US", "0")
    monkeypatch.setattr(device_arena, "LATE_S", 5.0)
    assert both.read() == {1}  # behind the one that was given up
    assert (loaded[1].locked, both.reader.is_late(address)) == (0, False)


def test_while_pages_are_locked_or_where_the_driver_refuses_copies_take_windows(
    both: Both, loaded: tuple[Driver, Standin], monkeypatch: pytest.MonkeyPatch
) -> None:
    both.update(1)
    both.trainer.publish()
    found: list[set[int]] = []
    lock_pages = both.driver.lock_pages

    def slowly(address: int, size_bytes: int) -> None:
        reading = threading.Thread(target=lambda: found.append(both.read()), daemon=True)
        reading.start()
        reading.join(10)
        loaded[1].fail("cuMemHostRegister_v2=801")
        lock_pages(address, size_bytes)

    monkeypatch.setattr(both.driver, "lock_pages", slowly)
    room = ctypes.create_string_buffer(ARENA_BYTES)
    assert not both.reader.lock(ctypes.addressof(room), ARENA_BYTES)
    loaded[1].fail("")
    assert (found, both.read()) == ([{1}], {1})


def test_the_trainer_knows_whether_the_device_is_behind(
    both: Both, loaded: tuple[Driver, Standin]
) -> None:
    both.update(1)
    both.trainer.note_queued()
    assert both.trainer.behind()
    loaded[1].capture(True)
    both.trainer.note_queued()
    assert not both.trainer.behind()  # not asked
    loaded[1].capture(False)
    both.trainer.finish()
    both.trainer.note_queued()
    both.trainer.finish()
    assert not both.trainer.behind()


def read_state(reader: DeviceReader, begin: int, size_bytes: int) -> set[int]:
    """The values of bytes of optimizer state as a reader gets them."""
    room = ctypes.create_string_buffer(size_bytes)
    reader.move([CopySpan(STATE_BASE + begin, ctypes.addressof(room), size_bytes)])
    return set(room.raw)


def test_state_is_read_across_allocations_once_the_event_behind_it_has_come(
    both: Both, loaded: tuple[Driver, Standin]
) -> None:
    driver, standin = loaded
    allocations = [create_allocation(driver, 0, 4096)]
    size = allocations[0].size_bytes
    state = Addresses(driver, 0, 4 * size)
    both.reader.has_state(allocations)
    state.map(allocations[0].descriptor, size)
    driver.fill(state.address, WORD, size // 4, 0)
    both.trainer.publish()
    assert read_state(both.reader, 0, size) == {1}
    with pytest.raises(LateError):
        read_state(both.reader, 0, size + 4)  # what has no memory yet
    allocations.append(create_allocation(driver, 0, 1))
    both.reader.has_state(allocations)
    state.map(allocations[1].descriptor, size)
    driver.fill(state.address, 2 * WORD, 2 * size // 4, 0)
    assert read_state(both.reader, size - 64, 128) == {POISON}  # behind no event
    assert standin.unordered
    both.trainer.publish()
    assert read_state(both.reader, size - 64, 128) == {2}
    # An allocation that never reached the trainer gives way to the next.
    lost, allocations[1] = allocations[1], create_allocation(driver, 0, 1)
    both.reader.has_state(allocations)
    state.unmap()
    state.map(allocations[1].descriptor, size)
    driver.fill(state.address, 3 * WORD, 2 * size // 4, 0)
    both.trainer.publish()
    assert read_state(both.reader, 0, 2 * size) == {3}
    state.close()
    for allocation in (lost, *allocations):
        os.close(allocation.descriptor)


def test_memory_lives_as_long_as_its_last_descriptor(loaded: tuple[Driver, Standin]) -> None:
    driver, _ = loaded
    descriptor = create(driver, 0, 8)
    first = DeviceMap(driver, 0, descriptor, 8)
    ctypes.memmove(first.address, b"stays", 5)
    first.close()
    second = DeviceMap(driver, 0, descriptor, 8)
    assert ctypes.string_at(second.address, 5) == b"stays"
    second.close()
    second.close()
    os.close(descriptor)


@pytest.mark.parametrize("code", [1, 3, 100, 101, 201, 304, 400, 800, 801, 999])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap"])
def test_every_refusal_names_call_code_and_cure(
    loaded: tuple[Driver, Standin], call: str, code: int
) -> None:
    driver, standin = loaded
    standin.fail(f"{call}={code}")
    with pytest.raises(DeviceError) as refused:
        made_and_mapped(driver)
    assert (refused.value.call, refused.value.code) == (call, code)
    text = str(refused.value)
    assert call in text
    assert str(code) in text
    assert CURES.get(code, "arena='mirror'") in text


def made_and_mapped(driver: Driver) -> None:
    descriptor = create(driver, 0, 8)
    try:
        DeviceMap(driver, 0, descriptor, 8)
    finally:
        os.close(descriptor)


def test_a_full_device_is_told_as_such(loaded: tuple[Driver, Standin]) -> None:
    with pytest.raises(ExhaustedError, match=r"bytes of device memory.*CUDA_ERROR_OUT_OF_MEMORY"):
        create(loaded[0], 0, 1 << 40)


def test_a_device_of_another_process_is_found_by_its_uuid(loaded: tuple[Driver, Standin]) -> None:
    driver, _ = loaded
    assert driver.device(driver.uuid(0)) == 0
    with pytest.raises(DeviceError, match="is not visible here"):
        driver.device(bytes(16))


@pytest.mark.parametrize("build", ["none", "cuda", "hip"])
def test_the_driver_is_the_one_that_torch_was_built_for_and_a_simulated_one_the_named(
    build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (VARIABLE, HIP_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if build == "cuda" else None)
    monkeypatch.setattr(torch.version, "hip", "7.1" if build == "hip" else None)
    device, host, own = torch.device("cuda:0"), torch.device("cpu"), HIP if build == "hip" else CUDA
    assert (_kind(device), _kind(host)) == (own, own)
    monkeypatch.setenv(HIP_VARIABLE, "named.so")
    # A library of AMD's that is named on a host with NVIDIA's devices is not asked for them.
    assert (_kind(device), _kind(host)) == (own, HIP)
