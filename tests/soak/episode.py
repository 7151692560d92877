"""One episode: the stage, everybody who uses it, one fault after the other."""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import psutil

from paramd.errors import ParamdError
from tests.multiprocess.striking import LIMIT_S
from tests.soak import actors, strike
from tests.soak.actors import Actor
from tests.soak.oracle import Oracle, Tally
from tests.soak.plan import Episode, Fault
from tests.soak.stage import MOST_PATIENCE, Stage, patience_s
from tests.soak.watchdog import Watchdog

SOON = ("grpc", "same-host", "buffers", "edit 0")
"""Lanes that must be right again soon after each fault; all others by the episode's end."""

RECOVERY_S = 6 * LIMIT_S
END_S = 120.0
TOLD_S = 10.0
"""Who is later than this is named, though it is in time."""

LEAVE_S = 90.0
"""How long everybody together may take to end what they are at; above a call's deadline."""


class FailedError(AssertionError):
    """Something did not hold; the text says what."""


def run(plan: Episode, tally: Tally, until_s: float, watchdog: Watchdog) -> None:
    """Runs an episode to its end, or until that moment. Raises FailedError."""
    expected = (AssertionError, OSError, psutil.Error, ParamdError, subprocess.SubprocessError)
    try:
        watchdog.expect("start of the stage")
        with Stage(plan) as stage:
            _run(stage, tally, until_s, watchdog)
            watchdog.expect("end of the stage")
    except expected as error:
        raise FailedError(f"{type(error).__name__}: {error}") from error


def _run(stage: Stage, tally: Tally, until_s: float, watchdog: Watchdog) -> None:
    oracles = {job.name: Oracle(job, tally) for job in stage.jobs}
    cast = actors.cast(stage, oracles)
    try:
        for actor in cast:
            actor.start()
        _recovered(cast, "beginning", tally)
        for event in stage.plan.events:
            if time.monotonic() > until_s:
                break
            watchdog.expect(" + ".join(fault.kind for fault in event))
            _suffer(stage, event, cast, tally)
        watchdog.expect("a round of everybody", (MOST_PATIENCE + 1) * END_S)
        _rounds_of_all(cast, "the end", END_S)
    except BaseException as error:
        watchdog.expect("report of a failure")
        print(f"\n{_told(stage, cast)}\n{type(error).__name__}: {error}", flush=True)
        raise
    finally:
        watchdog.expect("end of everybody's work")
        _leave(stage, cast)
    _check(cast)
    for job in stage.jobs:
        watchdog.expect(f"end of job {job.name}")
        job.end()
        watchdog.expect(f"losses of job {job.name}", 1200.0)
        tally.digests += job.digests()
    tally.updates += stage.updates


def _leave(stage: Stage, cast: Sequence[Actor]) -> None:
    """Everybody ends their work; who does not has failed."""
    for actor in cast:
        actor.stop()
    stage.resume_all()
    deadline_s = time.monotonic() + LEAVE_S
    for actor in cast:
        actor.join(max(0.0, deadline_s - time.monotonic()))
    for actor in cast:
        if actor.is_alive() and actor.ident is not None:
            where = "".join(traceback.format_stack(sys._current_frames()[actor.ident]))
            actor.failure += f"{actor.lane}: not over after {LEAVE_S:.0f} s:\n{where}"


def _suffer(stage: Stage, event: Sequence[Fault], cast: list[Actor], tally: Tally) -> None:
    with ExitStack() as stack:
        for fault in event:
            tally.count(tally.planned, fault.kind)
            print(f"  {fault.kind}, rank {fault.rank}, {fault.seconds} s", end="", flush=True)
            try:
                stack.enter_context(strike.struck(stage, fault))
                tally.count(tally.struck, fault.kind)
            except strike.NotPossibleError as error:
                tally.count(tally.not_possible, f"{fault.kind}: {error}")
                print(f" (not possible: {error})", end="")
            except strike.NotReachedError:
                print(f" (NOT REACHED)\n{_lanes(cast)}", end="")
            _check(cast)
        time.sleep(max(fault.seconds for fault in event))
    stage.resume_all()
    if any(fault.ends_training for fault in event):
        stage.main.restart()
    begin_s = time.monotonic()
    _recovered(cast, " + ".join(fault.kind for fault in event), tally)
    print(f": right again after {time.monotonic() - begin_s:.2f} s", flush=True)


def _recovered(cast: list[Actor], what: str, tally: Tally) -> None:
    begin_s = time.monotonic()
    _rounds_of_all([a for a in cast if a.lane in SOON], what, RECOVERY_S)
    taken_s = time.monotonic() - begin_s
    tally.longest_recovery_s = max(tally.longest_recovery_s, taken_s)


def _rounds_of_all(cast: Sequence[Actor], what: str, limit_s: float) -> None:
    """Everybody does the whole of their work once more."""
    before = {actor: actor.rounds for actor in cast}
    begin_s, slow = time.monotonic(), False
    while late := [a for a in cast if a.rounds < before[a] + 1]:
        _check(cast)
        told = "; ".join(f"{a.lane}: {a.last_refusal}" for a in late)
        if not slow and time.monotonic() - begin_s > TOLD_S:
            slow = True
            print(f"\n    not yet after {what}: {told}", end="", flush=True)
        if time.monotonic() - begin_s > patience_s(limit_s):
            raise FailedError(f"not right again within {limit_s:.0f} s after {what}: {told}")
        time.sleep(0.02)


def _check(cast: Sequence[Actor]) -> None:
    failures = [actor.failure for actor in cast if actor.failure]
    if failures:
        raise FailedError("\n".join(failures))


def _lanes(cast: Sequence[Actor]) -> str:
    return "\n".join(f"{a.lane}: {a.rounds} rounds; {a.last_refusal}" for a in cast)


def _told(stage: Stage, cast: Sequence[Actor]) -> str:
    """What everybody saw last, for a failure's message."""
    last = [_lanes(cast)]
    for name, process in stage.processes():
        with suppress(psutil.Error):
            lived_s = time.time() - process.create_time()
            last.append(f"{name}: pid {process.pid}, {process.status()}, {lived_s:.1f} s old")
    try:
        with stage.connect() as mesh:
            last += [
                *map(str, mesh.status()),
                str(mesh.pause_state()),
                *map(str, mesh.edits(limit=8)),
            ]
    except ParamdError as error:
        last.append(f"no status: {error}")
    ranks = [job.now.ranks.outputs() for job in stage.jobs]
    return "\n".join([*last, *ranks, stage.logs()])
