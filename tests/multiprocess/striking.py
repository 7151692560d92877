"""Killing and stopping parts of a running job, and what a client then sees."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from paramd.errors import ParamdError
from paramd.mesh.mesh import Mesh
from tests import longer
from tests.launch import Ranks, start_ranks
from tests.longer import wait_until
from tests.multiprocess.stamped import differing

WORKER = "tests.multiprocess.workers.stamp"

LIMIT_S = 5.0
"""Within this time a fault is over or named."""


def allowed_s(seconds: float = LIMIT_S) -> float:
    """What a limit means on a busy machine.

    With n runnable processes for each core everything that computes takes n times as long;
    one second more covers the start of a Python process, which the limit holds several of.
    """
    return seconds * longer.busy() + 1.0


def helper(ranks: Ranks, program: str, rank: int | None = None) -> psutil.Process:
    """The living sidecar of a rank, or the control plane, of a launch."""
    deadline_s = time.monotonic() + allowed_s()
    while time.monotonic() < deadline_s:
        for process in ranks.stragglers():
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if f"paramd_service.{program}" not in command:
                continue
            if rank is None or command[command.index("--rank") + 1] == str(rank):
                return process
        time.sleep(0.02)
    raise AssertionError(f"no {program} of rank {rank} lives\n{ranks.outputs()}")


def is_down(process: psutil.Process) -> bool:
    """Whether it has ended or is stopped."""
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def arm(faults_dir: Path, rank: int, rule: str) -> Path:
    """Has the rank's sidecar strike itself at a named point."""
    path = faults_dir / f"rank-{rank}.sock"
    part = path.with_suffix(".part")
    part.write_text(rule)
    part.replace(path)
    return path


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How one request ended."""

    right: bool
    seconds: float
    step: int
    reason: str
    """Empty when right; `wrong` is never returned, it fails the test."""


Request = Callable[[Mesh], tuple[int, list[str]]]
"""Asks something of a stamp trainer; returns the step, and what differs from it."""


def ask(mesh: Mesh, request: Request) -> Answer:
    """Asks once. A wrong answer, or an error that is none of ours, fails the test."""
    begin_s = time.monotonic()
    try:
        step, wrong = request(mesh)
    except ParamdError as error:
        return Answer(
            right=False,
            seconds=time.monotonic() - begin_s,
            step=-1,
            reason=f"{type(error).__name__}: {error}",
        )
    assert not wrong, wrong
    return Answer(right=True, seconds=time.monotonic() - begin_s, step=step, reason="")


def summon_stamps(transport: str = "grpc", *, buffers: bool = False) -> Request:
    """Summons everything; every value must be the step."""

    def request(mesh: Mesh) -> tuple[int, list[str]]:
        found = mesh.summon("*", transport=transport, buffers=buffers)  # type: ignore[arg-type]
        parameters = {info.name for info in mesh.params("*")} if buffers else set(found)
        return found.step, differing(found, parameters)

    return request


def stats_of_stamps(mesh: Mesh) -> tuple[int, list[str]]:
    """Statistics of everything; smallest and largest must be the step."""
    table = mesh.stats("*")
    wrong = [
        f"step {table.step}: {row.name} from {row.summary.min} to {row.summary.max}"
        for row in table
        if row.summary.count and {row.summary.min, row.summary.max} != {float(table.step)}
    ]
    return table.step, wrong


@contextmanager
def stamps(
    folder: Path,
    kind: str = "fsdp2",
    world_size: int = 2,
    *options: str,
    state_dir: Path | None = None,
    lockstep: bool = True,
) -> Iterator[Ranks]:
    """A stamp trainer, by default in lockstep, with named faults to arm below `<folder>/faults`.

    The caller ends it well with `end_well`, or leaves it to be killed.
    """
    faults_dir = folder / "faults"
    faults_dir.mkdir(exist_ok=True)
    arguments = ["--kind", kind, "--stop", str(folder / "stop")]
    arguments += ["--lockstep", "--gap-ms", "3"] if lockstep else []
    with start_ranks(
        WORKER,
        world_size,
        args=[*arguments, *options],
        env={"PARAMD_FAULTS_DIR": str(faults_dir)},
        state_dir=state_dir,
    ) as ranks:
        try:
            ranks.wait_for_text("attached", rank=0)
            yield ranks
        except BaseException:
            print(ranks.outputs(), logs(ranks), sep="\n")
            raise


def logs(ranks: Ranks) -> str:
    """The end of what the sidecars and the control plane wrote."""
    paths = sorted(ranks.state_dir.glob("*/*.log"))
    return "\n".join(f"--- {p.name} ---\n{p.read_text(errors='replace')[-3000:]}" for p in paths)


def end_well(ranks: Ranks, folder: Path) -> None:
    """The trainers end by themselves and leave nothing."""
    (folder / "stop").touch()
    ranks.end_well()
    wait_until(lambda: not ranks.stragglers(), "none left", allowed_s(10), ranks.outputs)


def rest(ranks: Ranks, folder: Path) -> int:
    """Has all ranks rest between two updates, until `folder/rest` is removed; their step."""
    (folder / "rest").touch()
    text = ranks.wait_for_text("resting at", rank=0)
    for rank in list(ranks)[1:]:
        ranks.wait_for_text("resting at", rank=rank.rank)
    return int(text.rsplit("resting at", 1)[1].split()[0])
