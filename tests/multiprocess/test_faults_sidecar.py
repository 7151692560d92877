"""Sidecars and the control plane of a real job, killed and stopped: right, refused, never wrong."""

import signal
import time
from pathlib import Path

import pytest

from paramd.mesh.mesh import Mesh
from tests.launch import Ranks
from tests.longer import share
from tests.multiprocess.striking import (
    Answer,
    Request,
    allowed_s,
    arm,
    ask,
    end_well,
    helper,
    is_down,
    stamps,
    stats_of_stamps,
    summon_stamps,
)
from tests.multiprocess.truth import connect_to, wait_until

OVER_GRPC = summon_stamps()
OVER_STREAMS = summon_stamps("stream")
AT_A_BOUNDARY = summon_stamps(buffers=True)

POINTS: dict[str, Request] = {
    "pin-prepared": OVER_GRPC, "copy-begun": OVER_GRPC, "copy-chunk": OVER_GRPC,
    "copy-moved": OVER_GRPC, "pin-answered": OVER_GRPC, "capture-ready": AT_A_BOUNDARY,
    "boundary-copied": AT_A_BOUNDARY, "read-chunk": OVER_GRPC, "stats-item": stats_of_stamps,
    "mapped": summon_stamps("same-host"), "live": summon_stamps("auto"),
    "stream-granted": OVER_STREAMS, "stream-open": OVER_STREAMS, "stream-window": OVER_STREAMS,
}  # fmt: skip
KILLED = share(list(POINTS), 4)
# Each costs the time it takes to notice; the soak stops them at all points.
STOPPED = share(["copy-chunk", "boundary-copied", "live", "stream-granted"], 2)


@pytest.mark.timeout(300)
def test_sidecars_struck_at_named_points_are_named_and_right_afterwards(tmp_path: Path) -> None:
    with stamps(tmp_path) as ranks, connect_to(ranks.state_dir, "stamp") as mesh:
        for index, point in enumerate(KILLED):
            request = POINTS[point]
            begin_s, answer = strike(ranks, mesh, tmp_path, index % 2, f"{point}:kill", request)
            recovered(mesh, request, begin_s, answer, f"killed at {point}")
            assert_trains_on(mesh, index % 2)
        for index, point in enumerate(STOPPED):
            rank, request = index % 2, POINTS[point]
            process = helper(ranks, "sidecar", rank)
            _, answer = strike(ranks, mesh, tmp_path, rank, f"{point}:stop", request)
            assert answer.right or f"rank {rank}" in answer.reason, answer.reason
            assert_trains_on(mesh, 1 - rank)
            process.send_signal(signal.SIGCONT)
            recovered(mesh, request, time.monotonic(), None, f"went on after {point}")
        end_well(ranks, tmp_path)


def strike(
    ranks: Ranks, mesh: Mesh, folder: Path, rank: int, rule: str, request: Request
) -> tuple[float, Answer]:
    """Asks until the sidecar has struck itself; returns when that request began, and its end."""
    process = helper(ranks, "sidecar", rank)
    armed = arm(folder / "faults", rank, rule)
    deadline_s = time.monotonic() + 30
    while True:
        begin_s, answer = time.monotonic(), ask(mesh, request)
        assert answer.seconds < allowed_s(), (rule, answer)
        if is_down(process):
            assert not armed.exists()
            print(
                f"{rule} rank {rank}: {'right' if answer.right else answer.reason[:70]}"
                f" after {answer.seconds:.2f} s"
            )
            return begin_s, answer
        assert begin_s < deadline_s, f"{rule}: the point was not passed"


def recovered(
    mesh: Mesh, request: Request, begin_s: float, answer: Answer | None, what: str
) -> None:
    """Asks until it is right again; that must be soon."""
    while answer is None or not answer.right:
        answer = ask(mesh, request)
        assert answer.seconds < allowed_s(), answer
        taken_s = time.monotonic() - begin_s
        assert answer.right or taken_s < allowed_s(), f"{what}: {answer.reason}"
    print(f"  {what}: right again after {time.monotonic() - begin_s:.2f} s")


def assert_trains_on(mesh: Mesh, rank: int) -> None:
    """The ranks go in lockstep, so one rank's steps show all."""
    first = step_of(mesh, rank)
    wait_until(lambda: step_of(mesh, rank) > first + 2, "training goes on", timeout_s=allowed_s())


def step_of(mesh: Mesh, rank: int) -> int:
    return next(row.step for row in mesh.status() if row.rank == rank)
