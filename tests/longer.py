"""Tests that watch for some time, or do a thing many times, and more so in `make test-long`;
tests over many cases, of which `make test` has a sample or a share, CI an eighth of the others as
well, or the share, which its commit chooses, and `make campaigns` all.
"""

import os
import time
import zlib
from collections.abc import Callable, Container, Sequence
from typing import TypeVar

Case = TypeVar("Case")
Found = TypeVar("Found")


def seconds(usual: float, longer: float) -> float:
    """How long to watch."""
    return longer if os.environ.get("PARAMD_TESTS_LONG") == "1" else usual


def times(usual: int, longer: int) -> int:
    """How often to do it."""
    return round(seconds(usual, longer))


def busy() -> float:
    """How many times as long computing takes now: runnable processes per core, at least 1.0."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(
    done: Callable[[], Found], what: str = "it", timeout_s: float = 60.0,
    told: Callable[[], str] = str,
) -> Found:  # fmt: skip
    """Polls a condition; gives what it found, or fails with what `told` tells."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := done()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}\n{told()}"
        time.sleep(0.01)
    return found


def takes_more() -> bool:
    """Whether this run watches longer, or has more cases, than `make test` does."""
    return takes_all() or eighth() is not None or seconds(0, 1) > 0


def takes_all() -> bool:
    """Whether tests over many cases have all of them."""
    return os.environ.get("PARAMD_TESTS_ALL") == "1"


def eighth() -> int | None:
    """Which eighth of the cases beyond a sample this run has, too; None: none of them.

    From the environment, so that it is the same in all workers of a run: they must collect the
    same tests.
    """
    text = os.environ.get("PARAMD_TESTS_EIGHTH", "")
    if text not in ("", *"01234567"):
        raise ValueError(f"PARAMD_TESTS_EIGHTH: {text!r}; expected 0 to 7")
    return int(text) if text else None


def sample(cases: Sequence[Case], chosen: Container[Case]) -> list[Case]:
    """The cases to test now: the chosen ones with an eighth of the others, or all."""
    beyond = [case for case in cases if case not in chosen]
    # A turn of its own for each test, or one eighth would have the first case of all of them.
    turn = zlib.crc32(repr(beyond).encode())
    now = [case for at, case in enumerate(beyond) if (at + turn) % 8 == eighth()]
    return [case for case in cases if takes_all() or case in chosen or case in now]


def share(cases: Sequence[Case], parts: int) -> list[Case]:
    """The cases to test now where none has to be in every run: one of `parts` shares, or all.

    Args:
        cases: of which `repr` says the same in every process.
        parts: 2, 4 or 8; so that the eighths, by which commits take turns, have each equally often.
    """
    assert 8 % parts == 0, parts
    if takes_all():
        return list(cases)
    turn, chosen = zlib.crc32(repr(list(cases)).encode()), eighth()
    return list(cases[(turn + (chosen if chosen is not None else 0)) % parts :: parts])


def has_turn(test: str) -> bool:
    """Whether a test that is marked `in_turns` runs now: in CI with every other eighth."""
    chosen = eighth()
    if takes_all() or chosen is None:
        return True
    # With these words both halves take about as long.
    return (zlib.crc32(f"{test}, by turns".encode()) + chosen) % 2 == 0
