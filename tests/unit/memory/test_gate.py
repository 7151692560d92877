"""The gate: a copy is of one step or is none, and the trainer waits a bounded time."""

import ctypes
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paramd.memory import descriptors
from paramd.memory import gate as gate_module
from paramd.memory.control_page import (
    PAGE_BYTES,
    REWINDS_KEPT,
    ControlPage,
    Rewind,
    Word,
    note_rewind,
    rewinds_of,
)
from paramd.memory.gate import (
    CopyEnd,
    CopySpan,
    State,
    TrainerGate,
    copy_at_one_step,
    copy_at_rest,
    copy_of_request,
)

SIZE_BYTES = 1000
Memory = ctypes.Array[ctypes.c_char]


@pytest.fixture
def page() -> Iterator[ControlPage]:
    descriptor = descriptors.create_memory("paramd-test", PAGE_BYTES)
    page = ControlPage(descriptor)
    yield page
    page.close()
    os.close(descriptor)


@pytest.fixture
def source() -> Memory:
    return ctypes.create_string_buffer(b"s" * SIZE_BYTES, SIZE_BYTES)


@pytest.fixture
def target() -> Memory:
    return ctypes.create_string_buffer(SIZE_BYTES)


def spans(source: Memory, target: Memory) -> list[CopySpan]:
    begin, middle = ctypes.addressof(source), 300
    into = ctypes.addressof(target)
    return [
        CopySpan(begin, into, middle),
        CopySpan(begin + middle, into + middle, SIZE_BYTES - middle),
    ]


def test_a_copy_between_updates_carries_their_step(
    page: ControlPage, source: Memory, target: Memory
) -> None:
    page[Word.STEP], page[Word.EDITS] = 7, 2
    assert copy_at_one_step(page, spans(source, target)) == (CopyEnd.DONE, State(7, 2))
    assert target.raw == source.raw
    assert page[Word.COPY_BEGUN] == page[Word.COPY_ENDED] == 1


def test_no_copy_begins_inside_an_update(page: ControlPage, source: Memory, target: Memory) -> None:
    TrainerGate(page, stall_budget_ns=0).begin_update()
    end, _ = copy_at_one_step(page, spans(source, target))
    assert end is CopyEnd.UPDATING
    assert target.raw == bytes(SIZE_BYTES)
    assert page[Word.COPY_BEGUN] == 0


@pytest.mark.parametrize("point", ["copy-begun", "copy-chunk", "copy-moved"])
@pytest.mark.parametrize("edits", [False, True])
def test_a_copy_that_an_update_or_an_edit_overtakes_is_none(
    page: ControlPage, source: Memory, target: Memory, point: str, edits: bool
) -> None:
    gate = TrainerGate(page, stall_budget_ns=0)

    def update_at(name: str) -> None:
        if name == point:
            gate.begin_update()
            if edits:
                gate.end_edit()
            else:
                gate.settle(page[Word.STEP] + 1, 0, proven=True)

    end, _ = copy_at_one_step(page, spans(source, target), at_point=update_at)
    assert end is CopyEnd.OVERTAKEN
    assert page[Word.COPY_BEGUN] == page[Word.COPY_ENDED]


def test_a_mirror_answers_the_request_that_it_was_made_for_whatever_updates_do(
    page: ControlPage, source: Memory, target: Memory
) -> None:
    gate = TrainerGate(page, stall_budget_ns=0, mirrored=True)
    page[Word.STEP], page[Word.EDITS] = 7, 2
    gate.begin_mirror()
    assert copy_of_request(page, spans(source, target), 5)[0] is CopyEnd.UPDATING
    gate.end_mirror(5)

    def update(_: str) -> None:
        gate.begin_update()
        gate.settle(page[Word.STEP] + 1, 0, proven=True)

    end, state = copy_of_request(page, spans(source, target), 5, at_point=update)
    assert (end, state[:2]) == (CopyEnd.DONE, (7, 2))
    assert target.raw == source.raw
    assert page[Word.STALL_COUNT] == 0, "an update does not touch the mirror"
    assert copy_of_request(page, spans(source, target), 4)[0] is CopyEnd.UPDATING


@pytest.mark.parametrize("point", ["copy-begun", "copy-chunk", "copy-moved"])
def test_a_copy_from_a_mirror_that_is_written_to_is_none(
    page: ControlPage, source: Memory, target: Memory, point: str
) -> None:
    gate = TrainerGate(page, stall_budget_ns=0, mirrored=True)
    gate.end_mirror(5)

    def write_at(name: str) -> None:
        if name == point:
            gate.begin_mirror()
            gate.end_mirror(6)

    end, _ = copy_of_request(page, spans(source, target), 5, at_point=write_at)
    assert end is CopyEnd.OVERTAKEN


