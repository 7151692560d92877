"""Starts real ranks: one process each, with torchrun's environment, gloo and a state dir.

    results = run_ranks("tests.multiprocess.workers.patterns", 1, args=["clamped"])

    with start_ranks("tests/multiprocess/workers/stamp.py", 2) as ranks:
        ranks.wait_for_text("listening", rank=0)
        ranks[1].process.send_signal(signal.SIGSTOP)
        results = ranks.wait(timeout_s=60, stop_on_failure=False)

A module is forked from a process that has imported torch (`warm.py`); a script is started.
A rank's output goes to files, so it can be read while the rank runs and nobody has to
drain a pipe. What a rank starts carries a tag in its environment; by it also those that left
the rank's session (sidecars) are found and ended.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from tests import warm
from tests.warm import Forker, WarmProcess, WarmStart, start_children_with
from tests.warm_server import HELPER

ROOT = Path(__file__).resolve().parent.parent
TAG = "PARAMD_TEST_RUN"
POLL_S = 0.02
GRACE_S = 10.0
"""How long the other ranks may go on after one has failed, and stragglers after all ended."""

SHOWN_CHARACTERS = 6000
"""How much of the end of each output a failure shows."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How one rank ended. `returncode` is negative for a signal, as in subprocess."""

    rank: int
    returncode: int
    stdout: str
    stderr: str
    killed: bool
    """The launcher ended it: a timeout, or another rank had failed."""


class RanksError(AssertionError):
    """A rank failed, hung, or left processes behind; the message holds all outputs."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One running rank and where its output goes."""

    rank: int
    process: subprocess.Popen[bytes]
    stdout_path: Path
    stderr_path: Path

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")


class Ranks:
    """The ranks of one launch, indexed by rank."""

    def __init__(self, ranks: Sequence[Rank], *, tag: str, state_dir: Path) -> None:
        self._ranks = tuple(ranks)
        self._tag = tag
        self.state_dir = state_dir

    def __getitem__(self, rank: int) -> Rank:
        return self._ranks[rank]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks)

    def wait(self, *, timeout_s: float, stop_on_failure: bool = True) -> list[RankResult]:
        """Waits for all ranks; ends those that are late.

        Args:
            timeout_s: for all ranks together; then what still runs is killed.
            stop_on_failure: once a rank has failed, the others get `GRACE_S` and no more,
                since they usually wait in a collective for ever.
        """
        deadline = time.monotonic() + timeout_s
        while (running := self._running()) and time.monotonic() < deadline:
            if stop_on_failure and any(r.process.returncode for r in self._ranks):
                deadline = min(deadline, time.monotonic() + GRACE_S)
                stop_on_failure = False
            time.sleep(POLL_S)
        killed = {r.rank for r in running}
        for rank in running:
            _kill_group(rank.process)
        return [
            RankResult(
                rank=r.rank,
                returncode=r.process.wait(),
                stdout=r.stdout,
                stderr=r.stderr,
                killed=r.rank in killed,
            )
            for r in self._ranks
        ]

    def end_well(self, timeout_s: float = 60.0) -> None:
        """Waits for all ranks, none of which may fail."""
        results = self.wait(timeout_s=timeout_s)
        assert not any(one.returncode for one in results), self.outputs()

    def wait_for_text(self, text: str, *, rank: int, timeout_s: float = 60.0) -> str:
        """Waits until a rank has printed `text` to stdout. Returns its stdout so far."""
        deadline = time.monotonic() + timeout_s
        while text not in (seen := self[rank].stdout):
            if self[rank].process.poll() is not None and text not in self[rank].stdout:
                raise RanksError(f"rank {rank} ended before it printed {text!r}\n{self.outputs()}")
            if time.monotonic() > deadline:
                raise RanksError(
                    f"rank {rank} did not print {text!r} in {timeout_s} s\n{self.outputs()}"
                )
            time.sleep(POLL_S)
        return seen

    def stragglers(self) -> list[psutil.Process]:
        """Living processes of this launch other than the ranks: sidecars, workers."""
        ranks = {r.process.pid for r in self._ranks}
        return [p for p in _processes(self._tag, ranks) if p.pid not in ranks]

    def outputs(self) -> str:
        """The end of every rank's output, for a failure's message."""
        parts = []
        for r in self._ranks:
            code = r.process.poll()
            parts.append(f"===== rank {r.rank}, returncode {code} =====")
            parts.append(f"--- stdout ---\n{r.stdout[-SHOWN_CHARACTERS:]}")
            parts.append(f"--- stderr ---\n{r.stderr[-SHOWN_CHARACTERS:]}")
        return "\n".join(parts)

    def kill(self) -> None:
        """Ends every process of this launch."""
        for rank in self._running():
            _kill_group(rank.process)
            rank.process.wait()
        left = self.stragglers()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=GRACE_S)

    def _running(self) -> list[Rank]:
        return [r for r in self._ranks if r.process.poll() is None]


