"""1,500 connections a second from one address, while an owner at another asks: a control plane's
REST, its gRPC, and a sidecar's gRPC. Each of the owner's requests has a connection of its own.

Then what another job asks of a site while somebody sends too much of everything to each operation
of REST, and what is asked of a control plane whose gRPC is sent that."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import psutil
import pytest

from benchmarks.report import Goal, Report, Table
from paramd.security.tickets import Signer
from paramd.v1 import control_pb2
from paramd_service.control.access.join import METHOD_ROLES
from tests.integration import test_bounds
from tests.integration.control_process import PRIVATE_KEY, TOKEN, control_plane
from tests.integration.control_process import ticket as control_ticket
from tests.integration.fake_trainer import TrainerSettings, attach
from tests.integration.sidecar_process import sidecar, ticket

PER_S = 1_500
PAUSE_S = 0.05
GIVEN_BACK_S = 20.0
ANSWERED_S = 0.1
"""Within which others are to be answered while a server is sent too much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flooded:
    """One port."""

    what: str
    per_s: float
    """Connections that were opened, a second."""
    alone_p50_s: float
    alone_p95_s: float
    p50_s: float
    p95_s: float
    longest_s: float
    asked: int
    refused: int
    grown_bytes: int
    """Memory at its most during the flood, above what it was before."""
    left_bytes: int
    """The same, `GIVEN_BACK_S` after it."""


def run(*, quick: bool) -> Report:
    """Each port in turn."""
    seconds = 5.0 if quick else 20.0
    with (
        tempfile.TemporaryDirectory(prefix="paramd-bench-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PARAMD_STATE_DIR", folder)
        goals = _besieged()
        found = _of_control_plane(seconds)
        with sidecar(Path(folder) / "s") as process:
            trainer = attach(process.socket_path, TrainerSettings(arena_bytes=1 << 20))
            with closing(trainer):
                trainer.send_mesh()
                ask = _caller(trainer.address, "/paramd.v1.SidecarService/GetState", ticket())
                pid, port = process.process.pid, int(trainer.address.rpartition(":")[2])
                found.append(_flooded("a sidecar's gRPC", pid, port, ask, seconds))
    return Report(
        name="flood",
        tables=[_table(found)],
        goals=goals,
        notes=[],
        numbers={"flooded": [asdict(one) for one in found]},
    )


def _besieged() -> list[Goal]:
    """The worst answers that others got, over REST and gRPC, in a siege by each."""
    goals: list[Goal] = []
    with (
        test_bounds.site() as (control, token),
        _asked_beside("REST", [control.url, control.grpc_address, "other", token], goals),
    ):
        test_bounds.besieged_over_rest(control, token, chosen=test_bounds.EACH)
    with (
        control_plane() as control,
        _asked_beside("gRPC", [control.url, control.grpc_address, "run", TOKEN], goals),
    ):
        service = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
        test_bounds.besieged(
            control.process.pid, control.grpc_address, service, METHOD_ROLES, Signer(PRIVATE_KEY),
            "run", None, chosen=test_bounds.EACH,
        )  # fmt: skip
    return goals


@contextmanager
def _asked_beside(siege: str, arguments: list[str], goals: list[Goal]) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.workers.others", *arguments]
    with tempfile.NamedTemporaryFile() as told:
        with subprocess.Popen(command, stdout=told) as asking:
            while not Path(told.name).stat().st_size:
                time.sleep(PAUSE_S)  # it imports
            yield
            asking.terminate()
        lines = Path(told.name).read_text().splitlines()
    for how in ("REST", "gRPC"):
        times = [1e3 * float(line.split()[1]) for line in lines if line.startswith(how)]
        p50 = f"p50 {statistics.median(times):.1f} ms"
        what = f"beside too much over {siege}, another's {how}: worst of {len(times)} ({p50})"
        goals.append(Goal(what=what, measured=max(times), limit=1e3 * ANSWERED_S, unit="ms"))


def _of_control_plane(seconds: float) -> list[Flooded]:
    with control_plane() as control:
        pid = control.process.pid
        rest, of_grpc = urlsplit(control.url).port, int(control.grpc_address.rpartition(":")[2])
        assert rest is not None

        def get() -> None:
            with closing(HTTPConnection("127.0.0.1", rest)) as connection:
                headers = {"authorization": f"Bearer {TOKEN}"}
                connection.request("GET", "/api/v1/jobs/run", headers=headers)
                assert connection.getresponse().status == 200

        ((_, shown),) = control_ticket()
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        ask = _caller(control.grpc_address, path, shown.removeprefix("Bearer "))
        return [
            _flooded("a control plane's REST", pid, rest, get, seconds),
            _flooded("a control plane's gRPC", pid, of_grpc, ask, seconds),
        ]


def _caller(address: str, path: str, shown: str) -> Callable[[], None]:
    def ask() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options=options) as channel:
            call = channel.stream_stream(path)
            metadata = [("authorization", f"Bearer {shown}")]
            for _ in call(iter([b""]), timeout=10, metadata=metadata):
                break

    return ask


def _flooded(what: str, pid: int, port: int, ask: Callable[[], None], seconds: float) -> Flooded:
    alone, _ = _asked(ask, seconds / 2)
    process = psutil.Process(pid)
    before = most = process.memory_info().rss
    command = [sys.executable, "-m", "benchmarks.workers.flood", str(port), str(seconds)]
    command += [str(PER_S), "GET / HTTP/1.1\r\nX: "]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as flood:
        times, refused = [], 0
        while flood.poll() is None:
            part, failed = _asked(ask, 1.0)
            times, refused = times + part, refused + failed
            most = max(most, process.memory_info().rss)
        assert flood.stdout is not None
        opened = int(flood.stdout.read())
    time.sleep(GIVEN_BACK_S)
    return Flooded(
        what=what,
        per_s=opened / seconds,
        alone_p50_s=statistics.median(alone),
        alone_p95_s=_p95(alone),
        p50_s=statistics.median(times),
        p95_s=_p95(times),
        longest_s=max(times),
        asked=len(times) + refused,
        refused=refused,
        grown_bytes=most - before,
        left_bytes=process.memory_info().rss - before,
    )


def _asked(ask: Callable[[], None], seconds: float) -> tuple[list[float], int]:
    """The times of requests that were answered, and how many were not."""
    times, refused, until_s = [], 0, time.monotonic() + seconds
    while time.monotonic() < until_s:
        begin_s = time.perf_counter()
        try:
            ask()
        except Exception:
            refused += 1
        else:
            times.append(time.perf_counter() - begin_s)
        time.sleep(PAUSE_S)
    return times, refused


def _p95(times: list[float]) -> float:
    return sorted(times)[int(0.95 * len(times))]


def _table(found: list[Flooded]) -> Table:
    return Table(
        title=f"{PER_S:,} connections a second from one address; an owner at another",
        header=[
            "port", "opened a second", "alone p50 / p95 ms", "flooded p50 / p95 / longest ms",
            "refused", "memory MiB more, most / after",
        ],
        rows=[
            [
                one.what,
                f"{one.per_s:,.0f}",
                f"{1e3 * one.alone_p50_s:.1f} / {1e3 * one.alone_p95_s:.1f}",
                f"{1e3 * one.p50_s:.1f} / {1e3 * one.p95_s:.1f} / {1e3 * one.longest_s:.0f}",
                f"{one.refused} of {one.asked}",
                f"{one.grown_bytes / 2**20:.0f} / {one.left_bytes / 2**20:.0f}",
            ]
            for one in found
        ],
    )  # fmt: skip