@pytest.mark.parametrize(
    ("samples", "changed_too", "end"),
    [
        ((5, 5), False, CopyEnd.DONE),
        ((6, 6), False, CopyEnd.CHANGED),
        ((6, 6), True, CopyEnd.DONE),
        ((5, 6), False, CopyEnd.CHANGED),
        ((6, 7), True, CopyEnd.CHANGED),
    ],
)
def test_what_rests_is_copied_unless_it_was_changed_or_changes_meanwhile(
    page: ControlPage,
    source: Memory,
    target: Memory,
    samples: tuple[int, int],
    changed_too: bool,
    end: CopyEnd,
) -> None:
    gate = TrainerGate(page, stall_budget_ns=0)
    gate.begin_update()
    gate.rest(8, 3, digest=5)
    seen = iter(samples)
    found, state = copy_at_rest(
        page, spans(source, target), lambda: next(seen), changed_too=changed_too
    )
    assert (found, state.step, state.iteration) == (end, 8, 3)


def test_the_trainer_waits_for_one_unfinished_copy_once_and_no_longer(page: ControlPage) -> None:
    budget_ns = 2_000_000
    gate = TrainerGate(page, stall_budget_ns=budget_ns)
    page[Word.COPY_BEGUN] = 1  # a sidecar that died while it copied
    for _ in range(50):
        gate.begin_update()
        gate.settle(page[Word.STEP] + 1, 0, proven=True)
    assert page[Word.STALL_COUNT] == 1
    assert page[Word.STALL_TOTAL_NS] >= budget_ns
    assert page[Word.STEP] == 50


def test_the_trainer_waits_until_an_announced_boundary_was_served(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = TrainerGate(page, stall_budget_ns=10_000_000_000)
    page[Word.ANNOUNCE] = 1
    polls: list[float] = []

    def serve_at_the_third_poll(seconds: float) -> None:
        polls.append(seconds)
        page[Word.SERVED] = len(polls) // 3

    monkeypatch.setattr(gate_module.time, "sleep", serve_at_the_third_poll)
    gate.begin_update()
    assert len(polls) == 3
    assert page[Word.SEQ] == 1


class Behind:
    """A device that has work at the first looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.noted = 0

    def note_queued(self) -> None:
        self.noted += 1

    def behind(self) -> bool:
        self.looks -= 1
        return self.looks >= 0


def test_while_the_device_has_work_the_wait_for_a_copy_is_no_stall(page: ControlPage) -> None:
    device: Any = Behind(looks=20)
    gate = TrainerGate(page, stall_budget_ns=0, device=device)
    gate.begin_update()
    assert device.noted == 0  # no copy, no wait
    gate.settle(1, 0, proven=True)
    page[Word.COPY_BEGUN] = 1
    gate.begin_update()
    assert device.noted == 1
    assert device.looks == -1
    assert page[Word.STALL_COUNT] == 1
    assert page[Word.STALL_TOTAL_NS] < 20 * gate_module.POLL_S * 1e9


def test_a_device_that_stays_behind_is_waited_for_a_bounded_time(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "BEHIND_NS", 2_000_000)
    device: Any = Behind(looks=1 << 30)
    gate = TrainerGate(page, stall_budget_ns=0, device=device)
    page[Word.COPY_BEGUN] = 1
    for _ in range(3):
        gate.begin_update()
        gate.settle(1, 0, proven=True)
    assert page[Word.STALL_COUNT] == 1  # not twice for the same copy


class Written:
    """Words that note, after each store, what a reader would find."""

    def __init__(self) -> None:
        self._words: dict[int, int] = {}
        self.states: dict[int, set[tuple[int, int]]] = {}

    def __getitem__(self, word: int) -> int:
        return self._words.get(word, 0)

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value
        found = self.states.setdefault(self[Word.SEQ], set())
        found.add((self[Word.STEP], self[Word.EDITS]))


def test_one_even_seq_names_one_state_after_every_single_store() -> None:
    """Published before STEP or EDITS, SEQ would vouch for a copy under the state before."""
    words = Written()
    page: Any = SimpleNamespace(words=words)
    gate = TrainerGate(page, stall_budget_ns=0)

    def end_update() -> None:
        gate.settle(words[Word.STEP] + 1, 0, proven=True)

    for end in (end_update, gate.end_edit, gate.end_edit, end_update):
        gate.begin_update()
        end()
    named = {seq: states for seq, states in words.states.items() if not seq & 1}
    assert named == {0: {(0, 0)}, 2: {(1, 0)}, 4: {(1, 1)}, 6: {(1, 2)}, 8: {(2, 2)}}


def test_an_update_that_failed_stays_open_until_the_next_good_one(page: ControlPage) -> None:
    gate = TrainerGate(page, stall_budget_ns=0)
    gate.begin_update()
    gate.begin_update()
    assert page[Word.SEQ] == 1
    gate.settle(page[Word.STEP] + 1, 0, proven=True)
    assert page[Word.SEQ] == 2


def test_the_last_rollbacks_are_told_with_the_steps_that_they_left(page: ControlPage) -> None:
    assert rewinds_of(page) == []
    for history in range(1, REWINDS_KEPT + 4):
        page[Word.STEP] = 10 * history
        note_rewind(page, history)
        page[Word.STEP], page[Word.REWOUND] = history, history
    found = rewinds_of(page)
    # The place of the oldest is written first by the next one.
    assert found == [Rewind(n, 10 * n, n) for n in range(5, REWINDS_KEPT + 4)]
