"""Device memory that a sidecar makes for its trainer's optimizer state; simulated."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paramd import places
from paramd.errors import ExhaustedError, UsageError
from paramd.memory import device_arena
from paramd.memory.control_page import Word
from paramd.memory.device_arena import STATE_BASE, DeviceArenaRequest, TrainerDevice
from paramd.memory.gate import CopySpan, LateError
from paramd.memory.handover import MAX_ALLOCATIONS, optimizer_bytes
from paramd.memory.optimizer_state import DEVICE_PLACES
from paramd_service.sidecar.owner import AttachedMemory, AttachRequest, attach_memory
from paramd_service.sidecar.snapshots.moments import READ_BYTES, Moments
from tests.gpu.driver import Standin, driver_in

ARENA_BYTES = 4096


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    with driver_in(tmp_path) as (driver, found):
        monkeypatch.setattr(device_arena, "load", lambda *_: driver)
        yield found


def attached_to(device: DeviceArenaRequest | None) -> AttachedMemory:
    pid = os.getpid()
    request = AttachRequest(
        job="job",
        incarnation=1,
        rank=0,
        world_size=1,
        pid=pid,
        start=places.process_start(pid),
        arena_bytes=ARENA_BYTES,
        public_key=b"",
        version="",
        rank_ticket="",
        device=device,
    )
    return attach_memory(request, [])


@pytest.fixture
def attached(standin: Standin) -> Iterator[AttachedMemory]:
    trainer = TrainerDevice(device_arena.load(), 0)
    made = attached_to(trainer.request)
    yield made
    made.close()
    trainer.close()


def test_memory_that_never_reached_the_trainer_gives_way_to_the_next(
    attached: AttachedMemory,
) -> None:
    first = attached.add_state(0, 100)
    lost = attached.add_state(1, 100)
    room = ctypes.create_string_buffer(8)
    second_begin = STATE_BASE + first.size_bytes
    attached.copy([CopySpan(second_begin, ctypes.addressof(room), 8)])
    assert not any(room.raw)
    second = attached.add_state(1, 100)
    assert attached.shared.state == [first, second]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lost.descriptor)
    os.pwrite(second.descriptor, b"second's", 0)  # the simulated device's memory is a file
    attached.copy([CopySpan(second_begin, ctypes.addressof(room), 8)])
    assert room.raw == b"second's"


def test_numbers_on_the_device_are_read_in_blocks(
    attached: AttachedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = attached.add_state(0, 3 * READ_BYTES).descriptor
    attached.page[Word.STATE_BYTES] = READ_BYTES + 4
    os.pwrite(memory, b"first", 0)
    os.pwrite(memory, b"across", READ_BYTES - 3)
    copied = []

    def copy(spans: Sequence[CopySpan]) -> None:
        copied.extend(spans)
        attached.copy(spans)

    live = Moments(attached)
    monkeypatch.setattr(live, "_copy", copy)
    read = live.reader()
    assert read(DEVICE_PLACES, 5) == b"first"
    assert read(DEVICE_PLACES + READ_BYTES - 3, 6) == b"across"
    assert read(DEVICE_PLACES + 1, 4) == b"irst"
    assert [span.size_bytes for span in copied] == [READ_BYTES, 4]
    with pytest.raises(LateError):
        read(DEVICE_PLACES + READ_BYTES, 5)
    live.close()


def test_no_more_is_made_than_has_a_place(attached: AttachedMemory, standin: Standin) -> None:
    most_bytes = optimizer_bytes(ARENA_BYTES)
    for known_count, size_bytes in ((0, most_bytes + 1), (0, 0), (-1, 8), (1, 8)):
        with pytest.raises(UsageError, match="state: "):
            attached.add_state(known_count, size_bytes)
    for known_count in range(MAX_ALLOCATIONS):
        attached.add_state(known_count, 8)
    with pytest.raises(UsageError, match=f"at most {MAX_ALLOCATIONS}"):
        attached.add_state(MAX_ALLOCATIONS, 8)
    standin.fail("cuMemCreate=2")
    with pytest.raises(ExhaustedError, match="bytes of device memory"):
        attached.add_state(0, 8)
    assert len(attached.shared.state) == MAX_ALLOCATIONS


def test_there_is_none_beside_parameters_in_host_memory() -> None:
    attached = attached_to(None)
    with pytest.raises(UsageError, match="in host memory"):
        attached.add_state(0, 8)
    attached.close()
