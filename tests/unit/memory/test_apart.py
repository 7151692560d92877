"""A sidecar that reads while the trainer notes a round never takes ranks in lock-step for apart."""

from collections.abc import Iterator

import pytest

from paramd.memory.control_page import note_apart
from paramd_service.sidecar.copying.page_requests import apart_reason


class Read(list[int]):
    """A control page's words that are read after each write."""

    def __init__(self) -> None:
        super().__init__([0] * 512)
        self.seen: list[str] = []

    def __setitem__(self, word: object, value: object) -> None:
        super().__setitem__(word, value)  # type: ignore[call-overload]
        self.seen.append(apart_reason(self))  # type: ignore[arg-type]


def rounds(*pairs: tuple[int, int]) -> Iterator[list[str]]:
    words = Read()
    for pair in pairs:
        words.seen.clear()
        note_apart(words, pair)  # type: ignore[arg-type]
        yield list(words.seen)


@pytest.mark.parametrize("numbers", [(62, 63, 64), (500, 100, 101), (7, 7, 0)])
def test_lock_step_is_seen_at_every_moment_forwards_and_after_a_rollback(
    numbers: tuple[int, ...],
) -> None:
    assert [one for seen in rounds(*((n, n) for n in numbers)) for one in seen if one] == []


def test_ranks_that_are_apart_are_told_once_both_words_are_written() -> None:
    *_, last = rounds((10, 10), (10, 11))
    assert "the ranks in 10 to 11" in last[-1]
