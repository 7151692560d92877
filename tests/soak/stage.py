"""What an episode runs: jobs with their incarnations, control plane, store, links, small disks."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import paramd
from paramd import places
from paramd.errors import UnreachableError
from paramd.mesh.mesh import Mesh
from tests import postgres as pg
from tests.launch import ROOT, TAG, Ranks, free_port, run_ranks, start_ranks
from tests.multiprocess.striking import LIMIT_S, allowed_s, is_down
from tests.multiprocess.truth import wait_until
from tests.soak.links import BEHIND, HOST, Links, Mode
from tests.soak.plan import Episode

TRAINER = "tests.soak.trainer"
INJECT = Path(__file__).with_name("inject")
START_S = 90.0
DISK_BYTES = 64 << 20
LINGER_S = 8.0
RESTART_S = 0.2
LOG_CHARACTERS = 3000
MOST_PATIENCE = 4
COMMAND_S = 20.0
ALERTS = {"watch_share": 1, "stats_every_s": 2.0, "digests_every_s": 10.0, "norm_floor": 1e-6}


def patience_s(seconds: float) -> float:
    """What a limit means on a busy machine, as `allowed_s`, but never more than four times as
    long: what hangs must be told, however busy the machine is."""
    return min(allowed_s(seconds), MOST_PATIENCE * seconds)


def is_root() -> bool:
    """Whether small disks and control groups can be made."""
    return os.geteuid() == 0


@dataclass
class Start:
    """One start of all ranks."""

    ranks: Ranks
    salt: int
    folder: Path
    incarnations: set[int] = field(default_factory=set)
    ended: bool = False
    """Ranks were killed: nobody promises what is read from now on, but that it is of one step."""

    def finished(self) -> int:
        """Updates that every rank has finished."""
        pages = [self.folder / f"progress-{rank.rank}" for rank in self.ranks]
        return min((struct.unpack("<q", p.read_bytes())[0] for p in pages if p.exists()), default=0)

    def look(self) -> None:
        """Notes the incarnations that rank 0 has told."""
        self.incarnations |= {
            int(n) for n in re.findall(r"attached incarnation (\d+)", self.ranks[0].stdout)
        }


class Job:
    """A job of the stage, which may be started again and again."""

    def __init__(self, stage: Stage, name: str, kind: str, world_size: int) -> None:
        self.stage, self.name, self.kind, self.world_size = stage, name, kind, world_size
        self.starts: list[Start] = []
        self.faults = stage.folder / f"{name}-faults"
        """Where points are armed; sidecars outlive an incarnation, so it is the same for all."""
        self.faults.mkdir()
        self.ports = [free_port() for _ in range(2 * world_size)] if stage.links else []
        """Of gRPC and of bulk streams, for each rank."""
        for port in self.ports:
            stage.links.add(port)
        self._lock = threading.Lock()

    @property
    def now(self) -> Start:
        """The one that runs."""
        return self.starts[-1]

    def start(self) -> None:
        """Starts all ranks, as a launcher would after the last ones ended."""
        number = len(self.starts)
        folder = self.stage.folder / f"{self.name}-{number}"
        folder.mkdir()
        arguments = ["--kind", self.kind, "--job", self.name, "--folder", str(folder)]
        arguments += [
            "--salt",
            str(number),
            "--sidecar-ports",
            "".join(f"{p}," for p in self.ports),
        ]
        ranks = self.stage.stack.enter_context(
            start_ranks(
                TRAINER,
                self.world_size,
                args=arguments,
                env=self.stage.environment(self.faults),
                state_dir=self.stage.state_dir,
            )
        )
        with self._lock:
            self.starts.append(Start(ranks, number, folder))
        ranks.wait_for_text("attached", rank=0, timeout_s=START_S)
        self.now.look()

    def start_of(self, incarnation: int) -> Start:
        """The start that was the job's incarnation of that number."""

        def found() -> Start | None:
            with self._lock:
                for one in reversed(self.starts):
                    one.look()
                    if incarnation in one.incarnations:
                        return one
            return None

        wait_until(lambda: found() is not None, f"{self.name} tells of incarnation {incarnation}")
        one = found()
        assert one is not None
        return one

    def restart(self) -> None:
        """Ends what is left of the ranks, and starts them again."""
        self.now.ended = True
        for rank in self.now.ranks:
            rank.process.kill()
            rank.process.wait()
        self.start()

    def end(self) -> None:
        """The ranks end by themselves, well, and leave nothing."""
        (self.now.folder / "stop").touch()
        ranks = self.now.ranks
        for result in ranks.wait(timeout_s=START_S):
            assert result.returncode == 0, ranks.outputs()
        wait_until(
            lambda: not any(self.stage._helpers(self.name)), f"helpers of {self.name} have left"
        )

    def digests(self) -> int:
        """Compares each incarnation's losses with an undisturbed run's; how many are equal."""
        for number, one in enumerate(self.starts):
            ours = [_lines(one.folder / f"losses-{rank}") for rank in range(self.world_size)]
            rounds = max(map(len, ours))
            plain = self.stage.folder / f"{self.name}-{number}-plain"
            plain.mkdir()
            run_ranks(
                TRAINER,
                self.world_size,
                args=[
                    *("--kind", self.kind, "--folder", str(plain), "--salt", str(one.salt)),
                    *("--rounds", str(rounds), "--rest-ms", "0", "--gap-ms", "0", "--plain"),
                ],
                timeout_s=120 + rounds / 4,
            )
            for rank, losses in enumerate(ours):
                truth = _lines(plain / f"losses-{rank}")[: len(losses)]
                differ = [i for i, pair in enumerate(zip(losses, truth, strict=True), 1)
                          if pair[0] != pair[1]]  # fmt: skip
                assert not differ, (
                    f"{self.name}, start {number}, rank {rank}: {len(differ)} of "
                    f"{len(losses)} losses differ from an undisturbed run's, first that of update "
                    f"{differ[0]}"
                )
            self.stage.updates += rounds
        return len(self.starts)


