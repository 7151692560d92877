"""With replicas=1 a training whose whole host is lost goes on elsewhere, with the same bits."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts import Host, hosts, wait_until
from tests.multiprocess.test_resume import WORKER, undisturbed

DEADLINE_S = 120.0
STEPS = 200


@dataclass
class Job:
    """A training with a rank on each of two hosts, through its starts."""

    folder: Path
    steps: int
    started: int = 0
    processes: Sequence[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, places: Sequence[Host], *, pause_s: float) -> None:
        """One start by torchrun on these hosts; rank 0 is on the first."""
        self.started += 1
        launch = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(places)),
            "--nproc-per-node", "1", "--master-addr", places[0].ip,
            "--master-port", str(29600 + self.started),
        ]  # fmt: skip
        worker = ["-m", WORKER, str(self.folder)]
        options = ["--kind", "ddp", "--steps", str(self.steps), "--pause-s", str(pause_s)]
        self.processes = [
            host.start(
                [*launch, "--node-rank", str(number), *worker, *options],
                output=self._output(number),
                env={
                    "PARAMD_REPLICAS": "1",
                    "PARAMD_STANDING_EVERY": "4",
                    "PARAMD_COPY_RATE_BYTES": "1000000",
                },
            )
            for number, host in enumerate(places)
        ]

    def await_copies(self, above: int) -> int:
        """Wait until all ranks have copies of a later step than that on other hosts."""

        def copied() -> bool:
            assert all(process.poll() is None for process in self.processes), self.told()
            return all(number > above for number in self._numbers("copies"))

        wait_until("copied", copied, timeout_s=DEADLINE_S, told=self.told)
        return min(self._numbers("copies"))

    def lose(self, host: Host) -> int:
        """A host without power, and the others' trainers killed; the last step that is left."""
        host.kill()
        at = max(self._numbers("at"))
        for process in self.processes:
            for child in psutil.Process(process.pid).children(recursive=True):
                # Trainers and torchrun; sidecars are left to themselves.
                with suppress(psutil.Error):
                    if WORKER in " ".join(child.cmdline()):
                        child.kill()
        for process in self.processes:
            process.kill()
            process.wait()
        # Once more: those that are left train on until they are killed.
        return max(at, *self._numbers("at"))

    def starts(self, rank: int) -> list[Any]:
        lines = (self.folder / f"starts-{rank}").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def final(self) -> list[dict[str, str]]:
        return [json.loads((self.folder / f"final-{rank}").read_text()) for rank in range(2)]

    def told(self) -> str:
        return "\n".join(self._output(number).read_text() for number in range(2))

    def _numbers(self, name: str) -> list[int]:
        paths = [self.folder / f"{name}-{rank}" for rank in range(2)]
        # Empty while it is written.
        return [int(path.read_text() or 0) if path.exists() else 0 for path in paths]

    def _output(self, number: int) -> Path:
        return self.folder / f"out-{self.started}-{number}"


@contextmanager
def job_on_hosts(count: int, folder: Path, steps: int) -> Iterator[tuple[Job, list[Host]]]:
    life = folder / "life"
    life.mkdir()
    with hosts(count, folder) as found:
        job = Job(life, steps)
        try:
            yield job, found
        finally:
            for process in job.processes:
                process.kill()
                process.wait()


@pytest.mark.in_turns
@pytest.mark.timeout(400)
def test_hosts_that_are_lost_one_after_the_other_cost_the_steps_since_the_last_copy(
    tmp_path: Path,
) -> None:
    with job_on_hosts(4, tmp_path, STEPS) as (job, (one, two, three, four)):
        job.start([one, two], pause_s=0.05)
        copied = job.await_copies(3)
        # With it goes the control plane, and the only count of incarnations.
        at = job.lose(one)
        # Its place is taken by a host that torchrun numbers last: the ranks change places.
        job.start([two, three], pause_s=0.05)
        wait_until("resumed", lambda: len(job.starts(0)) == 2, timeout_s=DEADLINE_S, told=job.told)
        resumed = job.starts(0)[1]
        assert resumed["how"] == "snapshot", job.told()
        assert copied <= resumed["step"] < at, (copied, resumed, at)
        assert "that of rank 0 was kept by rank 0, that of rank 1 was kept by rank 0" in job.told()
        # The host that was left is lost next: the new one keeps its copies by then.
        copied, at = job.await_copies(resumed["step"]), job.lose(two)
        job.start([four, three], pause_s=0.0)
        for process in job.processes:
            assert process.wait(DEADLINE_S) == 0, job.told()
        again = job.starts(0)[2]
        assert (again["how"], copied <= again["step"] <= at) == ("snapshot", True), (copied, again)
        assert "that of rank 0 was kept by rank 1" in job.told()
        assert [rank[1:] for rank in map(job.starts, range(2))] == [[resumed, again]] * 2
        assert job.final() == undisturbed("ddp", steps=STEPS)
