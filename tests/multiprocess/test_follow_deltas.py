"""Followers that have deltas sent: every frame is what torch gathered, in fewer bytes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paramd.mesh.frames.frames import ParamFrame
from paramd.mesh.mesh import Mesh
from tests.integration.engine_servers import Model, engine_server
from tests.launch import start_ranks
from tests.longer import times
from tests.multiprocess.truth import connect_to, wait_until
from tests.multiprocess.workers.followed import JOB, sha256_of

WORKER = "tests.multiprocess.workers.followed"

UPDATES = times(15, 1000)
SETTLING = 5
"""Frames at the beginning, while reader and training find into step."""


@dataclass
class Training:
    """A training that waits for its reader, and what it wrote."""

    folder: Path
    state_dir: Path
    truth: dict[int, dict[str, str]] = field(default_factory=dict)
    _read: int = 0

    def seen(self, step: int, patience_s: float = 30.0) -> None:
        """Let the training go on to the update after `step`, and wait there for the next call."""
        part = self.folder / f"seen.{os.getpid()}"
        part.write_text(f"{step} {patience_s}")
        part.replace(self.folder / "seen")

    def check(self, frame: ParamFrame) -> None:
        """Fail unless the frame's tensors are those that torch gathered after that update."""
        self.read_truth()
        assert {name: sha256_of(frame[name]) for name in frame} == self.truth[frame.step]

    def read_truth(self) -> None:
        """Read what the training has written since."""
        with (self.folder / "truth").open() as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):
                found = json.loads(line)
                self.truth[found["step"]] = found["digests"]
                self._read = file.tell()


@contextmanager
def training(tmp_path: Path, **env: str) -> Iterator[Training]:
    with start_ranks(WORKER, 2, args=["--folder", str(tmp_path)], env=env) as ranks:
        ranks.wait_for_text("attached", rank=0)
        yield Training(tmp_path, ranks.state_dir)
        (tmp_path / "stop").touch()
        ranks.end_well()


@pytest.mark.in_turns
@pytest.mark.timeout(times(400, 1800))
def test_every_follower_has_what_torch_gathered_in_fewer_bytes(tmp_path: Path) -> None:
    with training(tmp_path) as job, connect_to(job.state_dir, JOB) as mesh:
        frames = mesh.follow("*", deltas=True)
        steps, sent_bytes, changed_bytes, whole_bytes = [], 0, 0, 0
        for number, frame in enumerate(frames):
            job.check(frame)
            if number > SETTLING:
                assert frame.dropped == 0, steps
                assert frame.changed_bytes is not None
                sent_bytes += frame.sent_bytes
                changed_bytes += frame.changed_bytes
                whole_bytes += sum(frame[name].nbytes for name in frame)
            steps.append(frame.step)
            # At first the training may be ahead of what it is to wait for.
            job.seen(frame.step, 1.0 if number < SETTLING else 30.0)
            if number == UPDATES + SETTLING:
                break
        print(
            f"{UPDATES:,} updates: {sent_bytes:,} bytes sent, {changed_bytes:,} changed, "
            f"{whole_bytes:,} in all"
        )
        assert changed_bytes < sent_bytes < whole_bytes / 3
        catches_up(job, mesh)
        an_engine_has_what_torch_gathered(job)
        the_example_evaluates(job)


def catches_up(job: Training, mesh: Mesh) -> None:
    """A follower that was away has the changes of all updates that it missed sent as one."""
    job.seen(0, 0.05)
    frames = mesh.follow("*", deltas=True)
    before = next(frames)
    job.check(before)
    job.seen(before.step + 20, 1.0)
    wait_until(lambda: mesh.status().step >= before.step + 20, "20 updates")
    frame = next(one for one in frames if one.step > before.step + 10)
    job.check(frame)
    assert frame.sent_bytes < sum(frame[name].nbytes for name in frame)
    job.seen(frame.step, 1.0)
    for tensor in frame.values():
        tensor.data.fill_(1.0)
    frame = next(frames)
    job.check(frame)
    job.seen(frame.step)


def an_engine_has_what_torch_gathered(job: Training) -> None:
    """`paramd follow` as a user runs it; the engine is a server with SGLang's routes."""
    shared, original = job.folder / "shared", job.folder / "original"
    shared.mkdir()
    original.mkdir()
    save_file({"0.weight": torch.zeros(1)}, original / "model.safetensors")
    model = Model(str(original))
    job.seen(0, 0.05)
    with engine_server("sglang", model) as url:
        command = ("follow", "--to", "sglang", url, "--dir", str(shared), "--deltas", "-n", "2")
        done = run_beside(job, "-m", "paramd.cli", *command, "--job", JOB, "-o", "jsonl")
    updates = [json.loads(line) for line in done.splitlines()]
    assert [update["ok"] for update in updates] == [True] * 2, updates
    assert model.version == updates[-1]["version"] == f"{JOB}-1-{updates[-1]['step']}"
    assert updates[-1]["sent_bytes"] < updates[0]["sent_bytes"]
    job.read_truth()
    assert {name: sha256_of(one) for name, one in model.weights.items()} == job.truth[
        updates[-1]["step"]
    ]


def the_example_evaluates(job: Training) -> None:
    example = Path(__file__).parents[2] / "examples" / "evaluate.py"
    done = run_beside(job, str(example), "--job", JOB, "--frames", "2")
    assert len(done.splitlines()) == 2, done
    assert "bytes sent" in done


def run_beside(job: Training, *arguments: str) -> str:
    """Run our python where the job's state dir is; its stdout."""
    env = os.environ | {"PARAMD_STATE_DIR": str(job.state_dir)}
    done = subprocess.run(
        [sys.executable, *arguments],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_without_room_for_a_base_all_is_sent_whole(tmp_path: Path) -> None:
    with (
        training(tmp_path, PARAMD_DELTA_BUDGET_BYTES="0") as job,
        connect_to(job.state_dir, JOB) as mesh,
    ):
        for number, frame in enumerate(mesh.follow("*", deltas=True)):
            job.check(frame)
            changed = sum(frame[name].nbytes for name in frame.changed)
            assert frame.changed_bytes is not None
            # Of a tensor, a rank's part may be as it was.
            assert 0 < frame.changed_bytes <= changed
            assert frame.sent_bytes > frame.changed_bytes
            job.seen(frame.step)
            if number == 3:
                break
