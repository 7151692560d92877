"""Memory that nobody holds gives way to every request; real memfds, counted by what they take."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paramd.errors import AbortedError, ExhaustedError
from paramd.memory.control_page import Word, in_time
from paramd.memory.descriptors import reserved_bytes
from paramd.memory.gradient_program import ARM_WORDS
from paramd.memory.left import Limit, Memory, Purpose
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.edits.memory import HEAD_BYTES, EditMemory
from paramd_service.follow.bases import Bases
from paramd_service.sidecar.copying.capture import Capture
from paramd_service.sidecar.copying.copier import Copier
from paramd_service.sidecar.faults import Faults
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.pins import Pins
from paramd_service.sidecar.room import HostRoom
from paramd_service.sidecar.snapshots.store import BlockMaker, Key, SnapshotStore
from tests.unit.sidecar.test_device_state import attached_to

MIB = 1 << 20
ARENA_BYTES = 32 * MIB
SPARE_BYTES = 40 * MIB
IDLE_BYTES = 20 * MIB
WANTED_BYTES = 25 * MIB
"""Fits once the idle memory is gone."""


def taken_bytes() -> int:
    """What all memfds of this process take."""
    found: dict[int, int] = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            if "memfd:" in os.readlink(f"/proc/self/fd/{number}"):
                of = os.stat(f"/proc/self/fd/{number}")
                found[of.st_ino] = of.st_blocks * 512
        except FileNotFoundError:
            # Closed since.
            continue
    return sum(found.values())


class Sidecar:
    """Everything of a sidecar that keeps memory, on a host with `SPARE_BYTES` above its reserve."""

    def __init__(self, thread: ThreadPoolExecutor, folder: Path) -> None:
        self.attached = attached_to(None, ARENA_BYTES)
        self._thread, self._before = thread, taken_bytes()
        self.room = HostRoom(
            folder / "rank-0.sock", 0, reserve_bytes=100 * MIB, memory=self._memory
        )
        self.room.open()
        self.blocks = BlockMaker(thread, room=self.room)
        self.store = SnapshotStore(
            budget_bytes=1 << 30, blocks=self.blocks, clock_ns=time.monotonic_ns, idle_memory_s=60.0
        )
        copier = Copier(
            Capture(self.attached.page, clock_ns=time.monotonic_ns),
            self.attached.shared.wake,
            Log(fields={}),
        )
        self.pins = Pins(
            self.attached,
            store=self.store,
            copier=copier,
            blocks=self.blocks,
            executor=thread,
            faults=Faults(""),
            room=self.room,
        )
        self.bases = Bases(self.store, budget_bytes=1 << 30, clock_ns=time.monotonic_ns)
        self.pins.keep_with(self.bases)
        copier.start()
        self.edits = EditMemory(
            self.attached.shared.edits,
            pool_bytes=MIB,
            idle_s=60.0,
            executor=thread,
            room=self.room,
        )
        self.room.free_idle_with(asyncio.get_running_loop(), self.take_idle)

    def take_idle(self) -> list[object]:
        return [*self.pins.take_idle(), *self.edits.take_idle()]

    def _memory(self) -> Memory:
        left_bytes = 100 * MIB + SPARE_BYTES - (taken_bytes() - self._before)
        return Memory((Limit("the host", 2000 * MIB, left_bytes),))

    async def close(self) -> None:
        await self.pins.close()
        await self.edits.close()
        self.room.close()
        self.attached.close()

    async def leave_idle(self, kind: str) -> None:
        """Leave `IDLE_BYTES` behind that nobody holds."""
        key = Key(1, ((0, IDLE_BYTES),))
        if kind in ("reader", "follower"):
            lease = await self.pins.prepare(key, with_buffers=False, lease_s=60.0)
            if kind == "follower":
                self.store.count_as_base(self.store.hold(lease.snapshot), True)
                state = key, lease.snapshot.state
                self.bases._kept[state] = lease.snapshot, time.monotonic_ns()
            self.store.release(lease.snapshot_id)
        elif kind == "edit":
            self.edits.free(*await self.edits.reserve(IDLE_BYTES))
        else:
            gradients = self.pins.gradient_pins.gradients
            step = self.attached.page[Word.GRADIENTS_STEP] + 1
            asked = asyncio.create_task(gradients.capture(0, step, key.spans, lambda *_: None))
            await self.armed(step)
            self.attached.page[Word.GRADIENTS_STEP] = step
            gradients.woken()
            with pytest.raises(AbortedError):
                await asked

    async def armed(self, step: int) -> None:
        async with asyncio.timeout(60):
            while in_time(step, rewound=0) not in (self.attached.page[word] for word in ARM_WORDS):
                await asyncio.sleep(0.001)

    async def ask(self, kind: str) -> None:
        """Take `WANTED_BYTES`, and give them back."""
        if kind == "edit":
            self.edits.free(*await self.edits.reserve(WANTED_BYTES))
        elif kind == "gradients":
            gradients = self.pins.gradient_pins.gradients
            step = self.attached.page[Word.GRADIENTS_STEP] + 1
            spans = ((0, WANTED_BYTES),)
            asked = asyncio.create_task(gradients.capture(0, step, spans, lambda *_: None))
            armed = asyncio.create_task(self.armed(step))
            await asyncio.wait([asked, armed], return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                armed.cancel()
                await asked
            asked.cancel()
            await asyncio.wait([asked])
        elif kind == "reader":
            key = Key(1, ((0, WANTED_BYTES),))
            lease = await self.pins.prepare(key, with_buffers=False, lease_s=60.0)
            self.store.release(lease.snapshot_id)
        else:
            # As marks are allocated, standing snapshots, and copies of other ranks.
            make = self.blocks.within(self.room, Purpose[kind]).make
            block = await asyncio.to_thread(make, WANTED_BYTES)
            block.close()


@asynccontextmanager
async def sidecar_in(folder: Path) -> AsyncIterator[Sidecar]:
    with ThreadPoolExecutor(1) as thread:
        made = Sidecar(thread, folder)
        try:
            yield made
        finally:
            await made.close()


@pytest.mark.parametrize("kept", ["reader", "follower", "edit", "gradients"])
@pytest.mark.parametrize("wanted", ["reader", "edit", "gradients", "MARK", "STANDING", "COPY"])
async def test_memory_that_nobody_holds_gives_way(kept: str, wanted: str, tmp_path: Path) -> None:
    async with sidecar_in(tmp_path) as sidecar:
        await sidecar.leave_idle(kept)
        assert taken_bytes() - sidecar._before >= IDLE_BYTES
        await sidecar.ask(wanted)


async def test_memory_that_somebody_holds_stays(tmp_path: Path) -> None:
    async with sidecar_in(tmp_path) as sidecar:
        key = Key(1, ((0, IDLE_BYTES),))
        await sidecar.pins.prepare(key, with_buffers=False, lease_s=60.0)
        with pytest.raises(ExhaustedError, match="a restore point needs"):
            await sidecar.ask("MARK")


async def test_a_slot_that_the_trainer_may_be_filling_stays_until_its_update_is_over(
    tmp_path: Path,
) -> None:
    """It would fill fresh pages, which nobody asked for and which may not be there."""
    async with sidecar_in(tmp_path) as sidecar:
        page, gradients = sidecar.attached.page, sidecar.pins.gradient_pins.gradients
        spans = ((0, IDLE_BYTES),)
        asked = asyncio.create_task(gradients.capture(0, 1, spans, lambda *_: None))
        await sidecar.armed(1)
        asked.cancel()
        await asyncio.wait([asked])
        assert not gradients.take_idle()
        with pytest.raises(ExhaustedError, match="a restore point needs"):
            await sidecar.ask("MARK")
        page[Word.GRADIENTS_STEP] = 1
        assert gradients.idle_bytes >= IDLE_BYTES
        await sidecar.ask("MARK")
        assert not reserved_bytes(sidecar.attached.shared.gradients)


async def test_an_unused_slot_gives_way_while_the_other_one_is_in_use(tmp_path: Path) -> None:
    async with sidecar_in(tmp_path) as sidecar:
        gradients = sidecar.pins.gradient_pins.gradients
        await sidecar.leave_idle("gradients")
        key = Key(1, ((IDLE_BYTES, IDLE_BYTES + 64),), pb.SOURCE_GRADIENTS)
        asked = [
            asyncio.create_task(gradients.capture(0, step, key.spans, lambda *_: None))
            for step in (2, 3)
        ]
        await sidecar.armed(2)
        await sidecar.armed(3)
        # Both are in use now: the one that still has the old pages keeps them.
        assert not gradients.idle_bytes
        asked[0].cancel()
        sidecar.attached.page[Word.GRADIENTS_STEP] = 2
        gradients.woken()
        await asyncio.wait([asked[0]])
        await sidecar.ask("MARK")
        assert reserved_bytes(sidecar.attached.shared.gradients)
        asked[1].cancel()
        await asyncio.wait([asked[1]])


async def test_a_range_whose_pages_are_just_being_released_can_be_reserved(tmp_path: Path) -> None:
    async with sidecar_in(tmp_path) as sidecar:
        edits = sidecar.edits
        end = edits.sparse.size_bytes
        begin = end - IDLE_BYTES
        # Nothing else is free.
        edits.take(HEAD_BYTES, end)
        edits.free(begin, end)
        releases = edits.take_idle()
        assert not edits.free_bytes
        reserving = asyncio.create_task(edits.reserve(IDLE_BYTES))
        await asyncio.sleep(0)
        for release in releases:
            release()
        assert await reserving == (begin, end)
