"""Decisions of the copying thread, with a page, a clock and copies of the test's own."""

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from paramd.memory import descriptors
from paramd.memory.control_page import PAGE_BYTES, ControlPage, Refusal, Word
from paramd.memory.gate import CopyEnd, CopySpan, State, state_of
from paramd_service.sidecar.copying.capture import REST_NS, RETRY_NS, Capture, CopyJob
from paramd_service.sidecar.copying.copier import Copier
from paramd_service.sidecar.copying.page_requests import Boundary, Outcome
from paramd_service.sidecar.log import Log

MS = 1_000_000


class Bench:
    """A rank between two updates; `ends` says how the next copies end."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("page")
        os.ftruncate(descriptor, PAGE_BYTES)
        self.page = ControlPage(descriptor)
        os.close(descriptor)
        self.now_ns = 1_000 * MS
        self.ends: list[CopyEnd] = []
        self.copies = 0
        self.steps: list[int | None] = []
        self.outcomes: list[Outcome] = []
        self.stopped = False
        self.capture = Capture(
            self.page,
            clock_ns=lambda: self.now_ns,
            copy=self._copy,
            digest=lambda: 0,
            stopped=lambda: self.stopped,
        )

    def _copy(
        self, page: ControlPage, spans: Sequence[CopySpan], **_: Any
    ) -> tuple[CopyEnd, State]:
        self.copies += 1
        if page[Word.SEQ] & 1:
            return CopyEnd.UPDATING, state_of(page)
        return (self.ends.pop(0) if self.ends else CopyEnd.DONE), state_of(page)

    def job(self, size_bytes: int = 100) -> CopyJob:
        job = CopyJob([CopySpan(0, 0, size_bytes)], self._done)
        self.capture.submit(job)
        return job

    def _done(self, state: State | None) -> None:
        self.steps.append(state.step if state is not None else None)

    def arm(self, number: int, **fields: Any) -> None:
        spans, token = [CopySpan(0, 0, 8)], 10 * number
        buffers = bool(fields.pop("buffers", False))
        self.capture.reaching.arm(
            Boundary(number, spans, buffers, self.outcomes.append, token=token, **fields)
        )

    def train(self, step_time_ms: int, age_ms: int) -> None:
        """A rank that trains at this pace and reached its last boundary that long ago."""
        self.page[Word.STEP_TIME_NS] = step_time_ms * MS
        self.page[Word.BOUNDARY_NS] = self.now_ns - age_ms * MS

    def boundary(self, *, agreed: int | None = None) -> None:
        """An update ends; the boundary is announced when asked for or agreed."""
        self.page[Word.STEP] += 1
        self.page[Word.SEQ] = 2 * self.page[Word.STEP]
        if agreed is not None:
            self.page[Word.AGREED_STEP] = self.page[Word.STEP]
            self.page[Word.AGREED_TOKEN] = 10 * agreed
            self.page[Word.AGREED] = agreed
        self.page[Word.ANNOUNCE] += 1


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.page.close()


def test_an_update_that_ends_while_want_is_raised_is_not_missed(bench: Bench) -> None:
    bench.page[Word.SEQ] = 1
    bench.job()
    original = bench.capture._copy

    def update_ends_after_the_look(*arguments: Any, **named: Any) -> tuple[CopyEnd, State]:
        result = original(*arguments, **named)
        bench.page[Word.SEQ] = 2
        return result

    bench.capture._copy = update_ends_after_the_look
    bench.capture.serve()
    assert bench.steps == [0]


def test_an_overtaken_copy_waits_for_the_announced_boundary(bench: Bench) -> None:
    bench.train(step_time_ms=100, age_ms=10)
    bench.ends = [CopyEnd.OVERTAKEN]
    job = bench.job()
    bench.capture.serve()
    bench.now_ns += 5 * MS
    bench.capture.serve()
    assert (bench.copies, job.attempts, bench.page[Word.WANT]) == (1, 1, 1)
    bench.boundary()
    bench.capture.serve()
    assert bench.steps == [1]
    assert bench.capture.given_up_count == 1


def test_a_held_rank_is_copied_even_though_nothing_is_announced(bench: Bench) -> None:
    bench.train(step_time_ms=100, age_ms=85)
    bench.job(size_bytes=400 << 20)
    bench.capture.serve()
    assert bench.steps == []
    bench.now_ns += RETRY_NS
    bench.capture.serve()
    assert bench.steps == [0]


def test_a_passed_boundary_is_missed(bench: Bench) -> None:
    bench.arm(1)
    bench.boundary(agreed=1)
    bench.page[Word.STEP] += 1
    bench.capture.serve()
    assert [outcome.captured for outcome in bench.outcomes] == [False]
    assert "the next update began" in bench.outcomes[0].reason


@pytest.mark.parametrize("overtaken", [False, True])
def test_extra_state_is_of_the_boundary_or_it_is_missed(bench: Bench, overtaken: bool) -> None:
    def fill() -> str:
        bench.page[Word.EXTRA_FOR] = 2 if overtaken else 1
        return ""

    bench.arm(1, fill_extra=fill)
    bench.page[Word.EXTRA_FOR] = 1
    bench.boundary(agreed=1)
    bench.capture.serve()
    assert [one.missed for one in bench.outcomes] == [overtaken]


def test_a_pause_on_gathered_parameters_is_told_as_such(bench: Bench) -> None:
    bench.arm(1)
    bench.page[Word.REFUSED], bench.page[Word.REFUSED_STEP] = 1, Refusal.GATHERED
    bench.capture.serve()
    assert "an edit would not reach" in bench.outcomes[0].reason


def test_words_of_an_agreement_still_being_written_are_waited_for(bench: Bench) -> None:
    bench.arm(1)
    bench.page[Word.STEP], bench.page[Word.SEQ] = 4, 8
    bench.page[Word.AGREED_TOKEN], bench.page[Word.AGREED] = 10, 1
    bench.capture.serve()
    assert bench.outcomes == []
    bench.page[Word.AGREED_STEP] = 4
    bench.page[Word.ANNOUNCE] += 1
    bench.capture.serve()
    assert bench.outcomes == [Outcome(4, "", edits=0, proof=8, token=10)]


def test_a_number_that_was_ever_asked_for_or_taken_back_is_past_for_good(bench: Bench) -> None:
    reaching = bench.capture.reaching
    bench.arm(9)
    reaching.take_back(4)
    assert (bench.page[Word.READY], bench.page[Word.HIGHEST]) == (9, 9)
    reaching.withdraw(9, "withdrawn")
    assert (bench.page[Word.READY], bench.page[Word.HIGHEST]) == (0, 9)
    reaching.take_back(12)
    for number in (4, 9, 12):
        bench.arm(number)
        assert bench.outcomes.pop().reason == f"boundary {number} is past: 12 was requested"
        assert bench.page[Word.READY] == 0
    bench.arm(13)
    assert (bench.page[Word.READY], bench.page[Word.HIGHEST]) == (13, 13)


def rested(bench: Bench) -> None:
    """The rank's update 8 is over, and has rested for long enough to be read."""
    bench.page[Word.SEQ] = 15
    bench.page[Word.REST_STEP], bench.page[Word.REST_NS] = 8, bench.now_ns - REST_NS
    bench.page[Word.REST] += 1


