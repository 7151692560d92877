"""Requests that must ask sidecars, through one control plane; and what viewers of events cost.

The sidecars are simulated (see `workers.answering`): the control plane, its connections to each of
them and its checks of their answers are real, and what a sidecar does for an answer is not there.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx2
import psutil

from benchmarks.report import Goal, Report, Table
from benchmarks.site import (
    await_all,
    cpu_share_of,
    cpu_used_s,
    signed_in,
    simulated,
    site,
    told_worker,
)
from paramd.security.tickets import handed, shown_of
from paramd.v1 import control_pb2, control_pb2_grpc

SIZES = (32, 128)
P50_GOALS_MS = {32: 10.0, 128: 50.0}
CPU_GOAL_MS = 0.2
RANKS_OF_A_WORKER = 32
VIEWERS = 50
VIEWED_RANKS, QUICK_VIEWED_RANKS = 4096, 256
SNAPSHOTS, BOUNDARY = "GET snapshots", "ScheduleBoundary"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One kind of request, again and again, to a mesh of one size."""

    what: str
    ranks: int
    p50_s: float
    p95_s: float
    cpu_s: float
    """Of the control plane for one sidecar's call, all else that it did meanwhile included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Viewed:
    """The control plane's share of one core."""

    ranks: int
    alone: list[float]
    """One window more: each with viewers lies between two of these."""
    with_viewers: list[float]

    @property
    def more(self) -> float:
        """What viewers add, as a part of what it takes without them just before and after."""
        return statistics.median(
            beside / statistics.mean(around) - 1.0
            for beside, around in zip(self.with_viewers, pairwise(self.alone), strict=True)
        )


def run(*, quick: bool) -> Report:
    """Two kinds of requests to 32 and 128 sidecars; 50 viewers of a mesh of 4,096."""
    asked = [one for ranks in SIZES for one in _ask(ranks, times=20 if quick else 100)]
    viewed = (
        _view(QUICK_VIEWED_RANKS, rounds=1, window_s=6.0)
        if quick
        else _view(VIEWED_RANKS, rounds=5, window_s=15.0)
    )
    return Report(
        name="control_requests",
        tables=[_requests_table(asked), _viewers_table(viewed)],
        goals=[] if quick else [*_request_goals(asked), _viewers_goal(viewed)],
        notes=[
            "Sidecars are simulated (real connections, answers at once), and share this machine "
            "with the control plane and who asks: waiting times include their work, CPU is the "
            "control plane's own."
        ],
        numbers={"asked": [asdict(one) for one in asked], "viewed": asdict(viewed)},
    )


@contextmanager
def _mesh(
    ranks: int, worker: str, ranks_of_a_worker: int
) -> Iterator[tuple[psutil.Process, httpx2.Client]]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paramd-bench-")))
        process, url = stack.enter_context(site(directory))
        client = stack.enter_context(signed_in(directory, url))
        answer = client.post("/api/v1/jobs", json={"job": "run", "world_size": ranks})
        answer.raise_for_status()
        for begin in range(0, ranks, ranks_of_a_worker):
            stack.enter_context(
                simulated(
                    answer.json(), ranks, begin, worker=worker, ranks_of_a_worker=ranks_of_a_worker
                )
            )
        await_all(client, ranks)
        yield process, client


def _ask(ranks: int, *, times: int) -> list[Asked]:
    with _mesh(ranks, "answering", RANKS_OF_A_WORKER) as (process, client):
        job = client.get("/api/v1/jobs/run").json()
        with grpc.insecure_channel(job["control_address"]) as channel:
            kinds = {SNAPSHOTS: _snapshots(client, ranks), BOUNDARY: _boundary(channel, job)}
            return [_asked(what, ranks, kinds[what], process, times) for what in kinds]


def _snapshots(client: httpx2.Client, ranks: int) -> Callable[[], None]:
    def ask() -> None:
        found = client.get("/api/v1/jobs/run/snapshots", params={"limit": ranks}).json()
        if found["partial"] or len(found["ranks"]) != ranks:
            raise RuntimeError(f"not all {ranks} sidecars have answered")

    return ask


