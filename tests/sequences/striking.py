"""Operations that break something, or let time pass."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random

import psutil

import paramd
from paramd.errors import ParamdError
from tests.launch import ROOT, warm_start
from tests.sequences.reading import summary_differs
from tests.sequences.session import CALL_S, JOB, DefectError, NotNowError, Session, wait_for
from tests.warm import WarmProcess

READER = "tests.sequences.reader"


def idle(s: Session, rng: Random) -> str:
    """Nobody asks for longer than memory is kept."""
    gap_s = rng.choice([0.1, 0.7, 1.2, 2.5])
    time.sleep(gap_s)
    return f"{gap_s} s"


def sidecar_killed(s: Session, rng: Random) -> str:
    """SIGKILL of one or all."""
    return _ended(s, rng, signal.SIGKILL)


def sidecar_ended(s: Session, rng: Random) -> str:
    """SIGTERM of one or all."""
    return _ended(s, rng, signal.SIGTERM)


def _ended(s: Session, rng: Random, how: signal.Signals) -> str:
    ranks = rng.choice([[rng.randrange(s.world_size)], list(range(s.world_size))])
    processes = [p for rank in ranks for p in s.helpers("sidecar", rank)]
    s.struck(lives=True)
    waits = rng.random() < 0.6 or s.held_at is not None
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(how)
    s.counts.kills += len(processes)
    if waits:
        back(s, processes)
        s.running(perhaps=True)
    return f"ranks {ranks}, " + ("back" if waits else "not waited for")


def back(s: Session, old: list[psutil.Process]) -> None:
    """Waits until each rank has another sidecar that answers."""
    gone = {process.pid for process in old}

    def back() -> bool:
        now = {p.pid for p in s.helpers("sidecar")}
        return len(now) >= s.world_size and not now & gone

    wait_for(back, "sidecars are started again", 30)
    s.ask("an answer of new sidecars", lambda: s.mesh.summon("*", timeout=CALL_S))


def sidecar_stopped(s: Session, rng: Random) -> str:
    """SIGSTOP for a moment, with a reader waiting."""
    (process, *_) = s.helpers("sidecar", rng.randrange(s.world_size)) or [None]
    if process is None:
        raise NotNowError("it is being started")
    s.struck()
    process.suspend()
    try:
        time.sleep(rng.choice([0.3, 1.5]))
        with suppress(ParamdError):
            s.mesh.stats("one.weight", timeout=1)
    finally:
        with suppress(psutil.Error):
            process.resume()
        s.struck()
    s.running(perhaps=True)
    return ""


def control_killed(s: Session, rng: Random) -> str:
    """SIGKILL or SIGTERM of the control plane."""
    how = rng.choice([signal.SIGKILL, signal.SIGTERM])
    processes = s.helpers("control")
    s.struck()
    waits = rng.random() < 0.6 or s.held_at is not None
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(how)
    s.counts.kills += len(processes)
    gone = {process.pid for process in processes}
    if waits:
        wait_for(lambda: {p.pid for p in s.helpers("control")} - gone, "a control plane", 30)
        s.running(perhaps=True)
    return how.name


def restart(s: Session, rng: Random) -> str:
    """All ranks are killed and started again: another incarnation that goes on."""
    s.struck()
    s.counts.kills += s.world_size
    former = s.now
    order = list(s.ranks)
    rng.shuffle(order)
    for rank in order:
        rank.process.kill()
        time.sleep(rng.choice([0, 0, 0.02]))
    for rank in order:
        rank.process.wait()
    if rng.random() < 0.5:
        _after_the_trainer(s, rng)
    s.disconnect()
    s.launch()
    s.struck()
    return s.begin(former if s.resume == "auto" else None)


def _after_the_trainer(s: Session, rng: Random) -> None:
    """What is served of dead trainers is of a state, or refused. Soon: sidecars linger shortly."""
    with suppress(ParamdError):
        s.judge("summon of dead trainers", s.mesh.summon("*", timeout=3))
    with suppress(ParamdError):
        table = s.mesh.stats("*", timeout=3)
        got = {row.name: row.summary for row in table}
        s.judge("stats of dead trainers", table, got, differs=summary_differs)


def attach_again(s: Session, rng: Random) -> str:
    """The training detaches, and attaches again."""
    former = s.now
    if s.held_at is not None:
        s.running()
    s.struck(lives=True)
    (s.folder / "again").write_text(str(s.attachments))
    said = s.begin(former)
    # What nobody serves between the two may be refused.
    s.struck()
    return said


def reader_killed(s: Session, rng: Random) -> str:
    """Another program that reads is killed, or stopped for some time and then killed."""
    what = rng.choice(["follow", "grads", "view", "deltas"])
    if s.mirrored and what in ("follow", "deltas"):
        raise NotNowError("mirrored parameters are not followed")
    s.running()
    folder = s.folder / f"reader-{s.note().split()[1]}"
    folder.mkdir()
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = WarmProcess(warm_start(), [READER, what], env=env, stdout=out, stderr=err)
    try:
        wait_for(lambda: b"ready" in _read(folder / "out") or process.poll() is not None,
                 f"a reader ({what}) is ready", 30)  # fmt: skip
        if process.poll() is not None and not s.disturbed:
            raise DefectError(f"a reader ({what}) ended: {_read(folder / 'err')[-900:]!r}")
        if rng.random() < 0.5:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGSTOP)
            time.sleep(rng.choice([0.5, 2.5]))
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return what


def _read(path: object) -> bytes:
    try:
        return path.read_bytes()  # type: ignore[attr-defined, no-any-return]
    except FileNotFoundError:
        return b""


def reader_cancelled(s: Session, rng: Random) -> str:
    """Calls of an asyncio program are cancelled at any moment."""
    after_s = [rng.choice([0.001, 0.01, 0.03, 0.1]) for _ in range(4)]
    calls: list[Callable[[paramd.aio.AsyncMesh], object]] = [
        lambda mesh: mesh.summon("*"),
        lambda mesh: mesh.stats("*"),
        lambda mesh: anext(mesh.grads("blocks.*")),
        lambda mesh: anext(mesh.follow("*")),
        lambda mesh: mesh.optimizer("*"),
        lambda mesh: mesh.updates("*"),
    ]
    chosen = [rng.choice(calls) for _ in after_s]

    async def run() -> None:
        async with paramd.aio.connect(job=JOB, timeout=CALL_S) as mesh:
            for call, wait_s in zip(chosen, after_s, strict=True):
                with suppress(TimeoutError, ParamdError, StopAsyncIteration):
                    await asyncio.wait_for(call(mesh), wait_s)  # type: ignore[arg-type]

    with suppress(ParamdError):
        asyncio.run(run())
    return f"after {after_s} s"


STRIKING: dict[Callable[[Session, Random], str], int] = {
    idle: 14, sidecar_killed: 2, sidecar_ended: 3, sidecar_stopped: 2, control_killed: 2,
    restart: 2, attach_again: 2, reader_killed: 2, reader_cancelled: 3,
}  # fmt: skip