class Stage:
    """Everything that one episode runs. Use as a context manager."""

    def __init__(self, plan: Episode) -> None:
        self.plan = plan
        self.stack = ExitStack()
        self.links: Links | None = None
        self.postgres: pg.Postgres | None = None
        self.updates = 0
        self.is_site = plan.store != "embedded"

    def __enter__(self) -> Stage:
        with ExitStack() as stack:
            self.stack = stack
            name = tempfile.TemporaryDirectory(prefix="soak-")
            self.folder = Path(stack.enter_context(name))
            for disk in ("state", "exports", "store", "inject"):
                (self.folder / disk).mkdir(mode=0o700)
                if is_root() and disk != "inject":
                    stack.enter_context(_small_disk(self.folder / disk))
            self.state_dir = self.folder / "state"
            self.assets = self.folder / "assets"
            self.assets.mkdir()
            (self.assets / "tokenizer.json").write_text('{"model": {}}')
            if self.is_site:
                self._start_site(stack)
            self.main = Job(self, "main", self.plan.kind, self.plan.world_size)
            self.jobs = [self.main]
            if self.is_site:
                self.jobs.append(Job(self, "side", "ddp", 1))
            for job in self.jobs:
                job.start()
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def environment(self, faults: Path) -> dict[str, str]:
        """What the processes of a job, or a site, find in their environment."""
        path = [str(INJECT), str(ROOT), os.environ.get("PYTHONPATH", "")]
        found = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PARAMD_SOAK_INJECT": str(self.folder / "inject"),
            "PARAMD_STATE_DIR": str(self.state_dir),
            "PARAMD_FAULTS_DIR": str(faults),
            "PARAMD_TRAINER_FAULTS_DIR": str(faults),
            "PARAMD_DESTINATIONS": json.dumps({"exports": str(self.folder / "exports")}),
            "PARAMD_ALERTS": json.dumps(ALERTS),
            "PARAMD_LINGER_S": str(LINGER_S),
        }
        if self.links is not None:
            found |= {
                "PARAMD_ADVERTISE": HOST,
                "PARAMD_CONTROL": f"http://{HOST}:{self.control_ports[0]}",
                "PARAMD_TOKEN_FILE": str(self.state_dir / "_site" / "token"),
            }
        return found

    def door(self, job: str) -> tuple[str, str]:
        """URL and token of a job's REST side.

        Raises:
            UnreachableError: there is none at the moment.
        """
        if self.is_site:
            token = (self.state_dir / "_site" / "token").read_text().strip()
            return f"http://{HOST}:{self.control_ports[0]}", token
        endpoint = places._load(self.state_dir / job / places.ENDPOINT_FILE)
        if endpoint is None:
            raise UnreachableError(f"job {job} has no endpoint")
        return endpoint.url, endpoint.token

    def connect(self, job: str = "main", token: str | None = None) -> Mesh:
        """A client of a job."""
        url, own = self.door(job)
        return paramd.connect(url, token if token is not None else own, job=job, timeout=20.0)

    def process(self, who: str, rank: int) -> psutil.Process:
        """The living process of the main job: sidecar, control or trainer."""
        if who == "trainer":
            return psutil.Process(self.main.now.ranks[rank].process.pid)
        if who == "control" and self.is_site:
            wait_until(lambda: self._site.poll() is None, "the site's control plane")
            return psutil.Process(self._site.pid)
        name = f"{who} {rank}" if who == "sidecar" else who
        found: list[psutil.Process] = []

        def lives() -> bool:
            found[:] = [p for n, p in self._helpers("main") if n == name]
            return bool(found)

        wait_until(lives, f"{name} lives", timeout_s=patience_s(LIMIT_S))
        return found[0]

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """All that live now, with names that say who they are."""
        with suppress(psutil.Error):
            if self.is_site:
                yield "site's control", psutil.Process(self._site.pid)
            for job in self.jobs:
                for rank in job.now.ranks:
                    yield f"{job.name} trainer", psutil.Process(rank.process.pid)
                for name, one in self._helpers(job.name):
                    yield f"{job.name} {name.partition(' ')[0]}", one
            if self.postgres is not None:
                yield "postgres", psutil.Process(self.postgres.process.pid)

    def _helpers(self, job: str) -> Iterator[tuple[str, psutil.Process]]:
        """Living sidecars ("sidecar <rank>") and control plane of a job, whoever started them.

        A sidecar that lingers is taken over by the next incarnation, so its tag says nothing.
        """
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                command = process.cmdline()
                if "--job" not in command or command[command.index("--job") + 1] != job:
                    continue
                if process.environ().get("PARAMD_STATE_DIR") != str(self.state_dir):
                    continue
                if "paramd_service.control" in command:
                    yield "control", process
                elif "paramd_service.sidecar" in command:
                    yield f"sidecar {command[command.index('--rank') + 1]}", process

    def resume_all(self) -> None:
        """Lets go on whatever stopped itself at a point that nobody waits for any more."""
        for _, process in self.processes():
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    process.send_signal(signal.SIGCONT)

    def restart_postgres(self, stop: signal.Signals, away_s: float) -> None:
        """Ends the server, waits, and starts it on the same data."""
        assert self.postgres is not None
        self.postgres.process.send_signal(stop)
        self.postgres.process.wait(30)
        with suppress(FileNotFoundError):
            (self.postgres.directory / "data" / "postmaster.pid").unlink()
        time.sleep(away_s)
        process = pg._start(self.postgres.directory, pg._give_away())
        self.postgres = pg.Postgres(self.postgres.directory, process)
        self.stack.callback(_end, process)
        pg._wait(self.postgres)

    def _start_site(self, stack: ExitStack) -> None:
        self.links = Links()
        stack.callback(self.links.close)
        self.control_ports = [free_port(), free_port()]
        for port in self.control_ports:
            self.links.add(port)
        self._store = f"sqlite:///{self.folder / 'store' / 'control.sqlite'}"
        if self.plan.store == "site-postgres":
            self.postgres = stack.enter_context(pg.postgres())
            self._store = self.postgres.new_database("soak")
        self._site = self._spawn_site()
        over = threading.Event()
        keeper = threading.Thread(target=self._keep_site, args=(over,), name="keeper")
        keeper.start()

        def end() -> None:
            over.set()
            keeper.join()
            _end(self._site)

        stack.callback(end)
        token = self.state_dir / "_site" / "token"
        wait_until(token.exists, "the site has begun")

    def _spawn_site(self) -> subprocess.Popen[bytes]:
        rest, grpc = self.control_ports
        command = [sys.executable, "-m", "paramd_service.control"]
        command += ["--listen", f"{BEHIND}:{rest}", "--grpc-listen", f"{BEHIND}:{grpc}"]
        with (self.folder / "site.log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--report-s", "0.5", "--silent-after-s", "2"],
                env=os.environ | self.environment(self.folder / "inject")
                | {"PARAMD_STORE_URL": self._store, TAG: "site"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _keep_site(self, over: threading.Event) -> None:
        """Starts it again when it ended, as a service manager does."""
        while not over.wait(RESTART_S):
            if self._site.poll() is not None:
                self._site = self._spawn_site()

    def logs(self) -> str:
        """The end of what helpers wrote, and every error of theirs."""
        paths = [*self.state_dir.glob("*/*.log"), *self.folder.glob("site.log")]
        return "\n".join(f"--- {path.parent.name}/{path.name} ---\n{_told(path)}" for path in paths)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Within the block nothing more fits on one of the stage's disks."""
    filler = disk / ".filler"
    with filler.open("wb", buffering=0) as file:
        for block in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while file.write(bytes(block)) == block:
                    pass
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def _small_disk(path: Path) -> Iterator[None]:
    size = f"size={DISK_BYTES},mode=700"
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(path)], check=True, timeout=COMMAND_S
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=COMMAND_S)


def _told(path: Path) -> str:
    text = path.read_text(errors="replace")
    errors = [line for line in text[:-LOG_CHARACTERS].splitlines() if '"level": "error"' in line]
    return "\n".join([*errors[-10:], text[-LOG_CHARACTERS:]])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _lines(path: Path) -> list[str]:
    """Complete lines; a killed rank may leave half of one."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


__all__ = ["Job", "Mode", "Stage", "Start", "full", "is_down", "is_root"]
