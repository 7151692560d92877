"""Slots of one sidecar with a trainer played by the test: what is asked for, served and missed."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from paramd.errors import AbortedError, ConflictError, ExhaustedError, ParamdError
from paramd.memory.control_page import PAGE_BYTES, ControlPage, Word, in_time
from paramd.memory.descriptors import SparseMemory, create_memory, create_sparse, reserved_bytes
from paramd.memory.gradient_program import (
    ARM_WORDS,
    NoFrame,
    Notes,
    Slot,
    digest_of_spans,
    write_no_frame,
)
from paramd.memory.handover import GRADIENT_SLOTS, gradients_bytes
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.gradients.pins import GradientPins
from paramd_service.sidecar.gradients.slots import Gradients
from paramd_service.sidecar.snapshots.store import Key

ARENA_BYTES = 1 << 16
NUMEL = 6000
KEY = Key(1, ((0, ARENA_BYTES),), pb.SOURCE_GRADIENTS, "")


class Training:
    """The trainer's side of the slots, and the sidecar's objects on the other."""

    def __init__(self, executor: ThreadPoolExecutor, idle_memory_s: float = 60.0) -> None:
        page = create_memory("page", PAGE_BYTES)
        slots = create_sparse("slots", gradients_bytes(ARENA_BYTES))
        self._descriptors = [page, slots]
        self.slots = slots
        self.page = ControlPage(page)
        self._memory = SparseMemory(slots)
        self._slots = [
            Slot(self._memory.buffer, ARENA_BYTES, index) for index in range(GRADIENT_SLOTS)
        ]
        attached: Any = SimpleNamespace(
            page=self.page,
            request=SimpleNamespace(arena_bytes=ARENA_BYTES),
            shared=SimpleNamespace(gradients=slots),
        )
        self._attached = attached
        self.gradients = Gradients(attached, executor=executor, idle_memory_s=idle_memory_s)
        nothing = cast(Any, None)
        self.pins = GradientPins(
            self.gradients, store=nothing, blocks=nothing, executor=executor, lease=nothing,
            at_point=lambda _: None,
        )  # fmt: skip

    async def close(self) -> None:
        await self.gradients.close()
        for slot in self._slots:
            slot.close()
        self._memory.close()
        self.page.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def successor(self, executor: ThreadPoolExecutor) -> Gradients:
        """Those of a sidecar that takes over."""
        return Gradients(self._attached, executor=executor, idle_memory_s=60.0)

    async def armed(self, step: int) -> Slot:
        """The slot that is armed for an update, as soon as it is."""
        async with asyncio.timeout(30):
            while True:
                for slot, word in zip(self._slots, ARM_WORDS, strict=True):
                    if self.page[word] == in_time(step, rewound=self.page[Word.REWOUND]):
                        return slot
                await asyncio.sleep(0.001)

    def update(self, step: int, slot: Slot | None = None, value: float = 0.0) -> None:
        """Update `step` begins; all gradients are `value` when a slot is filled."""
        if slot is not None:
            program = slot.read_program()
            assert program is not None
            room = self._memory.buffer[slot.begin_bytes : slot.begin_bytes + 4 * NUMEL]
            torch.frombuffer(room, dtype=torch.float32).fill_(value)
            digest = digest_of_spans(program[1])
            slot.write_notes(Notes(step, program[0], 1.0, 0.5, (), digest=digest))
            self.page[slot.done_word] = in_time(step, rewound=self.page[Word.REWOUND])
        self.page[Word.GRADIENTS_STEP] = step
        self.gradients.woken()

    async def left_out(self, step: int, why: NoFrame) -> ParamdError:
        """The error of whoever asks for an update that the trainer leaves out."""
        asked = self.reduce(step)
        slot = await self.armed(step)
        write_no_frame(self.page.words, self._slots.index(slot), why)
        self.page[slot.done_word] = -in_time(step, rewound=self.page[Word.REWOUND])
        self.page[Word.GRADIENTS_STEP] = step
        self.gradients.woken()
        with pytest.raises(ParamdError) as found:
            await asked
        return found.value

    def reduce(self, step: int, numel: int = NUMEL) -> asyncio.Task[tuple[list[pb.Stats], Notes]]:
        item = pb.StatsItem(begin_bytes=0, numel=numel, dtype="float32")
        work = self.pins.reduce(KEY, step, pb.Reduction(items=[item]), timeout_s=30.0)
        return asyncio.create_task(work)


@pytest.fixture
async def training() -> AsyncIterator[Training]:
    with ThreadPoolExecutor(1) as executor:
        found = Training(executor)
        yield found
        await found.close()


async def test_readers_of_a_training_whose_updates_never_have_frames_get_the_reason(
    training: Training,
) -> None:
    for step in (1, 2):
        error = await training.left_out(step, NoFrame.IN_BACKWARD)
        assert isinstance(error, AbortedError), "the next update may have one"
        assert "made within the backward" in str(error)
    assert isinstance(await training.left_out(3, NoFrame.LATE), AbortedError)
    error = await training.left_out(4, NoFrame.IN_BACKWARD)
    assert isinstance(error, ConflictError), "others never have one"
    assert "its optimizers step within the backward" in str(error)
    # Each new reader is told at its first frame.
    assert isinstance(await training.left_out(5, NoFrame.IN_BACKWARD), ConflictError)


async def test_updates_that_a_scaler_skips_are_waited_through(training: Training) -> None:
    for step in range(1, 8):
        error = await training.left_out(step, NoFrame.SKIPPED)
        assert isinstance(error, AbortedError)
        assert "skipped by a gradient scaler" in str(error)
    asked = training.reduce(8)
    training.update(8, await training.armed(8), 1.0)
    await asked


async def test_who_asks_between_a_frame_and_its_updates_begin_is_answered(
    training: Training,
) -> None:
    """The trainer fills the slot first; an update counts as begun a moment later."""
    gate = threading.Event()

    def held(_memory: object, _slot: int) -> str:
        gate.wait(30)
        return "early"

    spans = ((0, ARENA_BYTES),)
    early = asyncio.create_task(training.gradients.capture(0, 5, spans, held))
    slot = await training.armed(5)
    begun, training.page[Word.GRADIENTS_STEP] = training.page[Word.GRADIENTS_STEP], 5
    training.update(5, slot, 2.0)
    training.page[Word.GRADIENTS_STEP] = begun
    training.gradients.woken()
    async with asyncio.timeout(30):
        while not training.gradients.captured_count:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(training.gradients.capture(0, 5, spans, lambda *_: "late"))
        await asyncio.sleep(0.01)
        gate.set()
        assert [(await one)[0] for one in (early, late)] == ["early", "late"]


def rolled_back(training: Training, step: int) -> None:
    """The trainer is put back to a step, as trainer/resume/rewinding.py does it."""
    page = training.page
    page[Word.GRADIENTS_STEP] = min(page[Word.GRADIENTS_STEP], step)
    page[Word.STEP] = step
    page[Word.REWOUND] += 1
    training.gradients.woken()


async def test_an_update_that_comes_again_is_served_its_own_gradients(training: Training) -> None:
    before = training.reduce(5)
    training.update(5, await training.armed(5), 2.0)
    (stats,), notes = await before
    assert (stats.max, notes.history) == (2.0, 0)
    rolled_back(training, 4)
    again = training.reduce(5)
    slot = await training.armed(5)
    # The slot's DONE word is still of the update before the rollback.
    training.gradients.woken()
    training.update(5, slot, 3.0)
    (stats,), notes = await again
    assert (stats.max, notes.history) == (3.0, 1)


async def test_what_was_asked_for_before_a_rollback_is_over(training: Training) -> None:
    asked = training.reduce(5)
    await training.armed(5)
    rolled_back(training, 2)
    with pytest.raises(AbortedError, match="rolled back"):
        await asked
    assert [training.page[word] for word in ARM_WORDS] == [0, 0]
    with pytest.raises(AbortedError, match="rolled back"):
        await training.gradients.capture(0, 5, ((0, 64),), lambda *_: None)


async def test_a_program_after_idle_memory_was_given_back_is_another_one() -> None:
    """The trainer's plan of a program is kept by version: no version may come again."""
    with ThreadPoolExecutor(1) as executor:
        training, versions = Training(executor, idle_memory_s=0.0), []
        for step in (5, 7, 9):
            asked = training.reduce(step, step)
            slot = await training.armed(step)
            versions.append(slot.version())
            training.update(step, slot, float(step))
            (stats,), _ = await asked
            assert (stats.count, stats.max) == (step, float(step))
            async with asyncio.timeout(30):
                while slot.version():
                    await asyncio.sleep(0.001)
        assert sorted(set(versions)) == versions
        await training.close()
        # Its number may be another memory's now, in which no late timer punches holes.
        assert training.gradients._memory._memory.descriptor == -1


