"""Ray Train on two raylets: attached, read and edited from outside, and resumed after a kill."""

import json
import os
import re
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import paramd
from paramd.places import running_jobs
from tests.hosts import wait_until
from tests.launch import ROOT, start_ranks
from tests.needs import missing

UNDER_RAY = ROOT / "tests" / "multiprocess" / "workers" / "under_ray.py"
EXAMPLE = ROOT / "examples" / "train_ray.py"
JOB = "on-ray"
DEADLINE_S = 250.0


def attached(log: Path) -> list[dict[str, int]]:
    """What a rank's sidecars have logged of their trainers, the newest last."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in map(json.loads, lines) if line["event"] == "attached"]


@pytest.mark.timeout(600)
def test_a_worker_that_is_killed_is_started_again_by_ray_and_goes_on_from_memory(
    private_state_dir: Path,
) -> None:
    if find_spec("ray") is None:
        missing("ray (pip install 'paramd[ray]')")
    args = [str(EXAMPLE), "--job", JOB, "--steps", "100000", "--pause-s", "0.02"]
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        start_ranks(
            UNDER_RAY, 1, args=args, env={"RAY_TMPDIR": folder}, state_dir=private_state_dir
        ) as ranks,
    ):
        log = private_state_dir / JOB / "rank-1.log"

        def trains(incarnation: int) -> bool:
            assert ranks[0].process.poll() is None, ranks.outputs()
            told = [line["incarnation"] for line in attached(log)]
            return told[-1:] == [incarnation] and any(
                endpoint.incarnation == incarnation for endpoint in running_jobs()
            )

        wait_until("it trains", lambda: trains(1), timeout_s=DEADLINE_S, told=ranks.outputs)
        edit_and_read()
        with paramd.connect(job=JOB) as mesh:
            # At a boundary: a kill within an update would cost the steps since a standing snapshot.
            held = mesh.pause().step
            os.kill(attached(log)[-1]["trainer_pid"], signal.SIGKILL)
        wait_until("it trains again", lambda: trains(2), timeout_s=DEADLINE_S, told=ranks.outputs)
        edit_and_read()
        resumed = re.search(r"resumed at step (\d+) \((live|snapshot)\)", ranks[0].stdout)
        assert resumed is not None, ranks.outputs()
        assert resumed[2] == "snapshot" or int(resumed[1]) == held, ranks.outputs()
        ranks[0].process.send_signal(signal.SIGINT)
        ranks.wait(timeout_s=60.0)


def edit_and_read() -> None:
    """From outside, over both shards."""
    with paramd.connect(job=JOB) as mesh:
        wait_until(
            "both ranks are well",
            lambda: [row.reason for row in mesh.status()] == ["", ""],
            timeout_s=DEADLINE_S,
        )
        mesh.pause()
        edit = mesh.edit("0.weight", fill=0.125)
        found = mesh.summon("*")
        mesh.resume()
        assert edit.state.name == "APPLIED"
        assert found["0.weight"].shape == (64, 8)
        assert found["0.weight"].eq(0.125).all()
        assert found["2.weight"].count_nonzero() == 64
