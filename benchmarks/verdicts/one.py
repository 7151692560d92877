"""Run one case: `python -m benchmarks.verdicts.one CASE FOLDER MINUTES` writes what it saw as JSON.

The process imports torch once and forks the ranks. Then it plays torchrun, which ends the other
ranks when one has failed, and the user who looks at the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from benchmarks.verdicts import cases
from benchmarks.verdicts.case import WITHIN_S, Case
from benchmarks.verdicts.training import CLOCK_FILE, ONSET_FILE, SICK_RANK, Training
from benchmarks.verdicts.watch import Job
from paramd.errors import ParamdError

WORLD_SIZE = 2
TAG = "PARAMD_VERDICTS_CASE"
"""Variable in the environment of all processes of a case."""

LOOK_EVERY_S = 1.0
ONSET_SHARE = 0.5
"""Of a case's time, what passes before its sickness."""

AGENT_GRACE_S = 30.0
"""How long torchrun lets the other ranks end after one has failed."""

SHIFTED_CLOCK = f"""
import os, sys, time
_real, _path = time.time, os.path.join(os.environ["{TAG}"], "{CLOCK_FILE}")

def _shifted():
    try:
        with open(_path) as file:
            return _real() + float(file.read() or 0)
    except OSError:
        return _real()

_words = sys.orig_argv
if os.environ.get("RANK") == "{SICK_RANK}" and "paramd_service.control" not in " ".join(_words):
    time.time = _shifted
"""
"""As `sitecustomize` of what rank 1 starts: its clock is the host's and what the file adds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the case; its outcome is `FOLDER/outcome.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(cases()))
    parser.add_argument("folder", type=Path)
    parser.add_argument("minutes", type=float)
    options = parser.parse_args(arguments)
    # So that what it started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    run(cases()[options.case], options.folder.resolve(), seconds=60 * options.minutes)
    return 0


def run(case: Case, folder: Path, *, seconds: float) -> None:
    """Run one case in this folder. Every process of it has ended when this returns."""
    state_dir = folder / "state"
    state_dir.mkdir(mode=0o700, parents=True)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "OMP_NUM_THREADS": "1",
        "PARAMD_STATE_DIR": str(state_dir),
        # A port for each case, so that they may run side by side.
        "PARAMD_LISTEN": "127.0.0.1:0",
        TAG: str(folder),
    }
    job = Job(state_dir)
    ranks: dict[int, int] = {}
    try:
        for rank in range(WORLD_SIZE):
            ranks[rank] = _fork(case, rank, folder, onset_s=seconds * ONSET_SHARE)
        ended = _watch(case, job, ranks, folder, seconds=seconds)
        (folder / "outcome.json").write_text(
            json.dumps({
                "case": case.name,
                "onset": _onset(folder),
                "ended": ended,
                "seconds": seconds,
                "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
                "load": round(os.getloadavg()[1], 1),
                "unreached_count": job.unreached_count,
                "lines": [asdict(one) for one in job.lines],
            }, indent=1)
        )  # fmt: skip
        (folder / "record.json").write_text(json.dumps(job.record()))
    finally:
        _end_all(folder, list(ranks.values()))


def _fork(case: Case, rank: int, folder: Path, *, onset_s: float) -> int:
    """Start a rank; nothing in this process may have threads yet. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        out = os.open(folder / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if case.own_clock and rank == SICK_RANK:
            _shift_clock(folder)
        training = Training(rank=rank, folder=folder, onset_s=onset_s, pace_s=case.pace_s)
        case.train(training)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _shift_clock(folder: Path) -> None:
    """Give this rank, and what it starts, a clock that jumps when the file says so."""
    path = folder / "site"
    path.mkdir(exist_ok=True)
    (path / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    parts = [str(path), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in parts if part)
    exec(compile(SHIFTED_CLOCK, "sitecustomize", "exec"), {})  # noqa: S102


def _watch(
    case: Case, job: Job, ranks: dict[int, int], folder: Path, *, seconds: float
) -> dict[int, int]:
    """Look once a second until the time is over. Returns exit codes of ranks that ended."""
    began_s = time.monotonic()
    # Until it answers for the first time it has the patience of one whose sickness has not begun.
    over_s = began_s + 4 * seconds
    reached = False
    ended: dict[int, int] = {}
    first_end_s = 0.0
    acted = False
    while True:
        time.sleep(LOOK_EVERY_S)
        job.look()
        now_s = time.monotonic()
        if job.lines and not reached:
            reached, began_s, over_s = True, now_s, now_s + seconds
        onset = _onset(folder)
        if onset is not None and case.act is not None and not acted:
            # On a busy machine an answer may be late: then once more.
            with suppress(ParamdError):
                case.act(job)
                acted = True
        _reap(ranks, ended)
        if ended and not first_end_s:
            first_end_s = now_s
            _tell(ranks, ended, signal.SIGTERM)
        if first_end_s and now_s > first_end_s + AGENT_GRACE_S:
            _tell(ranks, ended, signal.SIGKILL)
        # A machine under load makes fewer steps: the onset comes later, and so does the end.
        if case.expected is not None and onset is None:
            over_s = began_s + 4 * seconds
        elif onset is not None and case.expected is not None:
            over_s = max(began_s + seconds, _late_s(job, onset["monotonic_s"]))
        if now_s > over_s:
            return ended


def _late_s(job: Job, onset_s: float) -> float:
    """When a sick case may end: soon after its first line, else when that is late."""
    told = [one.s for one in job.lines if one.is_bad and one.s >= onset_s]
    return told[0] + 3.0 if told else onset_s + WITHIN_S + 5.0


def _reap(ranks: dict[int, int], ended: dict[int, int]) -> None:
    for rank, pid in ranks.items():
        if rank not in ended:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[rank] = os.waitstatus_to_exitcode(status)


def _tell(ranks: dict[int, int], ended: dict[int, int], number: signal.Signals) -> None:
    for rank, pid in ranks.items():
        if rank not in ended:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _onset(folder: Path) -> dict[str, float] | None:
    path = folder / ONSET_FILE
    return json.loads(path.read_text()) if path.exists() else None


def _end_all(folder: Path, ranks: list[int]) -> None:
    """Kill what carries the case's tag; ranks may be stopped, and helpers outlive them."""
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in ranks:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    for _ in range(50):
        left = [one for one in psutil.process_iter() if _carries(one, folder)]
        if not left:
            return
        for one in left:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, timeout=0.2)


def _carries(process: psutil.Process, folder: Path) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        return process.environ().get(TAG) == str(folder)
    except (psutil.Error, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