async def test_a_frame_of_a_program_that_is_gone_is_missed(training: Training) -> None:
    """A trainer that was filling the slot for somebody who has left, as memory was given back."""
    asked = training.reduce(5)
    slot = await training.armed(5)
    program = slot.read_program()
    assert program is not None
    asked.cancel()
    await asyncio.wait([asked])
    training.gradients._memory.release([0, 1])
    again = training.reduce(5)
    slot = await training.armed(5)
    slot.write_notes(Notes(5, program[0], 1.0, 0.0, (), digest=digest_of_spans(program[1])))
    training.page[slot.done_word] = 5
    training.gradients.woken()
    with pytest.raises(AbortedError):
        await again


async def test_memory_is_not_given_back_while_a_cancelled_reader_still_reads(
    training: Training,
) -> None:
    gate, running = threading.Event(), threading.Event()

    def held(_memory: object, _slot: int) -> None:
        running.set()
        gate.wait(30)

    asked = asyncio.create_task(training.gradients.capture(0, 5, ((0, 64),), held))
    training.update(5, await training.armed(5), 1.0)
    await asyncio.to_thread(running.wait, 30)
    for _ in range(3):
        asked.cancel()
        await asyncio.sleep(0)
    assert not asked.done()
    gate.set()
    await asyncio.wait([asked])
    assert asked.cancelled()


