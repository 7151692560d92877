"""When schedules export, and what they keep."""

import pytest

from paramd_service.exports.schedules import Cadence, Due, due, to_remove


@pytest.mark.parametrize(
    ("last", "step", "running", "expected"),
    [
        (0, 9, False, Due.NOT_YET),
        (0, 10, False, Due.BEGIN),
        (0, 57, False, Due.BEGIN),
        (57, 59, False, Due.NOT_YET),
        (57, 60, False, Due.BEGIN),
        (57, 60, True, Due.SKIP),
        (0, -1, False, Due.NOT_YET),
        (57, 3, False, Due.NOT_YET),
    ],
)
def test_every_so_many_steps(last: int, step: int, running: bool, expected: Due) -> None:
    assert due(10, last_step=last, step=step, running=running) is expected


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "gone"),
    [(None, None, []), (2, None, [0, 1, 2]), (2, 2, [1]), (9, None, []), (1, 3, [1, 2])],
)
def test_retention(keep_last: int | None, keep_every: int | None, gone: list[int]) -> None:
    cadence = Cadence(every_steps=1, keep_last=keep_last, keep_every=keep_every)
    assert to_remove(cadence, [(number, number) for number in range(5)]) == gone


def test_what_was_removed_does_not_move_what_stays() -> None:
    cadence = Cadence(every_steps=1, keep_last=1, keep_every=2)
    there = [(number, number) for number in (0, 2, 4, 5, 6)]
    assert to_remove(cadence, there) == [5]
