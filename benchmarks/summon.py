"""Reading a whole model: over TCP, on the same host, against the peer and the limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from benchmarks.big import WORLD_SIZE, Big, big
from benchmarks.harness import Series, run_rounds
from benchmarks.ranks import ObedientRanks
from benchmarks.report import Goal, Report, Table

PEER = "FSDP2 get_model_state_dict, full, on the CPU"
RAW = "two raw loopback sockets, warm memory"
MEMCPY = "memcpy of the result, warm memory"
GRPC_COLD = "summon over gRPC, fresh memory"
GRPC_NEW = "summon over gRPC, new result, warm heap"
GRPC_INTO = "summon over gRPC, into="
TCP_COLD = "summon over a TCP stream, fresh memory"
TCP_NEW = "summon over a TCP stream, new result, warm heap"
TCP_INTO = "summon over a TCP stream, into="
HOST_COLD = "summon on the same host, fresh memory"
HOST_NEW = "summon on the same host, new result, warm heap"
HOST_INTO = "summon on the same host, into="
HOST_SHARED = "summon on the same host, into=, snapshot taken before"
VIEW = "view of a new snapshot"
VIEW_SHARED = "view of a snapshot taken before"

_SHARED = (HOST_SHARED, VIEW_SHARED)
_MIB = 1 << 20


def run(*, quick: bool) -> Report:
    """1 GiB of float32 over two ranks; `quick` takes a quarter of it and fewer rounds."""
    with ExitStack() as stack:
        job = stack.enter_context(big(layers=4 if quick else 16))
        senders = stack.enter_context(ObedientRanks("benchmarks.workers.sender", WORLD_SIZE))
        warm = stack.enter_context(
            ObedientRanks("benchmarks.workers.client", state_dir=job.ranks.state_dir)
        )
        warm.call("keep_heap")
        warm.call("connect")
        ports = senders.call("port")
        senders.tell("accept")
        job.client.call("dial", ports)
        senders.update()
        found = run_rounds(
            _contenders(job, warm, senders),
            rounds=3 if quick else 9,
            watched=lambda: [*job.watched(), *warm.pids, *senders.pids],
            before=lambda name: _prepare(job, name),
        )
        memory = {
            GRPC_COLD: _peak(job, "grpc", into=False),
            GRPC_INTO: _peak(job, "grpc", into=True),
            TCP_INTO: _peak(job, "stream", into=True),
            HOST_COLD: _peak(job, "same-host", into=False),
            HOST_INTO: _peak(job, "same-host", into=True),
        }
        return _report(job, found, memory)


def _contenders(
    job: Big, warm: ObedientRanks, senders: ObedientRanks
) -> Mapping[str, Callable[[], float]]:
    part_bytes = job.size_bytes // WORLD_SIZE

    def raw() -> float:
        senders.tell("send", part_bytes)
        seconds = job.ask("receive", part_bytes)
        senders.update()
        return seconds

    return {
        PEER: lambda: float(job.ranks.call("gather")[0]),
        RAW: raw,
        MEMCPY: lambda: job.ask("memcpy"),
        GRPC_COLD: lambda: job.ask("summon", "grpc", False),
        GRPC_NEW: lambda: float(warm.call("summon", "grpc", False)[0]),
        GRPC_INTO: lambda: job.ask("summon", "grpc", True),
        TCP_COLD: lambda: job.ask("summon", "stream", False),
        TCP_NEW: lambda: float(warm.call("summon", "stream", False)[0]),
        TCP_INTO: lambda: job.ask("summon", "stream", True),
        HOST_COLD: lambda: job.ask("summon", "same-host", False),
        HOST_NEW: lambda: float(warm.call("summon", "same-host", False)[0]),
        HOST_INTO: lambda: job.ask("summon", "same-host", True),
        HOST_SHARED: lambda: job.ask("summon", "same-host", True),
        VIEW: lambda: job.ask("view"),
        VIEW_SHARED: lambda: job.ask("view"),
    }


def _prepare(job: Big, name: str) -> None:
    # A new step: no snapshot of before serves again, unless that is what is measured.
    job.advance()
    if name in _SHARED:
        job.ask("view")


def _peak(job: Big, transport: str, *, into: bool) -> int:
    peaks = []
    for _ in range(3):
        job.advance()
        peaks.append(int(job.ask("peak", transport, into)))
    return max(peaks)


def _report(job: Big, found: Mapping[str, Series], memory: Mapping[str, int]) -> Report:
    peer, raw, memcpy = (found[name].seconds for name in (PEER, RAW, MEMCPY))
    rows = [
        [
            name,
            f"{series.seconds:.3f}",
            f"{job.size_bytes / 1e9 / series.seconds:.2f}",
            f"{series.seconds / peer:.3f}",
            f"{raw / series.seconds:.2f}",
            f"{memcpy / series.seconds:.2f}",
            f"{series.cpu_s / job.gib:.2f}",
            f"{series.page_faults:,.0f}",
            f"{memory[name] / _MIB:.0f}" if name in memory else "",
        ]
        for name, series in found.items()
    ]
    header = [
        f"{job.gib:g} GiB, {WORLD_SIZE} ranks", "s", "GB/s", "time / peer", "speed / raw",
        "speed / memcpy", "CPU s per GiB", "page faults", "memory beyond the result, MiB",
    ]  # fmt: skip
    return Report(
        name="summon",
        tables=[Table(title="Reading a whole model", header=header, rows=rows)],
        goals=_goals(job, found, memory),
        notes=[
            "CPU seconds and page faults are those of all processes together. The peer's ranks "
            "keep a warm heap, so summons are judged with one too; 'fresh memory' is what the "
            "first summon of a process gets, and later ones unless `into=` is given."
        ],
        numbers={
            "seconds": {n: [x.seconds for x in s.samples] for n, s in found.items()},
            "cpu_s": {n: [x.cpu_s for x in s.samples] for n, s in found.items()},
            "page_faults": {n: [x.page_faults for x in s.samples] for n, s in found.items()},
            "memory_beyond_result_bytes": dict(memory),
        },
    )


def _goals(job: Big, found: Mapping[str, Series], memory: Mapping[str, int]) -> list[Goal]:
    peer, raw, memcpy = (found[name].seconds for name in (PEER, RAW, MEMCPY))
    goals = []
    for name in (TCP_NEW, TCP_INTO):
        series = found[name]
        goals += [
            Goal(what=f"{name}: time / peer", measured=series.seconds / peer, limit=0.45),
            Goal(
                what=f"{name}: speed / two raw sockets", measured=raw / series.seconds,
                limit=0.55, at_least=True,
            ),
            Goal(
                what=f"{name}: CPU per GiB, all processes", measured=series.cpu_s / job.gib,
                limit=0.35, unit="s",
            ),
        ]  # fmt: skip
    goals += [
        Goal(what=f"{name}: client memory beyond the result", measured=size_bytes / _MIB,
             limit=64, unit="MiB")
        for name, size_bytes in memory.items()
    ]  # fmt: skip
    for name in (HOST_NEW, HOST_INTO, HOST_SHARED):
        seconds = found[name].seconds
        goals += [
            Goal(
                what=f"{name}: speed / memcpy", measured=memcpy / seconds, limit=0.85,
                at_least=True,
            ),
            Goal(
                what=f"{name}: times faster than the peer", measured=peer / seconds, limit=5,
                at_least=True,
            ),
        ]  # fmt: skip
    goals.append(
        Goal(what=VIEW_SHARED, measured=1e3 * found[VIEW_SHARED].seconds, limit=5, unit="ms")
    )
    return goals