def _boundary(channel: grpc.Channel, job: dict[str, Any]) -> Callable[[], None]:
    stub: Any = control_pb2_grpc.ControlServiceStub(channel)
    request = control_pb2.ScheduleBoundaryRequest(job=job["job"], incarnation=job["incarnation"])
    shown = shown_of(handed(job["ticket"], job["ticket_seed"]), None, job["world_size"])
    metadata = (("authorization", f"Bearer {shown}"),)

    def ask() -> None:
        answer = stub.ScheduleBoundary(request, timeout=20.0, metadata=metadata)
        if not answer.captured:
            raise RuntimeError(answer.reason)

    return ask


def _asked(
    what: str, ranks: int, ask: Callable[[], None], process: psutil.Process, times: int
) -> Asked:
    # The first ones connect.
    for _ in range(3):
        ask()
    took_s, before_s = [], cpu_used_s(process)
    for _ in range(times):
        begin_s = time.perf_counter()
        ask()
        took_s.append(time.perf_counter() - begin_s)
    return Asked(
        what=what,
        ranks=ranks,
        p50_s=statistics.median(took_s),
        p95_s=sorted(took_s)[int(0.95 * times)],
        cpu_s=(cpu_used_s(process) - before_s) / (times * ranks),
    )


def _view(ranks: int, *, rounds: int, window_s: float) -> Viewed:
    alone, with_viewers = [], []
    with _mesh(ranks, "joins", 1024) as (process, client):
        # Joining itself is not what is measured, nor what thousands cost in their first minute.
        time.sleep(3.0 * window_s)
        alone.append(cpu_share_of(process, window_s))
        for _ in range(rounds):
            with _viewers(client):
                with_viewers.append(cpu_share_of(process, window_s))
            alone.append(cpu_share_of(process, window_s))
    return Viewed(ranks=ranks, alone=alone, with_viewers=with_viewers)


@contextmanager
def _viewers(client: httpx2.Client) -> Iterator[None]:
    said = {
        "url": str(client.base_url),
        "token": client.headers["authorization"].removeprefix("Bearer "),
        "job": "run",
    }
    with told_worker("viewers", str(VIEWERS), said=said, answer="watching"):
        yield


def _request_goals(asked: list[Asked]) -> list[Goal]:
    return [
        goal
        for one in asked
        for goal in (
            Goal(what=f"{one.what}, {one.ranks} sidecars: p50", measured=1e3 * one.p50_s,
                 limit=P50_GOALS_MS[one.ranks], unit="ms"),
            Goal(what=f"{one.what}, {one.ranks} sidecars: control plane's CPU for each",
                 measured=1e3 * one.cpu_s, limit=CPU_GOAL_MS, unit="ms"),
        )
    ]  # fmt: skip


def _viewers_goal(viewed: Viewed) -> Goal:
    return Goal(
        what=f"{VIEWERS} viewers of events, {viewed.ranks:,} sidecars: more CPU than without",
        measured=100 * viewed.more,
        limit=10,
        unit="%",
    )


def _requests_table(asked: list[Asked]) -> Table:
    return Table(
        title="Requests that ask live sidecars",
        header=["request", "sidecars", "p50 ms", "p95 ms", "CPU of the control plane, ms each"],
        rows=[
            [
                one.what,
                str(one.ranks),
                f"{1e3 * one.p50_s:.1f}",
                f"{1e3 * one.p95_s:.1f}",
                f"{1e3 * one.cpu_s:.3f}",
            ]
            for one in asked
        ],
    )


def _viewers_table(viewed: Viewed) -> Table:
    alone, beside = statistics.median(viewed.alone), statistics.median(viewed.with_viewers)
    return Table(
        title=f"Viewers of events, {viewed.ranks:,} sidecars: CPU of one core",
        header=["none", str(VIEWERS), "more than just before and after"],
        rows=[[f"{100 * alone:.1f} %", f"{100 * beside:.1f} %", f"{100 * viewed.more:.1f} %"]],
    )
