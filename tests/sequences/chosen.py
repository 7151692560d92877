"""The sequences that a test takes, each in a process of its own."""

import subprocess
import sys
import zlib
from functools import cache

from tests.launch import ROOT
from tests.longer import takes_all

LONGEST_S = 1800


USUAL_SEED = 50480
"""Of `make test` and CI, as the soak's, so that a red run can be had again."""


@cache
def seed() -> int:
    """In campaigns another one for each commit, the same wherever that is tested."""
    if not takes_all():
        return USUAL_SEED
    said = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return zlib.crc32(said.stdout.encode()) % 100_000


def told(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What a program of this package says."""
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True,
        timeout=2 * LONGEST_S, check=False,
    )  # fmt: skip


def check(kind: str, minutes: float) -> None:
    """Sequences of a kind, as long as that; shrunk where all cases are taken."""
    _run("--kind", kind, minutes)


def check_loops(names: str, minutes: float) -> None:
    """The same of loops, each with one of its kinds."""
    _run("--loop", names, minutes)


def check_all_loops(minutes: float) -> None:
    """Each loop with each of its kinds, with readers and verification beside the operations."""
    _run("--all-loops", "--readers=6", minutes)


def _run(option: str, names: str, minutes: float) -> None:
    how = [] if takes_all() else ["--whole"]
    said = told(
        "tests.sequences", option, names, "--seed", str(seed()), "--minutes", str(minutes), *how
    )
    assert said.returncode == 0, said.stdout[-8000:] + said.stderr[-2000:]
