"""Readers that are slow, many or killed, sidecars that are killed, trainings that end."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramd.errors import ConflictError
from paramd.mesh.frames.frames import GradFrame
from paramd.mesh.mesh import Mesh
from tests.launch import Ranks, start_ranks
from tests.multiprocess.test_gradients import check, take, wrong_values
from tests.multiprocess.truth import connect_to, wait_until
from tests.multiprocess.workers.gradients import JOB

WORKER = "tests.multiprocess.workers.gradients"
OPTIONS = ("--kinds", "ddp,fsdp2", "--gap-ms", "2")
READERS = 20

HOLDER = """
import sys, time, paramd
with paramd.connect(sys.argv[1], sys.argv[2], job=sys.argv[3]) as mesh:
    for frame in mesh.grads("*"):
        print(frame.step, flush=True)
        time.sleep(600)
"""


def test_readers_sidecars_and_the_end(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    environment = {"PARAMD_FAULTS_DIR": str(faults)}
    arguments = ["--folder", str(tmp_path), *OPTIONS]
    with start_ranks(WORKER, 2, args=arguments, env=environment) as ranks:
        ranks.wait_for_text("attached", rank=0)
        with connect_to(ranks.state_dir, JOB) as mesh:
            slow_reader_gets_the_newest(mesh)
            many_readers_share(mesh, ranks)
            killed_reader_frees_its_memory(mesh, ranks, tmp_path)
            killed_sidecar_goes_on(mesh, faults)
            parameters_are_followed(mesh)
            detached_training_ends_the_stream(mesh, tmp_path)
        for result in ranks.wait(timeout_s=30):
            assert result.returncode == 0, ranks.outputs()


def take_all(frames: Iterator[GradFrame[Any]]) -> None:
    for _ in frames:
        pass


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


def many_readers_share(mesh: Mesh, ranks: Ranks) -> None:
    """Each has frames that are right; no update waits for any of them."""
    wrong: list[str] = []
    counts = [0] * READERS
    until_s = time.monotonic() + 4.0

    def read(number: int) -> None:
        patterns = ("*",) if number % 2 else (f"*blocks.{number % 4 // 2}*",)
        kind = "full" if number % 3 else "stats"
        with connect_to(ranks.state_dir, JOB) as own:
            last = 0
            for frame in own.grads(*patterns, kind=kind):  # type: ignore[arg-type]
                wrong.extend(wrong_values(frame))
                if frame.step <= last:
                    wrong.append(f"{frame.step} after {last}")
                last = frame.step
                counts[number] += 1
                if counts[number] > 1 and time.monotonic() > until_s:
                    return

    threads = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert min(counts) >= 2, counts


def killed_reader_frees_its_memory(mesh: Mesh, ranks: Ranks, folder: Path) -> None:
    from paramd import places

    endpoint = places._load(ranks.state_dir / JOB / places.ENDPOINT_FILE)
    assert endpoint is not None
    command = [sys.executable, "-c", HOLDER, endpoint.url, endpoint.token, JOB]
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
    killed_s = time.monotonic()
    wait_until(lambda: held_bytes(mesh) == 0, "its memory is free", timeout_s=5)
    assert time.monotonic() - killed_s < 1.5


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


def parameters_are_followed(mesh: Mesh) -> None:
    """The same asking; frozen parameters are read once."""
    frames = []
    for frame in mesh.follow("fsdp2.*", every=2):
        frames.append(frame)
        if len(frames) == 4:
            break
    assert all(frame.step % 2 == 0 for frame in frames)
    assert set(frames[0].changed) == set(frames[0])
    for before, frame in itertools.pairwise(frames):
        assert frame.step > before.step
        assert frame["fsdp2.module.weight"] is before["fsdp2.module.weight"]
        assert "fsdp2.embed.weight" in frame.changed
        assert not frame["fsdp2.embed.weight"].equal(before["fsdp2.embed.weight"])
    # What a reader does to a tensor is its own, whether or not torch counts it.
    name = "fsdp2.module.weight"
    pristine = frames[0][name].clone()
    stream = mesh.follow("fsdp2.*", every=2)
    seen = next(stream)
    for change in (
        lambda tensor: tensor.zero_(),
        lambda tensor: tensor.numpy().fill(1.0),
        lambda tensor: tensor.data.__setitem__(0, 7.0),
        lambda tensor: tensor.resize_(1),
    ):
        given = seen[name]
        change(given)
        seen = next(stream)
        assert seen[name].equal(pristine)
        assert seen[name] is not given
        assert name not in seen.changed


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
                take_all(frames)
