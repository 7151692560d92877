"""A running training is put back to an earlier state and computes the same bits from there again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paramd.mesh.mesh import Mesh
from tests.launch import Ranks, run_ranks, start_ranks
from tests.longer import sample
from tests.multiprocess.test_resume import KINDS
from tests.multiprocess.truth import connect_to

WORKER = "tests.multiprocess.workers.rewinding"
DEADLINE_S = 90.0


@contextmanager
def rewinding(folder: Path, kind: str, *options: str) -> Iterator[tuple[Ranks, Mesh]]:
    """A training that can be put back, and a client of it."""
    life, faults = folder / "life", folder / "faults"
    for made in (life, faults):
        made.mkdir(exist_ok=True)
    world_size, optimizer = KINDS[kind]
    args = [str(life), "--kind", kind, "--optimizer", optimizer, "--pause-s", "0.005", *options]
    environment = {"PARAMD_FAULTS_DIR": str(faults), "PARAMD_TRAINER_FAULTS_DIR": str(faults)}
    with start_ranks(
        WORKER, world_size, args=args, env=environment, state_dir=folder / "state"
    ) as ranks:
        try:
            ranks.wait_for_text("attached", rank=0)
            with connect_to(ranks.state_dir, "rewinding") as mesh:
                yield ranks, mesh
        except BaseException:
            print(ranks.outputs())
            raise


def wait_for(condition: Callable[[], bool], ranks: Ranks) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, ranks.outputs()
        assert all(rank.process.poll() is None for rank in ranks), ranks.outputs()
        time.sleep(0.005)


def at(folder: Path, rank: int = 0) -> int:
    path = folder / "life" / f"at-{rank}"
    return int(path.read_text() or -1) if path.exists() else -1


def ended(folder: Path, ranks: Ranks, steps: int = 60) -> int:
    """Let the training end some steps from now; return at which."""
    last = at(folder) + steps
    (folder / "life" / "end").write_text(str(last))
    for result in ranks.wait(timeout_s=DEADLINE_S):
        assert result.returncode == 0, ranks.outputs()
    return last


def final(folder: Path, world_size: int) -> list[dict[str, str]]:
    return [json.loads((folder / f"final-{rank}").read_text()) for rank in range(world_size)]


def undisturbed(folder: Path, kind: str, last: int) -> list[dict[str, str]]:
    """The digests of a training without paramd's keeping that ends at that step."""
    world_size, optimizer = KINDS[kind]
    calm = folder / "calm"
    calm.mkdir()
    (calm / "end").write_text(str(last))
    args = [str(calm), "--kind", kind, "--optimizer", optimizer, "--resume", "never"]
    run_ranks(WORKER, world_size, args=args, timeout_s=DEADLINE_S)
    return final(calm, world_size)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", sample(list(KINDS), {"ddp", "fsdp2"}))
def test_from_a_mark_on_training_computes_the_same_bits_again(tmp_path: Path, kind: str) -> None:
    with rewinding(tmp_path, kind) as (ranks, mesh):
        wait_for(lambda: at(tmp_path) >= 3, ranks)
        mark = mesh.mark("before-lr-bump")
        bumped = mesh.set_hyperparameters("group 0", lr=0.5, weight_decay=0.25)
        assert "scheduler" in bumped.warning
        mesh.edit("*", mul=0.5)
        wait_for(lambda: at(tmp_path) >= mark.step + 12, ranks)
        edit = mesh.rollback("before-lr-bump", note="it diverged")
        assert edit.rollback == {"mark": "before-lr-bump", "step": mark.step}
        assert edit.step >= mark.step + 12
        last = ended(tmp_path, ranks)
    for rank in range(KINDS[kind][0]):
        (told,) = (tmp_path / "life" / f"steps-{rank}").read_text().splitlines()
        assert told.endswith(f"to {mark.step}")
    assert final(tmp_path / "life", KINDS[kind][0]) == undisturbed(tmp_path, kind, last)
