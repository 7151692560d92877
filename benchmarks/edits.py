"""Edits of a running mesh: from call to APPLIED, how long training stands, a whole write-back."""

from __future__ import annotations

import statistics
from contextlib import ExitStack

from benchmarks.big import WORLD_SIZE, Big, big
from benchmarks.harness import GIB
from benchmarks.ranks import ObedientRanks
from benchmarks.report import Goal, Report, Table

STEP_S = 0.02
SMALL = "0.weight[0:64]"
"""64 rows of 4,096 float32: 1 MiB."""

PEER = "set_model_state_dict, full, broadcast from rank 0"
UNSHARD = "local summon with writeback of one 64 MiB unit, which all ranks take part in"
HOST = "write-back on the same host, of what was summoned for writing"
OWN = "write-back on the same host, of other tensors"
TCP = "write-back over TCP streams"
GRPC = "write-back over gRPC"
RAW = "two raw loopback sockets, warm memory"


def run(*, quick: bool) -> Report:
    """1 GiB of float32 over two ranks; `quick` takes a quarter of it and fewer rounds."""
    with ExitStack() as stack:
        job = stack.enter_context(big(layers=4 if quick else 16))
        senders = stack.enter_context(ObedientRanks("benchmarks.workers.sender", WORLD_SIZE))
        ports = senders.call("port")
        senders.tell("accept")
        job.client.call("dial", ports)
        senders.update()
        first, burst, stops = _small(job, count=5 if quick else 15)
        rounds = 2 if quick else 5
        units = [1e3 * job.ranks.call("edit_unit")[0] for _ in range(3 * rounds)]
        whole: dict[str, list[float]] = {PEER: [], HOST: [], OWN: [], TCP: [], GRPC: [], RAW: []}
        stood: dict[str, list[float]] = {HOST: [], OWN: [], TCP: [], GRPC: []}
        part_bytes = job.size_bytes // WORLD_SIZE
        for number in range(rounds + 1):
            found = {PEER: float(job.ranks.call("scatter")[0])}
            # What was scattered is served once training has gone on; then ranks rest, so that
            # the summon is not what is measured.
            job.ranks.call("pace", 0.001, 2)
            job.client.call("begin_writing")
            for name, command in (
                (HOST, ("end_writing",)),
                (OWN, ("write_back", "auto")),
                (TCP, ("write_back", "stream")),
                (GRPC, ("write_back", "grpc")),
            ):
                seconds, stop_s = _whole(job, *command)
                found[name] = seconds
                if number:
                    stood[name].append(stop_s)
            senders.tell("send", part_bytes)
            found[RAW] = job.ask("receive", part_bytes)
            senders.update()
            if number:  # the first round touches everything for the first time
                for name, seconds in found.items():
                    whole[name].append(seconds)
        return _report(job, first, burst, stops, units, whole, stood)


def _small(job: Big, *, count: int) -> tuple[list[float], list[float], list[float]]:
    """Edits of 1 MiB in steps of 20 ms: single ones, then in bursts. Seconds."""
    first: list[float] = []
    burst: list[float] = []
    stops: list[float] = []
    for _ in range(count):
        job.ranks.tell("pace_until", STEP_S, 4)
        found = job.client.call("edit_small", SMALL, 4, 1.0)[0]
        job.ranks.update()
        first.append(found[0][0])
        burst += [seconds for seconds, _ in found[1:]]
        stops += [stop_s for _, stop_s in found]
    return first, burst, stops


def _whole(job: Big, *command: str) -> tuple[float, float]:
    job.ranks.tell("pace_until", 0.001, 1)
    seconds, stop_s = job.client.call(*command)[0]
    job.ranks.update()
    return float(seconds), float(stop_s)


def _report(
    job: Big,
    first: list[float],
    burst: list[float],
    stops: list[float],
    units: list[float],
    whole: dict[str, list[float]],
    stood: dict[str, list[float]],
) -> Report:
    median = statistics.median
    seconds = {name: median(found) for name, found in whole.items()}
    small_ms = {
        "call to APPLIED, single": 1e3 * median(first),
        "call to APPLIED, next of a burst": 1e3 * median(burst),
        "training stands": 1e3 * median(stops),
        UNSHARD: median(units),
    }
    budget_ms = 1e3 * 2 * STEP_S
    goals = [
        Goal(what="1 MiB edit, 20 ms steps: call to APPLIED (2 steps and 250 ms)",
             measured=small_ms["call to APPLIED, single"], limit=budget_ms + 250, unit="ms"),
        Goal(what="next edits of a burst (2 steps and 50 ms)",
             measured=small_ms["call to APPLIED, next of a burst"], limit=budget_ms + 50,
             unit="ms"),
        Goal(what="training stands for a 1 MiB edit", measured=small_ms["training stands"],
             limit=1.0, unit="ms"),
        Goal(what="write-back on the same host, time / peer",
             measured=seconds[HOST] / seconds[PEER], limit=0.5),
        Goal(what="write-back over TCP, speed / raw sockets",
             measured=seconds[RAW] / seconds[TCP], limit=0.45, at_least=True),
        Goal(what="training stands for a write-back, time / peer",
             measured=median(stood[HOST]) / seconds[PEER], limit=0.25),
    ]  # fmt: skip
    tables = [
        Table(
            title="A small edit (medians)",
            header=["what", "ms"],
            rows=[[name, f"{value:.2f}"] for name, value in small_ms.items()],
        ),
        Table(
            title=f"The whole model written back: {job.size_bytes / GIB:g} GiB, {WORLD_SIZE} ranks",
            header=["what", "s", "GB/s", "training stands, s"],
            rows=[
                [
                    name,
                    f"{value:.3f}",
                    f"{job.size_bytes / 1e9 / value:.2f}",
                    f"{median(stood[name]):.3f}" if name in stood else "",
                ]
                for name, value in seconds.items()
            ],
        ),
    ]
    numbers = {"small_ms": small_ms, "whole_s": whole, "stands_s": stood}
    return Report(name="edits", tables=tables, goals=goals, numbers=numbers)