@contextmanager
def start_ranks(
    target: str | Path,
    world_size: int,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    state_dir: Path | None = None,
) -> Iterator[Ranks]:
    """Starts `world_size` ranks of a script (path ending in .py) or module (dotted name).

    Every process of the launch has ended when the block ends. `state_dir` becomes
    `PARAMD_STATE_DIR`; by default it is a short-lived folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="paramd-ranks-"))
    tag = uuid.uuid4().hex
    state = state_dir if state_dir is not None else folder / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    common = _environment(world_size, state, tag) | dict(env if env is not None else {})
    started: list[Rank] = []
    ranks = Ranks((), tag=tag, state_dir=state)
    try:
        for rank in range(world_size):
            started.append(_start(str(target), args, rank, common, folder))
            ranks = Ranks(started, tag=tag, state_dir=state)
        yield ranks
    finally:
        ranks.kill()
        shutil.rmtree(folder, ignore_errors=True)


def run_ranks(
    target: str | Path,
    world_size: int,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    check: bool = True,
) -> list[RankResult]:
    """Runs ranks to their end. Returns one result per rank, in rank order.

    With `check` a rank that fails, hangs or leaves a process behind raises `RanksError`
    with all outputs; without it the caller looks at the results.
    """
    with start_ranks(target, world_size, args=args, env=env) as ranks:
        results = ranks.wait(timeout_s=timeout_s)
        if check:
            bad = [r.rank for r in results if r.returncode != 0]
            if bad:
                raise RanksError(f"ranks {bad} failed or hung\n{ranks.outputs()}")
            _check_no_stragglers(ranks)
    return results


def free_port() -> int:
    """A free port below the kernel's ephemeral range.

    So no outgoing connection and no bind to port 0 can take it before it is used.
    """
    for _ in range(200):
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port in [20000, 32000)")


def _environment(world_size: int, state_dir: Path, tag: str) -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    return os.environ | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PARAMD_STATE_DIR": str(state_dir),
        "PARAMD_LISTEN": "127.0.0.1:0",
        TAG: tag,
    }


@cache
def warm_start() -> Forker:
    """What forks the ranks of this process; conftest.py starts and closes it."""
    return warm.inherited if warm.inherited is not None else WarmStart("ranks")


@cache
def warm_services() -> WarmStart:
    """The same for the sidecars and control planes that a test starts itself."""
    services = WarmStart("service")
    start_children_with(service=services, ranks=warm_start())
    return services


def warm_children() -> None:
    """From now on it forks also what `subprocess.Popen` starts, services with torch as well."""
    warm_start().await_ready()
    start_children_with(service=warm_start(), ranks=warm_start())


def end_warm_start() -> None:
    """Ends what `warm_start` and `warm_services` began, if they did."""
    for begun in (warm_start, warm_services):
        if begun.cache_info().currsize:
            begun().close()


def _start(
    target: str, args: Sequence[str], rank: int, common: Mapping[str, str], folder: Path
) -> Rank:
    stdout_path, stderr_path = folder / f"{rank}.out", folder / f"{rank}.err"
    env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    with stdout_path.open("wb") as out, stderr_path.open("wb") as err:
        if target.endswith(".py"):
            process = subprocess.Popen(
                [sys.executable, target, *args],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        else:
            process = WarmProcess(warm_start(), [target, *args], env=env, stdout=out, stderr=err)
    return Rank(rank=rank, process=process, stdout_path=stdout_path, stderr_path=stderr_path)


def _check_no_stragglers(ranks: Ranks) -> None:
    deadline = time.monotonic() + GRACE_S
    while left := ranks.stragglers():
        if time.monotonic() > deadline:
            names = [f"{p.pid} {' '.join(_command_line(p)).rstrip()}" for p in left]
            raise RanksError(f"processes left behind: {names}\n{ranks.outputs()}")
        time.sleep(POLL_S)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def _processes(tag: str, sessions: set[int]) -> list[psutil.Process]:
    """Living processes with the tag, or in the session of a rank: forked ones show no tag."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            is_of_launch = os.getsid(process.pid) in sessions or process.environ().get(TAG) == tag
            # What forks a rank's children is the tests' own, and ends with the rank.
            if is_alive and is_of_launch and HELPER not in process.cmdline():
                found.append(process)
    return found


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ["(gone)"]
