"""A live read is of one settled state of all ranks, or it is none."""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd.errors import UnreachableError
from paramd.memory.control_page import (
    PAGE_BYTES,
    ControlPage,
    Word,
    digest_of,
    note_stray,
    write_samples,
)
from paramd.memory.gate import TrainerGate
from paramd.mesh.reading import live
from paramd.mesh.reading.live import LivePage, LiveRank, read_live
from paramd.state import StateName

ARENA_BYTES = 1 << 16
SAMPLES = (0, 100, ARENA_BYTES // 8 - 1)
WHOLE = [(0, ARENA_BYTES)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOMENT_S", 0.02)


def memory(size_bytes: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    return descriptor


class Trainer:
    """The words and the arena of one rank."""

    def __init__(self, incarnation: int = 1) -> None:
        self.page_fd, self.arena_fd = memory(PAGE_BYTES), memory(ARENA_BYTES)
        self.page = ControlPage(self.page_fd)
        self.gate = TrainerGate(self.page, stall_budget_ns=0)
        self.page[Word.INCARNATION] = incarnation
        write_samples(self.page, SAMPLES)

    def update(self, *, trusted: bool = True) -> int:
        step = self.page[Word.STEP] + 1
        self.gate.begin_update()
        os.pwrite(self.arena_fd, step.to_bytes(8, "little") * (ARENA_BYTES // 8), 0)
        self.gate.settle(step, step, proven=True)
        if trusted:
            self.trust()
        return step

    def trust(self) -> None:
        words = b"".join(os.pread(self.arena_fd, 8, 8 * at) for at in SAMPLES)
        self.page[Word.SETTLED_DIGEST] = digest_of(words)
        self.page[Word.SETTLED_SEQ] = self.page[Word.SEQ]

    def stray(self, at: int = SAMPLES[1]) -> None:
        os.pwrite(self.arena_fd, b"strayed!", 8 * at)

    def words(self) -> bytes:
        return os.pread(self.page_fd, PAGE_BYTES, 0)

    def close(self) -> None:
        self.page.close()
        os.close(self.page_fd)
        os.close(self.arena_fd)


def read_only(descriptor: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class Reading:
    """A reader of some trainers; `during` runs within each copy, with its number."""

    def __init__(
        self,
        trainers: Sequence[Trainer],
        stack: ExitStack,
        during: Callable[[int], object] = lambda number: None,
    ) -> None:
        self.copies = 0
        self._during = during
        self.ranks = {}
        self.found: dict[int, ctypes.Array[ctypes.c_char]] = {}
        for number, one in enumerate(trainers):
            rank = LiveRank(
                number, read_only(one.page_fd), read_only(one.arena_fd), ARENA_BYTES, WHOLE
            )
            self.ranks[number] = stack.enter_context(closing(rank))
            self.found[number] = (ctypes.c_char * ARENA_BYTES)()

    def copy(self) -> None:
        self.copies += 1
        half = ARENA_BYTES // 2
        for rank in self.ranks.values():
            rank.read_into(ctypes.addressof(self.found[rank.rank]), 0, half)
        self._during(self.copies)
        for rank in self.ranks.values():
            rank.read_into(ctypes.addressof(self.found[rank.rank]) + half, half, half)

    def read(self, incarnation: int = 1) -> StateName | None:
        return read_live(self.ranks, incarnation, self.copy)

    def values(self) -> set[int]:
        return {
            word for data in self.found.values() for word in memoryview(data).cast("B").cast("q")
        }


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def pair(stack: ExitStack) -> list[Trainer]:
    trainers = [stack.enter_context(closing(Trainer())) for _ in range(2)]
    for one in trainers:
        one.update()
    return trainers


def test_a_settled_state_of_all_ranks_is_read(pair: list[Trainer], stack: ExitStack) -> None:
    reading = Reading(pair, stack)
    assert reading.read() == StateName(1, 0, 1, 0)
    assert reading.values() == {1}
    for one in pair:
        one.update()
    assert reading.read() == StateName(1, 0, 2, 0)
    assert reading.values() == {2}


def test_a_copy_that_an_update_overtakes_is_made_again(
    pair: list[Trainer], stack: ExitStack
) -> None:
    def update(number: int) -> None:
        if number < live.ATTEMPTS:
            for one in pair:
                one.update()

    reading = Reading(pair, stack, update)
    assert reading.read() == StateName(1, 0, live.ATTEMPTS, 0)
    assert reading.values() == {live.ATTEMPTS}
    assert reading.copies == live.ATTEMPTS


def test_an_update_of_one_rank_after_its_last_byte_makes_the_copy_void(
    pair: list[Trainer], stack: ExitStack
) -> None:
    reading = Reading(pair, stack)
    whole = reading.copy

    def copy() -> None:
        whole()
        pair[0].gate.begin_update()

    assert read_live(reading.ranks, 1, copy) is None


def test_ranks_at_different_states_are_left_to_snapshots(
    pair: list[Trainer], stack: ExitStack
) -> None:
    reading = Reading(pair, stack)
    pair[0].update()
    assert reading.read() is None
    pair[1].update()
    assert reading.read()
    for word in (Word.EDITS, Word.ITERATION):
        pair[0].page[word] += 1
        assert reading.read() is None, word
        pair[1].page[word] += 1
        assert reading.read(), word
    assert reading.copies == 3


@pytest.mark.parametrize("at", SAMPLES)
def test_contents_changed_without_an_update_are_refused(
    pair: list[Trainer], stack: ExitStack, at: int
) -> None:
    pair[1].stray(at)
    assert Reading(pair, stack).read() is None


def test_contents_changed_during_the_copy_are_refused(
    pair: list[Trainer], stack: ExitStack
) -> None:
    reading = Reading(pair, stack, lambda number: pair[0].stray())
    assert reading.read() is None


def test_a_state_in_which_the_trainer_found_a_stray_change_is_refused(
    pair: list[Trainer], stack: ExitStack
) -> None:
    def found(number: int) -> None:
        note_stray(pair[0].page.words, pair[0].page[Word.SEQ])

    assert Reading(pair, stack, found).read() is None
    assert Reading(pair, stack).read() is None
    for one in pair:
        one.update()
    assert Reading(pair, stack).read()


def test_a_held_state_is_read_though_its_digest_comes_later(
    pair: list[Trainer], stack: ExitStack
) -> None:
    for one in pair:
        one.update(trusted=False)
        one.page[Word.HELD] = 1
    reading = Reading(pair, stack)
    assert reading.read() == StateName(1, 0, 2, 0)
    pair[0].page[Word.HELD] = 2
    assert reading.read() is None, "it steps"


@pytest.mark.parametrize(
    ("word", "value"), [(Word.INCARNATION, 2), (Word.MIRRORED, 1), (Word.UNSERVED, 1)]
)
def test_another_incarnation_and_what_training_does_not_use_are_left_to_snapshots(
    pair: list[Trainer], stack: ExitStack, word: Word, value: int
) -> None:
    assert Reading(pair, stack).read(incarnation=2) is None
    pair[1].page[word] = value
    assert Reading(pair, stack).read(incarnation=1) is None


class Torn:
    """Words of a page that change while they are read, as the trainer's do."""

    def __init__(self, words: memoryview, at: Word, then: Callable[[], object]) -> None:
        self._words, self._at, self._then = words, at, then

    def __getitem__(self, word: int) -> int:
        value = self._words[word]
        if word == self._at:
            self._then()
        return value


@pytest.mark.parametrize("at", [Word.SEQ, Word.STEP, Word.EDITS, Word.ITERATION])
def test_words_of_two_states_are_never_taken_for_one(stack: ExitStack, at: Word) -> None:
    """Whenever the next update comes in between, the step belongs to the proof, or it is none."""
    one = stack.enter_context(closing(Trainer()))
    one.update()
    page = LivePage(one.page_fd)
    stack.callback(page.close)
    real, left = page.words, [1]

    def update() -> None:
        if left.pop() if left else 0:
            one.update()

    torn: Any = Torn(real, at, update)
    page.words = torn
    found = page.settled()
    page.words = real
    assert found is None or (found.step, found.proof) == (2, one.page[Word.SEQ])
    again = page.settled()
    assert again is not None
    assert (again.step, again.proof) == (2, one.page[Word.SEQ])


def test_a_memory_that_is_too_short_is_refused_before_it_is_mapped() -> None:
    for page_bytes, arena_bytes in ((PAGE_BYTES - 1, ARENA_BYTES), (PAGE_BYTES, ARENA_BYTES - 1)):
        page, arena = memory(page_bytes), memory(arena_bytes)
        with pytest.raises(UnreachableError, match="rank 3: its memory is shorter"):
            LiveRank(3, page, arena, ARENA_BYTES, WHOLE)


def test_a_memory_that_becomes_shorter_is_refused(pair: list[Trainer], stack: ExitStack) -> None:
    reading = Reading(pair[:1], stack, lambda number: os.ftruncate(pair[0].arena_fd, 4096))
    reading.ranks[0].state = live.State(1, 0, proof=pair[0].page[Word.SEQ])
    with pytest.raises(UnreachableError, match="rank 0: its memory has become shorter"):
        reading.copy()


@given(
    ends=st.lists(st.integers(0, ARENA_BYTES), min_size=2, max_size=12, unique=True),
    reads=st.lists(st.tuples(st.integers(0), st.integers(1)), min_size=1, max_size=5),
)
def test_spans_are_read_at_the_offsets_of_their_concatenation(
    ends: list[int], reads: list[tuple[int, int]]
) -> None:
    ends = sorted(ends)[: len(ends) // 2 * 2]
    spans = list(zip(ends[::2], ends[1::2], strict=True))
    with ExitStack() as stack:
        one = stack.enter_context(closing(Trainer()))
        data = os.urandom(ARENA_BYTES)
        os.pwrite(one.arena_fd, data, 0)
        page, arena = read_only(one.page_fd), read_only(one.arena_fd)
        rank = stack.enter_context(closing(LiveRank(0, page, arena, ARENA_BYTES, spans)))
        one.page[Word.SEQ] = 2
        rank.state = live.State(0, 0, proof=2)
        expected = b"".join(data[begin:end] for begin, end in spans)
        assert rank.size_bytes == len(expected)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live, "CHUNK_BYTES", 1000)
            for at, most in reads:
                begin = at % len(expected)
                size = 1 + most % (len(expected) - begin)
                target = (ctypes.c_char * size)()
                rank.read_into(ctypes.addressof(target), begin, size)
                assert target.raw == expected[begin : begin + size]
