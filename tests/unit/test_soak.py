"""The soak's plan is the same for the same seed, and its oracle sees what it is there to see."""

import random
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from paramd.mesh.edits.calls import EditState
from tests.launch import ROOT
from tests.soak import plan
from tests.soak.actors import Operator
from tests.soak.oracle import Oracle, Tally, WrongError
from tests.soak.stage import Start
from tests.soak.trainer import stamp

STEP, SALT = 40, 1
UP, WIDE = "blocks.1.up.", "blocks.1.wide."


def test_every_kind_of_fault_has_its_turn_and_every_point_of_the_code_is_one() -> None:
    dealt = [
        fault.kind
        for number in range(9)
        for event in plan.episode(1, number).events
        for fault in event
    ]
    assert set(dealt) == set(plan.KINDS)
    assert len(plan.KINDS) > 40
    for who, points in (("sidecar", plan.SIDECAR_POINTS), ("trainer", plan.TRAINER_POINTS)):
        for point in points:
            assert {f"{who} {point} kill", f"{who} {point} stop"} <= set(dealt)


HANGS = """
import subprocess, sys, threading
from tests.soak.watchdog import Watchdog
with Watchdog("make soak SEED=7", limit_s=60.0) as watchdog:
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, flush=True)
    watchdog.expect("first", 60.0)
    watchdog.expect("a wait for nothing", 0.1)
    threading.Event().wait()
"""


def test_what_hangs_is_ended_and_told_with_where_it_was() -> None:
    command = [sys.executable, "-c", HANGS]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "not over after 0 s: a wait for nothing" in done.stderr
    assert "repeat it with: make soak SEED=7" in done.stderr
    assert "most recent call first" in done.stderr
    deadline_s = time.monotonic() + 20.0
    with suppress(psutil.NoSuchProcess):
        # It dies some time after the signal, and whoever adopted it may not reap it.
        while psutil.Process(int(done.stdout)).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@pytest.mark.parametrize("late", [-1, 1, 2])
def test_a_swap_at_another_step_than_the_compared_one_is_seen(oracle: Oracle, late: int) -> None:
    mesh: Any = SimpleNamespace(
        status=lambda: SimpleNamespace(step=STEP),
        pause=lambda **_: SimpleNamespace(step=STEP),
        resume=lambda **_: None,
        edit=lambda *_, if_step, **__: SimpleNamespace(
            state=EditState.APPLIED, step=if_step + late
        ),
    )
    actor: Any = SimpleNamespace(oracle=oracle, chance=random.Random(1), over=False)
    with pytest.raises(WrongError, match="was applied at"):
        Operator()._compare_and_swap(actor, mesh)


@pytest.fixture
def oracle(tmp_path: Path) -> Oracle:
    (tmp_path / "progress-0").write_bytes(struct.pack("<q", STEP - 1))
    ranks: Any = [SimpleNamespace(rank=0)]
    start = Start(ranks, SALT, tmp_path)
    job: Any = SimpleNamespace(now=start, start_of=lambda incarnation: start)
    return Oracle(job, Tally())


def judge(oracle: Oracle, step: int = STEP, **changed: torch.Tensor) -> None:
    """Of an answer that is right at `STEP`, but for what is changed."""
    found = {
        "blocks.0.up.weight": torch.full((3, 4), stamp(STEP, SALT)),
        "blocks.0.down.bias": torch.full((5,), stamp(STEP, SALT)),
        f"{UP}weight": torch.zeros(3, 4),
        f"{UP}bias": torch.zeros(3),
        f"{WIDE}weight": torch.zeros(3),
        "embed.weight": torch.randn(4, 4),
    }
    oracle.judge("lane", oracle.ask(), 1, step, found | changed)


def wide(value: float) -> dict[str, torch.Tensor]:
    return {f"{WIDE}weight": torch.full((3,), value)}


@pytest.mark.parametrize("step", [STEP - 1, STEP + 1, STEP + 4000])
def test_values_of_another_step_are_seen(oracle: Oracle, step: int) -> None:
    with pytest.raises(WrongError, match="mixed"):
        judge(oracle, step)


def test_one_element_of_another_step_is_seen(oracle: Oracle) -> None:
    judge(oracle)
    assert oracle.tally.answers == {"lane": 1}
    bias = torch.full((5,), stamp(STEP, SALT))
    bias[4] = stamp(STEP - 1, SALT)
    with pytest.raises(WrongError, match="mixed"):
        judge(oracle, **{"blocks.0.down.bias": bias})


def test_an_answer_older_than_a_finished_update_is_seen(oracle: Oracle, tmp_path: Path) -> None:
    (tmp_path / "progress-0").write_bytes(struct.pack("<q", STEP + 1))
    with pytest.raises(WrongError, match="stale"):
        judge(oracle)


def test_half_an_edit_is_seen(oracle: Oracle) -> None:
    oracle.ledger.begin(UP, 5.0)
    judge(oracle)
    both = {f"{UP}weight": torch.full((3, 4), 5.0), f"{UP}bias": torch.full((3,), 5.0)}
    judge(oracle, **both)
    with pytest.raises(WrongError, match="split"):
        judge(oracle, **{f"{UP}bias": both[f"{UP}bias"]})


def test_a_lost_edit_and_one_that_comes_back_are_seen(oracle: Oracle) -> None:
    oracle.ledger.applied(WIDE, oracle.ledger.begin(WIDE, 5.0), SALT)
    oracle.ledger.refused(oracle.ledger.begin(WIDE, 6.0))
    for value in (0.0, 6.0):
        with pytest.raises(WrongError, match="lost"):
            judge(oracle, **wide(value))
    judge(oracle, **wide(5.0))


def test_an_edit_in_another_incarnation_is_none_in_this_one(oracle: Oracle) -> None:
    oracle.ledger.applied(WIDE, oracle.ledger.begin(WIDE, 5.0), SALT + 1)
    judge(oracle)
    with pytest.raises(WrongError, match="lost"):
        judge(oracle, **wide(5.0))
