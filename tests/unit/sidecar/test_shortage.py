"""The watch over memory of one rank: looks by time, and those that the kernel calls for."""

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from paramd.memory.control_page import Word
from paramd.memory.left import Limit, Memory
from paramd_service.aio import stopped
from paramd_service.sidecar import shortage as module
from paramd_service.sidecar.config import SidecarConfig
from paramd_service.sidecar.faults import Faults
from paramd_service.sidecar.log import Log
from paramd_service.sidecar.owner import Ownership
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.room import HostRoom
from paramd_service.sidecar.shortage import CALM_S, Pressure, Shortage, Spells
from paramd_service.sidecar.snapshots.store import Block, BlockMaker
from tests.unit.sidecar.test_device_state import attached_to

MIB = 1 << 20
CPU = Path("/proc/pressure/cpu")
"""The kernel's events are alike for CPU, whose pressure a test can make without harm."""


class Lines:
    """The sidecar's log."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, line: str) -> None:
        self.text += line

    def flush(self) -> None:
        """Nothing is kept."""


class Watched:
    """A rank on a host with 60 MiB above its reserve, of which blocks are taken."""

    def __init__(self, folder: Path, thread: ThreadPoolExecutor) -> None:
        self.lines, self.taken, self.looks = Lines(), list[Block](), 0
        self.rank = RankSidecar(
            SidecarConfig(job="job", rank=0, socket_path=folder / "rank-0.sock"),
            blocks=BlockMaker(thread),
            executor=thread,
            stats_executor=thread,
            faults=Faults(""),
            log=Log(fields={}, stream=self.lines),
        )
        self.rank.room = HostRoom(
            folder / "rank-0.sock", 0, reserve_bytes=100 * MIB, memory=self._memory
        )
        self.rank.room.open()

    def _memory(self) -> Memory:
        self.looks += 1
        taken_bytes = sum(block.size_bytes for block in self.taken)
        return Memory((Limit("the host", 2000 * MIB, 160 * MIB - taken_bytes),))

    def take(self, size_bytes: int) -> None:
        self.taken.append(Block(size_bytes))

    async def looked(self) -> None:
        """Wait for another look."""
        before = self.looks
        async with asyncio.timeout(120):
            while self.looks == before:
                await asyncio.sleep(0.005)

    async def told(self, text: str) -> None:
        """Wait until the rank's status says so."""
        async with asyncio.timeout(120):
            while text not in self.rank.shortage or bool(text) != bool(self.rank.shortage):
                await asyncio.sleep(0.005)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    with ThreadPoolExecutor(1) as thread:
        made = Watched(tmp_path, thread)
        try:
            yield made
        finally:
            for block in made.taken:
                block.close()
            made.rank.room.close()
            await made.rank.close()


@contextmanager
def more_work_than_cores() -> Iterator[None]:
    """Threads of which some always wait for a core."""
    done, data = threading.Event(), bytes(MIB)

    def work() -> None:
        while not done.is_set():
            # Without the interpreter's lock.
            hashlib.sha256(data)

    threads = [threading.Thread(target=work) for _ in range(3 * len(os.sched_getaffinity(0)))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def has_events(path: Path) -> bool:
    """Whether the kernel grants this process events of that file."""
    try:
        with path.open("r+b", buffering=0) as file:
            file.write(module.TRIGGER)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_events(CPU), reason="the kernel has no events of pressure for us")
@pytest.mark.timeout(300)
async def test_the_kernel_calls_for_a_look(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody else does.
    monkeypatch.setattr(module, "LOOK_MOST_S", 1e6)
    monkeypatch.setattr(module, "GROWTH_BYTES_S", 1e-9)
    watching = asyncio.create_task(Shortage(watched.rank, pressure=CPU).run())
    try:
        await watched.looked()
        watched.take(80 * MIB)
        with more_work_than_cores():
            await watched.told("memory is short")
    finally:
        await stopped(watching)
    assert "memory-short" in watched.lines.text


@pytest.mark.skipif(not has_events(CPU), reason="the kernel has no events of pressure for us")
async def test_no_event_is_left_when_the_watch_ends() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pressure, events = Pressure(CPU), list[bool]()
    assert pressure.open(lambda: events.append(True))
    pressure.close()
    pressure.close()
    with more_work_than_cores():
        await asyncio.sleep(0.3)
    assert not events
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("content", ["absent", "not granted"])
async def test_without_events_looks_come_by_time(
    watched: Watched, tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CALM_S", 0.0)
    pressure = tmp_path / "pressure"
    if content == "not granted":
        # A kernel that says no (psi=0): reading works and writing fails.
        pressure = Path("/proc/self/status")
    watching = asyncio.create_task(Shortage(watched.rank, pressure=pressure).run())
    try:
        await watched.looked()
        watched.take(80 * MIB)
        await watched.told("memory is short")
        # And says so once, until there is enough again.
        watched.taken.pop().close()
        await watched.told("")
        watched.take(80 * MIB)
        await watched.told("memory is short")
    finally:
        await stopped(watching)
    assert watched.lines.text.count('"memory-short"') == 2
    assert watched.lines.text.count('"memory-enough"') == 1


def test_a_shortage_that_wavers_is_logged_once_and_once_when_it_is_over() -> None:
    spells, logged = Spells(), list[tuple[float, str]]()

    def see(now_s: float, short: bool) -> None:
        if event := spells.see(now_s, short=short):
            logged.append((now_s, event))

    see(0.0, False)
    # What is left goes over the reserve and under it again, for longer than CALM_S in all.
    for number in range(200):
        see(10.0 + number, number % 3 != 2)
    assert logged == [(10.0, "memory-short")]
    last_short_s = 10.0 + 199
    see(last_short_s + 1, False)
    see(last_short_s + CALM_S, False)
    assert logged[1:] == []
    see(last_short_s + 1 + CALM_S, False)
    see(last_short_s + 2 + 2 * CALM_S, False)
    assert logged[1:] == [(last_short_s + 1 + CALM_S, "memory-enough")]
    see(1000.0, True)
    assert logged[2:] == [(1000.0, "memory-short")]


async def test_what_a_trainers_first_steps_take_counts_before_anybody_can_read(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_MOST_S", 1e6)
    monkeypatch.setattr(module, "GROWTH_BYTES_S", 1e-9)
    watching = asyncio.create_task(Shortage(watched.rank, pressure=Path("/absent")).run())
    attached = attached_to(None, 4096)
    try:
        await watched.looked()
        watched.rank.attached, watched.rank.ownership = attached, Ownership.OWNED
        attached.page[Word.COMING_BYTES] = 50 * MIB
        # As when the trainers have agreed on their mesh, from which on readers are answered.
        watched.rank._changed()
        assert watched.rank.room.spare().spare_bytes == 10 * MIB
    finally:
        await stopped(watching)
