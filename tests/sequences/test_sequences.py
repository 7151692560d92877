"""Random sequences over all kinds, and the table of pairs; each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import zlib
from functools import cache

import pytest

from tests.launch import ROOT
from tests.longer import takes_all
from tests.sequences.model import KINDS
from tests.sequences.pairs import CELLS, EVENTS

MINUTES = 60 if takes_all() else 3
"""Of all kinds together."""
TURNS = "3" if takes_all() else "1"
LONGEST_S = 1800


@cache
def seed() -> int:
    """Another one for each commit, the same wherever that is tested."""
    said = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return zlib.crc32(said.stdout.encode()) % 100_000


def _told(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True,
        timeout=LONGEST_S, check=False,
    )  # fmt: skip


@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_of_a_random_sequence_is_what_it_says(kind: str) -> None:
    share = MINUTES / len(KINDS)
    how = [] if takes_all() else ["--whole"]
    told = _told(
        "tests.sequences", "--kind", kind, "--seed", str(seed()), "--minutes", str(share), *how
    )
    assert told.returncode == 0, told.stdout[-8000:] + told.stderr[-2000:]


def _events() -> list[str]:
    """All in `make campaigns`; else the gap, which began it all, and another with each commit."""
    others = sorted(EVENTS.keys() - {"idle"})
    return list(EVENTS) if takes_all() else ["idle", others[seed() % len(others)]]


@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("event", _events())
def test_what_is_cached_is_right_after(event: str) -> None:
    """Each cell of the event's row; they share a training, which is what costs."""
    cells = [cell for cell in CELLS if cell.startswith(f"{event}-")]
    told = _told("tests.sequences.pairs", "--cells", ",".join(cells), "--turns", TURNS)
    wrong = [line for line in told.stdout.splitlines() if not line.endswith(": ok")]
    assert told.returncode == 0, "\n".join(wrong) + told.stderr[-2000:]
    assert len(told.stdout.splitlines()) == len(cells)
