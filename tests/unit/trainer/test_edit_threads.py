"""Records on several threads: each once, and no thread left when it is over."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from paramd.trainer.edit_threads import LARGE_BYTES, MOST, run_on, thread_count


@pytest.mark.parametrize("threads", [1, 3])
def test_all_run_once_without_gradients(threads: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(50)]

    def add(parameter: torch.nn.Parameter) -> None:
        parameter.add_(1)

    run_on(threads, parameters, add)
    assert all(parameter.eq(1).all() for parameter in parameters)


def test_threads_work_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=20)

    def meet(_: int) -> None:
        both.wait()

    run_on(2, range(2), meet)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_exception_ends_it_and_is_raised(threads: int) -> None:
    begun = []

    def fail(number: int) -> None:
        begun.append(number)
        if number == 4:
            raise ValueError("4")
        if number > 4:
            raised.wait(20)

    raised = threading.Event()
    timer = threading.Timer(0.2, raised.set)
    timer.start()
    with pytest.raises(ValueError, match="4"):
        run_on(threads, range(1000), fail)
    timer.join()
    assert len(begun) < 10
    assert not [t for t in threading.enumerate() if t.name.startswith("paramd-edit_")]


def test_only_large_edits_of_single_threaded_trainings_are_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert thread_count(LARGE_BYTES) == MOST
    assert thread_count(LARGE_BYTES - 1) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert thread_count(LARGE_BYTES) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert thread_count(LARGE_BYTES) == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert thread_count(LARGE_BYTES) == 1
