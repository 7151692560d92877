"""Memory is short, and sidecars are killed as the kernel would; training computes the same bits.

`PARAMD_TESTS_LONG=1 pytest tests/multiprocess/test_memory_short.py` kills 100 times.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paramd.errors import ExhaustedError, ParamdError
from paramd.mesh.mesh import Mesh
from tests.longer import times, wait_until
from tests.multiprocess.striking import helper
from tests.multiprocess.test_resume import DEADLINE_S, Life, undisturbed
from tests.multiprocess.truth import connect_to

KIND = "fsdp2"
NOTHING_LEFT = {"PARAMD_HOST_RESERVE": str(1 << 50), "PARAMD_STANDING_EVERY": "5"}
"""A reserve that no host has."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def refused(mesh: Mesh) -> str:
    """Why a read is refused; empty while the sidecars are away, which clients wait for."""
    try:
        # The live lane takes none of the sidecars' memory.
        mesh.summon("*", transport="grpc")
    except ExhaustedError as error:
        return str(error)
    except ParamdError:
        return ""
    raise AssertionError("a reader got what should stay free")


@pytest.mark.in_turns
@pytest.mark.timeout(times(900, 7200))
def test_with_nothing_left_readers_are_refused_sidecars_die_and_no_bit_changes(
    tmp_path: Path, stack: ExitStack
) -> None:
    rounds = times(1, 100)
    steps = 120 * rounds
    life = Life(tmp_path, KIND, stack, "--steps", str(steps))
    ranks = life.start("--pause-s", "0.02", env=NOTHING_LEFT)
    wait_until(lambda: all(life.at()), "it trains", DEADLINE_S, ranks.outputs)
    mesh = stack.enter_context(connect_to(ranks.state_dir, "resuming"))
    for number in range(rounds):
        why = wait_until(lambda: refused(mesh), "a reader is refused")
        assert "stay free for the training (PARAMD_HOST_RESERVE)" in why
        assert "a pattern" in why
        wait_until(
            lambda: all("0 of 2 standing snapshots" in one.reason for one in mesh.status()),
            "the status tells of it",
        )
        victim = helper(ranks, "sidecar", number % 2)
        # What the kernel does.
        victim.kill()
        wait_until(lambda victim=victim: not victim.is_running(), "it is dead")
    ranks.end_well(DEADLINE_S + steps / 4)
    assert life.final() == undisturbed(KIND, steps=steps)
    logs = [path.read_text() for path in life.state.glob("*/rank-*.log")]
    assert all('"standing-exhausted"' in log and '"memory-short"' in log for log in logs)
