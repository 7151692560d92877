"""Readers that are slow, many or killed, sidecars that are killed, trainings that end."""

import subprocess
import sys
from pathlib import Path

import pytest

from paramd.errors import ConflictError
from paramd.mesh.mesh import Mesh
from tests.launch import Ranks, start_ranks
from tests.multiprocess.test_gradients import check, take
from tests.multiprocess.truth import connect_to, wait_until
from tests.multiprocess.workers.gradients import JOB

WORKER = "tests.multiprocess.workers.gradients"
OPTIONS = ("--only", "ddp,fsdp2", "--gap-ms", "2")

HOLDER = """
import sys, time, paramd
with paramd.connect(sys.argv[1], sys.argv[2], job=sys.argv[3]) as mesh:
    for frame in mesh.grads("*"):
        print(frame.step, flush=True)
        time.sleep(600)
"""


@pytest.mark.in_turns
def test_readers_sidecars_and_the_end(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    environment = {"PARAMD_FAULTS_DIR": str(faults)}
    arguments = ["--folder", str(tmp_path), *OPTIONS]
    with start_ranks(WORKER, 2, args=arguments, env=environment) as ranks:
        ranks.wait_for_text("attached", rank=0)
        with connect_to(ranks.state_dir, JOB) as mesh:
            slow_reader_gets_the_newest(mesh)
            killed_reader_frees_its_memory(mesh, ranks, tmp_path)
            killed_sidecar_goes_on(mesh, faults)
            detached_training_ends_the_stream(mesh, tmp_path)
        ranks.end_well(30)


def slow_reader_gets_the_newest(mesh: Mesh) -> None:
    """It is busy for 20 updates after each frame."""
    frames, away = [], 20
    for frame in mesh.grads("*"):
        frames.append(frame)
        if len(frames) == 4:
            break
        wait_until(lambda: mesh.status().step > frames[-1].step + away, "training goes on")
    check(frames)
    assert all(frame.dropped >= away - 1 for frame in frames[1:]), [f.dropped for f in frames]


def killed_reader_frees_its_memory(mesh: Mesh, ranks: Ranks, folder: Path) -> None:
    from paramd import places

    endpoint = places._load(ranks.state_dir / JOB / places.ENDPOINT_FILE)
    assert endpoint is not None
    command = [sys.executable, "-m", "tests.program", HOLDER, endpoint.url, endpoint.token, JOB]
    with (folder / "holder").open("wb") as out:
        reader = subprocess.Popen(command, stdout=out)
    try:
        wait_until(
            lambda: (folder / "holder").read_text() != "" and held_bytes(mesh) > 0,
            "the reader holds frames",
        )
    finally:
        reader.kill()
        reader.wait()
    # Before its lease of 30 s is over.
    wait_until(lambda: held_bytes(mesh) == 0, "its memory is free", timeout_s=20)


def held_bytes(mesh: Mesh) -> int:
    return sum(row.snapshot_bytes for row in mesh.status())


def killed_sidecar_goes_on(mesh: Mesh, faults: Path) -> None:
    """At the worst moment: a slot has been taken and is not answered yet."""
    frames = []
    for frame in mesh.grads("*"):
        frames.append(frame)
        if len(frames) == 2:
            (faults / "rank-1.sock").write_text("gradients-copied:kill")
        if len(frames) == 6:
            break
    assert not (faults / "rank-1.sock").exists()
    check(frames)


def detached_training_ends_the_stream(mesh: Mesh, folder: Path) -> None:
    frames = []
    for frame in mesh.grads("*", kind="stats"):
        frames.append(frame)
        if len(frames) == 2:
            (folder / "stop").touch()
    check(frames)


def test_a_killed_trainer_ends_the_stream_with_a_reason(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), *OPTIONS]
    with start_ranks(WORKER, 2, args=arguments) as ranks:
        ranks.wait_for_text("attached", rank=0)
        with connect_to(ranks.state_dir, JOB) as mesh:
            assert len(take(mesh, 2, "*")) == 2
            frames = mesh.grads("*")
            next(frames)
            ranks[1].process.kill()
            with pytest.raises(ConflictError, match="ended"):
                list(frames)