def test_a_copy_at_rest_counts_once_the_trainer_has_looked_since(bench: Bench) -> None:
    rested(bench)
    jobs = [CopyJob([], bench._done), CopyJob([], bench._done)]
    for job in jobs:
        bench.capture.submit(job)
    bench.now_ns += RETRY_NS
    bench.page[Word.REST_SEEN_NS] = bench.now_ns - 1
    for _ in range(3):
        bench.capture.serve()
    assert bench.steps == []
    assert all(job.unseen is not None for job in jobs)
    bench.page[Word.REST_SEEN_NS] = bench.now_ns
    bench.capture.serve()
    assert bench.steps == [8, 8]


def test_what_was_copied_of_a_rest_that_is_over_is_copied_anew(bench: Bench) -> None:
    rested(bench)
    bench.capture.submit(CopyJob([], bench._done))
    bench.now_ns += RETRY_NS
    bench.capture.serve()
    bench.page[Word.REST_STEP] = 9
    bench.page[Word.REST] += 1
    bench.page[Word.REST_SEEN_NS] = bench.now_ns
    bench.now_ns += RETRY_NS
    bench.capture.serve()
    assert bench.steps == []
    bench.page[Word.REST_SEEN_NS] = bench.now_ns
    bench.capture.serve()
    assert bench.steps == [9]


