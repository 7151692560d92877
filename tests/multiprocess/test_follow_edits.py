"""Followed parameters while edits change them: a frame is of one step and of the same edits."""

from __future__ import annotations

import threading
from pathlib import Path

from paramd.mesh.frames.frames import ParamFrame
from paramd.mesh.mesh import Mesh
from tests.launch import start_ranks
from tests.multiprocess.truth import connect_to
from tests.multiprocess.workers.gradients import JOB

WORKER = "tests.multiprocess.workers.gradients"
# Its optimizer changes nothing: whatever changes is an edit's.
OPTIONS = ("--kinds", "fsdp2", "--truth")
NAME = "fsdp2.embed.weight"
"""Sharded: each rank has half of it."""

EDITS = 25


def test_no_frame_mixes_what_was_before_and_after_an_edit(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), *OPTIONS]
    with start_ranks(WORKER, 2, args=arguments) as ranks:
        ranks.wait_for_text("attached", rank=0)
        with connect_to(ranks.state_dir, JOB) as mesh:
            edits_come_whole_and_in_order(mesh)
            edits_while_held_come_with_the_next_frame(mesh)
        (tmp_path / "stop").touch()
        for result in ranks.wait(timeout_s=30):
            assert result.returncode == 0, ranks.outputs()


def value_of(frame: ParamFrame) -> float:
    """The one value of all elements; fails on two."""
    tensor = frame[NAME]
    low, high = float(tensor.min()), float(tensor.max())
    assert low == high, f"step {frame.step} mixes {low} and {high}"
    return low


def edits_come_whole_and_in_order(mesh: Mesh) -> None:
    mesh.edit(NAME, fill=0.0)
    failures: list[BaseException] = []

    def edit() -> None:
        try:
            for value in range(1, EDITS + 1):
                mesh.edit(NAME, fill=float(value))
        except BaseException as error:
            failures.append(error)

    editing = threading.Thread(target=edit)
    values: list[float] = []
    for frame in mesh.follow(NAME):
        if not values:
            editing.start()
        values.append(value_of(frame))
        before = values[-2] if len(values) > 1 else None
        assert (NAME in frame.changed) == (values[-1] != before)
        if values[-1] == EDITS or failures:
            break
    editing.join()
    assert not failures, failures
    assert values == sorted(values)
    assert len(set(values)) > EDITS // 3, values


def edits_while_held_come_with_the_next_frame(mesh: Mesh) -> None:
    frames = mesh.follow(NAME)
    assert value_of(next(frames)) == EDITS
    mesh.pause()
    mesh.edit(NAME, fill=-1.0)
    held_at = mesh.status().step
    mesh.step(1)
    mesh.resume()
    # What was copied before the hold, and not read yet, may come first.
    found = next(frame for frame in frames if frame.step > held_at)
    assert value_of(found) == -1.0
    assert value_of(next(frames)) == -1.0
