"""Random sequences over kinds and loops, and the table of pairs; each in a process of its own."""

from random import Random

import pytest

from tests.longer import share, takes_all
from tests.sequences.chosen import LONGEST_S, check, check_all_loops, check_loops, seed, told
from tests.sequences.loops.loops import LOOPS
from tests.sequences.model import KINDS
from tests.sequences.pairs import CELLS, EVENTS

MINUTES = 60 if takes_all() else 0.7
"""Of all kinds that are taken together."""
LOOP_MINUTES = 60 if takes_all() else 0.3
"""Of all loops that are taken."""
SOON = [
    name for name, loop in LOOPS.items()
    if not (loop.package or loop.late_s or name == "assigned-update")
]  # fmt: skip
"""Loops that need no package, and no minute until they are served. Not the one of which an answer
is known to say less than it might: the first gradients of parameters that were replaced by an
update written by hand."""
TOGETHER = KINDS if takes_all() else [",".join(share(list(KINDS), 2))]
"""Kinds that share a process, and what it imports, take turns: half of them with each commit."""
TURNS = "3" if takes_all() else "1"


@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("kinds", TOGETHER)
def test_every_answer_of_a_random_sequence_is_what_it_says(kinds: str) -> None:
    check(kinds, MINUTES / len(TOGETHER))


@pytest.mark.timeout(2 * LONGEST_S)
def test_every_answer_is_right_whatever_the_script_has_in_its_loop() -> None:
    """Each loop, with each of its kinds; or one of two that are drawn."""
    if takes_all():
        return check_all_loops(LOOP_MINUTES)
    return check_loops(",".join(share(Random(seed()).sample(SOON, 2), 2)), LOOP_MINUTES)


def _events() -> list[str]:
    """All in `make campaigns`; else one with each commit."""
    return list(EVENTS) if takes_all() else [list(EVENTS)[seed() % len(EVENTS)]]


@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("event", _events())
def test_what_is_cached_is_right_after(event: str) -> None:
    """Each cell of the event's row, or every eighth; they share a training, which is what costs."""
    cells = [cell for cell in CELLS if cell.startswith(f"{event}-")]
    cells = cells if takes_all() else share(cells[seed() // len(EVENTS) % 4 :: 4], 2)
    said = told("tests.sequences.pairs", "--cells", ",".join(cells), "--turns", TURNS)
    wrong = [line for line in said.stdout.splitlines() if not line.endswith(": ok")]
    assert said.returncode == 0, "\n".join(wrong) + said.stderr[-2000:]
    assert len(said.stdout.splitlines()) == len(cells)
