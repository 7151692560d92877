"""The process's own time: corrections are followed, jumps are not, unless they stay."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paramd.clock import SETTLE_S, SteadyClock


class Clocks:
    """A wall clock that may be set, and one that never jumps."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.wrong_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Another process starts: it takes the wall's time."""
        self.now_s = SteadyClock(
            wall=lambda: 1e9 + self.passed_s + self.wrong_s, steady=lambda: 7.0 + self.passed_s
        )

    def error_s(self) -> float:
        return self.now_s() - 1e9 - self.passed_s


def test_a_jump_and_its_end_change_nothing() -> None:
    for jump_s in (3600.0, -3600.0):
        clocks = Clocks()
        for wrong_s in (jump_s, 0.0, jump_s, 0.0):
            clocks.wrong_s = wrong_s
            for _ in range(10):
                clocks.passed_s += SETTLE_S / 20
                assert clocks.error_s() == 0.0


def test_small_corrections_are_followed_at_once_and_add_up() -> None:
    clocks = Clocks()
    for number in range(100):
        clocks.passed_s += 60.0
        clocks.wrong_s = 0.5 * number
        assert clocks.error_s() == clocks.wrong_s


def test_a_time_that_stays_is_believed_and_so_is_its_end() -> None:
    clocks = Clocks()
    for wrong_s, before_s in ((3600.0, 0.0), (0.0, 3600.0)):
        clocks.wrong_s = wrong_s
        assert clocks.error_s() == before_s
        clocks.passed_s += SETTLE_S - 1
        assert clocks.error_s() == before_s
        clocks.passed_s += 1
        assert clocks.error_s() == wrong_s


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_who_starts_during_a_jump_goes_on_from_its_predecessor(
    tmp_path: Path, jump_s: float
) -> None:
    clocks = Clocks()
    clocks.now_s.write(tmp_path / "clock")
    clocks.wrong_s = jump_s
    clocks.passed_s += 100.0
    clocks.restart()
    assert clocks.error_s() == jump_s
    assert clocks.now_s.go_on_from(tmp_path / "clock")
    for clocks.wrong_s in (jump_s, 0.0):
        clocks.passed_s += 100.0
        assert clocks.error_s() == 0.0


def test_what_was_left_long_ago_is_not_taken(tmp_path: Path) -> None:
    clocks = Clocks()
    clocks.now_s.write(tmp_path / "clock")
    clocks.wrong_s = 3600.0
    clocks.passed_s += SETTLE_S + 1
    clocks.restart()
    assert not clocks.now_s.go_on_from(tmp_path / "clock")
    assert clocks.error_s() == 3600.0


@pytest.mark.parametrize(
    "changed",
    [
        {"boot": "another"},
        {"looked_s": 8.0},
        {"offset_s": float("nan")},
        {"offset_s": [1]},
        {"offset_s": None},
    ],
    ids=str,
)
def test_what_is_of_another_boot_or_damaged_is_not_taken(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    clocks, path = Clocks(), tmp_path / "clock"
    clocks.now_s.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert not clocks.now_s.go_on_from(path)
    path.write_bytes(b"\xff[" * 2000)
    assert not clocks.now_s.go_on_from(path)
    assert clocks.error_s() == 0.0


def test_what_others_planted_is_not_taken(tmp_path: Path) -> None:
    clocks = Clocks()
    clocks.now_s.write(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for planted in ("link", "pipe", "nothing"):
        assert not clocks.now_s.go_on_from(tmp_path / planted)
