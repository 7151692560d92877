"""What several hosts cost: reading over the job's TLS, attaching, and the control plane.

Hosts are network, mount and process namespaces of this machine, on a bridge (tests/hosts.py); all
share its cores. Needs root.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Goal, Report, Table
from paramd.security import authority
from tests.hosts import Host, wait_until
from tests.scenes.test_hosts import Training, client_env, training

WORLD_SIZE = 2
READER = [sys.executable, "-m", "benchmarks.workers.far_reader"]
WAYS = {"one host": (1, 2), "two hosts, TLS": (2, 1)}
"""Hosts, and ranks on each."""


def run(*, quick: bool) -> Report:
    """Two ranks, FSDP2."""
    numel, rounds, attaches, watched_s = (1 << 23, 3, 2, 5.0) if quick else (1 << 25, 15, 5, 30.0)
    found = _read(numel, rounds)
    took_s: dict[str, list[float]] = {way: [] for way in WAYS}
    control: dict[str, float] = {}
    for turn in range(attaches):
        for way, (count, ranks) in WAYS.items():
            last = turn == attaches - 1
            seconds, cpu = _attach(count, ranks, watched_s if last else 0.0)
            took_s[way].append(seconds)
            control[way] = cpu
    return _report(found, took_s, control, quick=quick)


def _read(numel: int, rounds: int) -> dict[str, Any]:
    """By turns from a third host: a whole model, and its bytes over plain TLS sockets."""
    with _training(2) as (job, client), ExitStack() as stack:
        job.arguments = [str(job.folder / "at"), str(numel)]
        job.start()
        endpoint = job.wait_attached()
        authority.write(job.folder / "tls", names=[host.ip for host in job.hosts], days=1)
        pem, key, ca = (
            str(job.folder / "tls" / name) for name in ("server.pem", "server.key", "ca.pem")
        )
        share = str(4 * numel // len(job.hosts))
        for number, host in enumerate(job.hosts):
            output = job.folder / f"serves-{number}"
            process = host.start([*READER, "serve", host.ip, share, pem, key], output=output)
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_until(
                "listens", lambda output=output: "listens" in output.read_text(), timeout_s=60
            )
        told = client.run(
            [*READER, "read", str(rounds), share, ca, *(host.ip for host in job.hosts)],
            env=client_env(endpoint),
            timeout_s=600.0,
        )
        job.stop()
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def _attach(count: int, ranks: int, watched_s: float) -> tuple[float, float]:
    """Seconds of `attach`, and CPU seconds of the control plane for a rank and hour of training."""
    with _training(count) as (job, _):
        job.ranks = ranks
        job.start()
        job.wait_attached()
        took_s = _told_s(job.output(0))
        cpu_s = _cpu_s(job.hosts[0].folder, watched_s) if watched_s else 0.0
        job.stop()
    return took_s, cpu_s / WORLD_SIZE


@contextmanager
def _training(count: int) -> Iterator[tuple[Training, Host]]:
    with (
        tempfile.TemporaryDirectory(prefix="paramd-bench-") as folder,
        training(count, Path(folder)) as found,
    ):
        yield found


def _told_s(output: Path) -> float:
    (line,) = [one for one in output.read_text().splitlines() if one.startswith("attached ")]
    return float(json.loads(line.removeprefix("attached "))["took_s"])


def _cpu_s(folder: Path, watched_s: float) -> float:
    """CPU seconds of the control plane in an hour of a training that nobody reads."""
    (control,) = [
        process
        for process in psutil.process_iter()
        if "paramd_service.control" in _words(process)
        and _environment(process).get("PARAMD_STATE_DIR") == str(folder / "state")
    ]
    before, begin_s = control.cpu_times(), time.monotonic()
    time.sleep(watched_s)
    after = control.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    return 3600 * used_s / (time.monotonic() - begin_s)


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _environment(process: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error):
        return dict(process.environ())
    return {}


def _report(
    found: dict[str, Any], took_s: dict[str, list[float]], control: dict[str, float], *, quick: bool
) -> Report:
    seconds, size_bytes = found["seconds"], found["bytes"]
    ratio = statistics.median(
        theirs / ours for ours, theirs in zip(seconds["paramd"], seconds["sockets"], strict=True)
    )
    one, two = (statistics.median(took_s[way]) for way in WAYS)
    rows = [
        [name, _spread(times), f"{size_bytes / 1e9 / statistics.median(times):.2f}"]
        for name, times in (
            (f"paramd, {' and '.join(found['lanes'])}", seconds["paramd"]),
            ("Python's TLS sockets, one to each host", seconds["sockets"]),
        )
    ]
    goals = [
        Goal(what="reading over TLS, speed / Python's TLS sockets", measured=ratio, limit=0.8,
             at_least=True),
        Goal(what="attach on two hosts, beyond one host's", measured=two - one, limit=1, unit="s"),
        Goal(what="control plane's CPU for a rank, two hosts / one",
             measured=control["two hosts, TLS"] / control["one host"], limit=1.25),
    ]  # fmt: skip
    return Report(
        name="hosts",
        tables=[
            Table(
                title="Reading a whole model from a third host",
                header=[f"{size_bytes / 2**20:.0f} MiB from two hosts", "s", "GB/s"],
                rows=rows,
            ),
            Table(
                title="Two ranks",
                header=["", "attach in s", "control plane's CPU, s for a rank and hour"],
                rows=[[way, _spread(took_s[way]), f"{control[way]:.0f}"] for way in WAYS],
            ),
        ],
        goals=[] if quick else goals,
        notes=["Medians (least to most). Both hosts and the reader share this machine's cores."],
        numbers={"read": found, "attach": took_s, "control": control},
    )


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
