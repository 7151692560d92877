"""Device memory that a sidecar makes for its trainer's optimizer state; simulated."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramd import places
from paramd.errors import ExhaustedError, UsageError
from paramd.memory import device_arena
from paramd.memory.device_arena import STATE_BASE, DeviceArenaRequest, TrainerDevice
from paramd.memory.gate import CopySpan
from paramd.memory.handover import MAX_ALLOCATIONS, optimizer_bytes
from paramd_service.sidecar.owner import AttachedMemory, AttachRequest, attach_memory
from paramd_service.sidecar.snapshots.store import Block
from tests.gpu.driver import Standin, driver_in

ARENA_BYTES = 4096


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    with driver_in(tmp_path) as (driver, found):
        monkeypatch.setattr(device_arena, "load", lambda *_: driver)
        yield found


def attached_to(device: DeviceArenaRequest | None, arena_bytes: int) -> AttachedMemory:
    """The memory that a sidecar shares with a trainer in this process."""
    pid = os.getpid()
    request = AttachRequest(
        job="job", incarnation=1, rank=0, world_size=1, pid=pid, start=places.process_start(pid),
        arena_bytes=arena_bytes, public_key=b"", version="", rank_ticket="", device=device,
    )  # fmt: skip
    return attach_memory(request, [])


@pytest.fixture
def attached(standin: Standin) -> Iterator[AttachedMemory]:
    trainer = TrainerDevice(device_arena.load(), 0)
    made = attached_to(trainer.request, ARENA_BYTES)
    yield made
    made.close()
    trainer.close()


def test_memory_that_never_reached_the_trainer_gives_way_to_the_next(
    attached: AttachedMemory,
) -> None:
    first, lost = attached.add_state(0, 100), attached.add_state(1, 100)
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


def test_a_block_whose_pages_cannot_be_locked_is_given_back(
    attached: AttachedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(attached.device, "lock", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Block(8, attached.device)
    assert os.listdir("/proc/self/fd") == before
