"""One episode: a stamp trainer, readers, events; and what must hold all the while."""

from __future__ import annotations

import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.launch import Ranks
from tests.multiprocess.striking import (
    LIMIT_S,
    allowed_s,
    arm,
    ask,
    end_well,
    helper,
    logs,
    rest,
    stamps,
    summon_stamps,
)
from tests.multiprocess.truth import connect_to, wait_until
from tests.soak.plan import Episode, Event
from tests.soak.readers import Readers, Readings
from tests.soak.usage import MIB, Usage

JOB = "stamp"


def run(plan: Episode) -> Readings:
    """Runs an episode to its end. Raises AssertionError when something did not hold."""
    with tempfile.TemporaryDirectory(prefix="paramd-soak-") as name:
        folder = Path(name)
        with stamps(folder, plan.kind, plan.world_size, lockstep=plan.lockstep) as ranks:
            readers = Readers(ranks.state_dir, JOB)
            readers.start()
            try:
                _suffer(plan, ranks, folder)
            except BaseException:
                print(ranks.outputs(), logs(ranks), sep="\n")
                raise
            finally:
                readers.stop()
            _end(plan, ranks, folder)
        found = readers.readings
        assert found.failures == [], found.failures
        assert found.right > 0, "nobody got an answer"
        assert found.longest_s < allowed_s(2 * LIMIT_S), (found.longest_s, found.longest_reason)
        return found


def _suffer(plan: Episode, ranks: Ranks, folder: Path) -> None:
    usages = [(Usage(f"trainer {r.rank}"), psutil.Process(r.process.pid)) for r in ranks]
    for event in plan.events:
        what = event.rule if event.name == "fault-point" else f"{event.seconds:.1f} s"
        print(f"  {event.name} rank {event.rank} {what}", end="", flush=True)
        _happen(event, ranks, folder)
        begin_s = time.monotonic()
        _await_recovery(ranks)
        print(f", right again after {time.monotonic() - begin_s:.2f} s", flush=True)
        assert all(rank.process.poll() is None for rank in ranks), "a trainer has ended"
        for usage, process in usages:
            usage.sample(process)
    for usage, _ in usages:
        complaint = usage.complaint(rss_bytes=16 * MIB, descriptors=4)
        assert not complaint, complaint


def _await_recovery(ranks: Ranks) -> None:
    """A new client gets an answer of a step that was not yet there when it came."""
    first: list[int] = []

    def goes_on() -> bool:
        with suppress(ConnectionError), connect_to(ranks.state_dir, JOB) as mesh:
            answer = ask(mesh, summon_stamps())
            if answer.right:
                first.append(answer.step)
        return bool(first) and first[-1] > first[0]

    wait_until(goes_on, "it is served again and trains", timeout_s=allowed_s(2 * LIMIT_S))


def _happen(event: Event, ranks: Ranks, folder: Path) -> None:
    match event.name:
        case "kill-sidecar":
            helper(ranks, "sidecar", event.rank).kill()
        case "kill-control":
            helper(ranks, "control").kill()
        case "stop-sidecar":
            _stopped([helper(ranks, "sidecar", event.rank)], event.seconds)
        case "stop-control":
            _stopped([helper(ranks, "control")], event.seconds)
        case "stop-trainers":
            _stopped([psutil.Process(r.process.pid) for r in ranks], event.seconds)
        case "fault-point":
            _fault(event, ranks, folder)
        case _:
            time.sleep(event.seconds)


def _stopped(processes: list[psutil.Process], seconds: float) -> None:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def _fault(event: Event, ranks: Ranks, folder: Path) -> None:
    """The readers pass the point, or nobody does in time."""
    process = helper(ranks, "sidecar", event.rank)
    armed = arm(folder / "faults", event.rank, event.rule)
    time.sleep(event.seconds)
    armed.unlink(missing_ok=True)
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def _end(plan: Episode, ranks: Ranks, folder: Path) -> None:
    """By itself, or killed at rest (then still right), or inside an update (then refused)."""
    if plan.end == "well":
        end_well(ranks, folder)
        return
    if plan.end == "killed-resting":
        step = rest(ranks, folder)
        for rank in ranks:
            rank.process.kill()
        with connect_to(ranks.state_dir, JOB) as mesh:
            answer = ask(mesh, summon_stamps())
            assert not plan.lockstep or answer.step == step, answer
        return
    last = plan.world_size - 1
    (folder / f"die-{last}").touch()
    wait_until(lambda: ranks[last].process.poll() is not None, "the trainer dies")
    with connect_to(ranks.state_dir, JOB) as mesh:
        answer = ask(mesh, summon_stamps())
        print(f"  killed inside an update: {answer.reason or f'served step {answer.step}'}")
