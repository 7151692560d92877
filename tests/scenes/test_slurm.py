"""Our batch files under a real Slurm, on two nodes: edited, requeued, cancelled, out of time."""

import json
from pathlib import Path

import pytest

from tests.hosts import wait_until
from tests.launch import ROOT
from tests.slurm import Cluster, cluster, logs

DEADLINE_S = 200.0
BATCH = ROOT / "deploy" / "slurm"
TRAIN = [str(ROOT / "examples" / "train_gpt.py"), "--keep"]
PARAMD = ["python", "-m", "paramd.cli"]

EDITED = """
import paramd
with paramd.connect(job="gpt") as mesh:
    assert [row.reason for row in mesh.status()] == ["", ""]
    mesh.pause()
    edit = mesh.edit("layers.0.norm1.weight", fill=0.25)
    found = mesh.summon("layers.0.*")
    mesh.resume()
    assert found["layers.0.norm1.weight"].eq(0.25).all()
    assert found["layers.0.attention.qkv.weight"].shape == (384, 128)
    assert found["layers.0.attention.qkv.weight"].count_nonzero() == 384 * 128
    print(edit.state.name, found.incarnation)
"""


def await_step(slurm: Cluster, job: str, step: int, *, starts: int = 1) -> None:
    """Wait until a start of the job has made that many steps."""

    def made() -> bool:
        assert slurm.state(job) not in ("FAILED", "CANCELLED", "TIMEOUT"), logs(slurm.shared)
        return slurm.output(job).count(f"step {step} loss") >= starts

    wait_until("it trains", made, timeout_s=DEADLINE_S, told=lambda: logs(slurm.shared))


def await_nothing_left(slurm: Cluster) -> None:
    """Wait until no process of any job is on any node."""
    wait_until(
        "no process is left",
        lambda: not slurm.processes(),
        timeout_s=DEADLINE_S,
        told=lambda: "\n".join(slurm.processes()) + logs(slurm.shared),
    )


def await_state(slurm: Cluster, job: str, *states: str) -> None:
    wait_until(
        f"the job is {states}",
        lambda: slurm.state(job) in states,
        timeout_s=DEADLINE_S,
        told=lambda: f"{slurm.state(job)}\n{logs(slurm.shared)}",
    )


def beside(slurm: Cluster, job: str, *command: str) -> str:
    """What a command prints in a step of the same job, on the node that has rank 0."""
    return slurm.run("srun", "--overlap", "--jobid", job, "--nodes=1", "--ntasks=1", *command)


def told_of(slurm: Cluster, job: str) -> dict[str, str]:
    """What somebody without the job's state dir is given."""
    text = beside(slurm, job, "sh", "-c", 'cat "$PARAMD_STATE_DIR/gpt/endpoint.json"')
    endpoint = json.loads(text)
    return {
        "PARAMD_URL": endpoint["url"],
        "PARAMD_TLS_CA": endpoint["ca_pin"],
        "PARAMD_TOKEN": endpoint["token"],
    }


@pytest.mark.timeout(600)
def test_a_job_under_torchrun_is_edited_from_the_login_node_requeued_and_cancelled(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, nodes=2) as slurm:
        # The hosts' state dirs are on disks of their own, where the login node does not look.
        job = slurm.submit(
            str(BATCH / "torchrun.sbatch"), *TRAIN, "--job", "gpt", env={"PARAMD_RESUME": "auto"}
        )
        await_step(slurm, job, 10)
        assert beside(slurm, job, *PARAMD, "status", "--job", "gpt").count("1.75 MB") == 2
        edited = slurm.run("python", "-c", EDITED, env=told_of(slurm, job))
        assert edited.split() == ["APPLIED", "1"]
        slurm.run("scontrol", "requeue", job)
        await_state(slurm, job, "PENDING")
        # Slurm ends what a job has started, so nothing is left in memory to go on from.
        await_nothing_left(slurm)
        assert "Traceback" not in slurm.output(job)
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        await_step(slurm, job, 10, starts=2)
        edited = slurm.run("python", "-c", EDITED, env=told_of(slurm, job))
        assert edited.split() == ["APPLIED", "2"]
        # Numbers and records went on where they were, on the first node's disk.
        edits = json.loads(beside(slurm, job, *PARAMD, "edits", "--job", "gpt", "-o", "json"))[
            "edits"
        ]
        assert [edit["incarnation"] for edit in edits] == [2, 1]
        slurm.run("scancel", job)
        await_state(slurm, job, "CANCELLED")
        await_nothing_left(slurm)
        assert "Traceback" not in slurm.output(job)


@pytest.mark.timeout(600)
def test_a_job_of_srun_alone_with_a_shared_state_dir_ends_in_time_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, nodes=2) as slurm:
        shared = {"PARAMD_STATE_DIR": str(slurm.shared / "state")}
        command = [str(BATCH / "srun.sbatch"), "python", *TRAIN, "--job", "gpt"]
        job = slurm.submit(*command, env=shared)
        await_step(slurm, job, 10)
        # The login node finds the job by its name, although nobody of it runs there.
        told = slurm.run(*PARAMD, "status", "--job", "gpt", env=shared)
        assert told.count("1.75 MB") == 2
        assert slurm.run("python", "-c", EDITED, env=shared).split() == ["APPLIED", "1"]
        # The two minutes before the limit have begun; Slurm looks twice a minute.
        minutes = slurm.minutes(job)
        slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
        await_state(slurm, job, "COMPLETED")
        await_nothing_left(slurm)
        assert "Traceback" not in slurm.output(job)
        left = {path.suffix for path in (slurm.shared / "state" / "gpt").iterdir()}
        assert not left & {".json", ".sock"}, left
        ended = slurm.run(*PARAMD, "edits", "--job", "gpt", "-o", "json", env=shared)
        assert [edit["state"] for edit in json.loads(ended)["edits"]] == ["APPLIED"]