async def test_a_fault_of_ours_while_a_frame_is_read_fails_its_requests(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = training.reduce(5)
    slot = await training.armed(5)

    def broken(_slot: Slot) -> Notes:
        raise ValueError("no notes")

    monkeypatch.setattr(Slot, "read_notes", broken)
    training.update(5, slot, 2.0)
    async with asyncio.timeout(60):
        with pytest.raises(ParamdError, match="ValueError"):
            await asked
    assert [training.page[word] for word in ARM_WORDS] == [0, 0]


async def test_what_a_dead_sidecar_left_in_the_slots_is_given_back_after_one_update() -> None:
    with ThreadPoolExecutor(1) as executor:
        training = Training(executor)
        asked = training.reduce(5)
        await training.armed(5)
        # It dies, and its successor finds the slot as the trainer may be filling it.
        successor = training.successor(executor)
        assert [training.page[word] for word in ARM_WORDS] == [0, 0]
        assert not successor.take_idle()
        assert reserved_bytes(training.slots) >= ARENA_BYTES
        training.page[Word.GRADIENTS_STEP] = 5
        async with asyncio.timeout(60):
            while reserved_bytes(training.slots):
                await asyncio.sleep(0.01)
        asked.cancel()
        await successor.close()
        await training.close()


async def test_a_refusal_by_the_kernel_leaves_the_pages_that_are_in_use(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = training.gradients._memory
    memory.reserve(0, ((0, 8192),))
    memory.room(0, 0, 8192)[:] = b"\1" * 8192
    # No limit of this process makes the kernel refuse, so the call is stood in for.
    refuse = OSError(errno.ENOMEM, "Cannot allocate memory")
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=refuse))
    with pytest.raises(ExhaustedError, match="Cannot allocate memory"):
        memory.reserve(0, ((4096, ARENA_BYTES),))
    assert memory.holds(0, ((0, 8192),))
    assert bytes(memory.room(0, 0, 8192)) == b"\1" * 8192