def test_what_a_dead_trainer_left_at_rest_needs_nobodys_look(bench: Bench) -> None:
    rested(bench)
    bench.capture.trainer_ended = True
    bench.capture.submit(CopyJob([], bench._done))
    bench.now_ns += RETRY_NS
    bench.capture.serve()
    assert bench.steps == [8]


def test_of_a_stopped_trainer_its_last_look_at_this_rest_counts(bench: Bench) -> None:
    rested(bench)
    bench.stopped = True
    bench.page[Word.REST_SEEN_NS] = bench.page[Word.REST_NS] - 1
    bench.capture.submit(CopyJob([], bench._done))
    bench.now_ns += RETRY_NS
    for _ in range(2):
        bench.capture.serve()
    assert bench.steps == [], "that look was at another rest"
    bench.page[Word.REST_SEEN_NS] = bench.page[Word.REST_NS] + 1
    bench.capture.serve()
    assert bench.steps == [8]


def test_a_request_that_fails_does_not_keep_the_thread_from_ending(bench: Bench) -> None:
    wake = descriptors.wake_event()
    copier = Copier(bench.capture, wake, Log(fields={}))
    copier.start()

    def fail() -> None:
        raise RuntimeError("the event loop is closed")

    # Taken in one go with the end's own request, whose wake is then spent.
    copier._inbox.append(fail)
    ending = threading.Thread(target=copier.stop, daemon=True)
    ending.start()
    ending.join(10)
    ended = not ending.is_alive()
    descriptors.wake(wake)
    ending.join(10)
    os.close(wake)
    assert ended


def test_buffers_of_the_step_that_were_not_copied_for_this_request_are_missed(
    bench: Bench,
) -> None:
    bench.arm(2, buffers=True)
    bench.boundary(agreed=2)
    # Those of an earlier request, at a step of the same number.
    bench.page[Word.BUFFERS_STEP], bench.page[Word.BUFFERS_FOR] = bench.page[Word.STEP], 1
    bench.capture.serve()
    (missed,) = bench.outcomes
    assert (missed.captured, missed.token) == (False, 0)
    assert missed.reason == "the trainer did not copy its buffers"


@pytest.mark.parametrize("word", [Word.BUFFERS_FOR, Word.AGREED, Word.AGREED_TOKEN])
def test_a_copy_during_which_buffers_or_the_agreement_change_is_missed(
    bench: Bench, word: Word
) -> None:
    bench.arm(1, buffers=True)
    bench.boundary(agreed=1)
    bench.page[Word.BUFFERS_STEP], bench.page[Word.BUFFERS_FOR] = bench.page[Word.STEP], 1
    original = bench.capture._copy

    def changed_meanwhile(*arguments: Any, **named: Any) -> tuple[CopyEnd, State]:
        bench.page[word] += 1
        return original(*arguments, **named)

    bench.capture._copy = changed_meanwhile
    bench.capture.serve()
    assert [one.captured for one in bench.outcomes] == [False]


def test_a_capture_bears_the_token_of_its_request(bench: Bench) -> None:
    bench.arm(1, buffers=True)
    bench.boundary(agreed=1)
    bench.page[Word.BUFFERS_STEP], bench.page[Word.BUFFERS_FOR] = bench.page[Word.STEP], 1
    bench.capture.serve()
    assert [(one.captured, one.step, one.token) for one in bench.outcomes] == [(True, 1, 10)]
