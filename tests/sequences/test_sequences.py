"""Random sequences over all kinds, and the table of pairs; each in a process of its own."""

import pytest

from tests.longer import takes_all
from tests.sequences.chosen import LONGEST_S, check, seed, told
from tests.sequences.model import KINDS
from tests.sequences.pairs import CELLS, EVENTS

MINUTES = 60 if takes_all() else 2
"""Of all kinds together."""
TOGETHER = KINDS if takes_all() else [",".join(KINDS)]
"""Kinds that share a process, and what it imports, take turns."""
TURNS = "3" if takes_all() else "1"


@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("kinds", TOGETHER)
def test_every_answer_of_a_random_sequence_is_what_it_says(kinds: str) -> None:
    check(kinds, MINUTES / len(TOGETHER))


def _events() -> list[str]:
    """All in `make campaigns`; else one with each commit."""
    return list(EVENTS) if takes_all() else [list(EVENTS)[seed() % len(EVENTS)]]


@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("event", _events())
def test_what_is_cached_is_right_after(event: str) -> None:
    """Each cell of the event's row, or every fourth; they share a training, which is what costs."""
    cells = [cell for cell in CELLS if cell.startswith(f"{event}-")]
    cells = cells if takes_all() else cells[seed() // len(EVENTS) % 4 :: 4]
    said = told("tests.sequences.pairs", "--cells", ",".join(cells), "--turns", TURNS)
    wrong = [line for line in said.stdout.splitlines() if not line.endswith(": ok")]
    assert said.returncode == 0, "\n".join(wrong) + said.stderr[-2000:]
    assert len(said.stdout.splitlines()) == len(cells)
