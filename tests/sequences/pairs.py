"""Every event between two uses of every thing that either side caches: a table, generated.

    python -m tests.sequences.pairs [--kind ddp] [--cells idle-gradients,rollback-moments]

Each cell uses a thing with some subjects, lets the event happen, and uses it with others. The cells
of one event share a training, unless one of them fails. Prints "ok" or "FAILED" for each cell.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from random import Random

from tests import leaks
from tests.launch import end_warm_start
from tests.sequences import changing, reading, striking
from tests.sequences.session import CALL_S, NotNowError, Session, bounded, patience_s

Use = Callable[[Session, Random], str]
FIRST, THEN = ("one.weight", "blocks.0.up.weight"), ("wide.weight", "embed.weight", "row.weight")
IDLE_S = 2.0


class Always(Random):
    """Draws the first of what there is: a cell is to do the same each time."""

    def choice(self, seq: Sequence[object]) -> object:  # type: ignore[override]
        return seq[0]


def _marked(s: Session, rng: Random) -> str:
    return changing.mark(s, rng) if s.resume == "auto" else ""


def _idle(s: Session, rng: Random) -> str:
    time.sleep(IDLE_S)
    return ""


def _all_end(how: signal.Signals) -> Use:
    """The sidecars of all ranks end by this signal, and are waited for."""

    def run(s: Session, rng: Random) -> str:
        old = s.helpers("sidecar")
        s.struck(lives=True)
        for process in old:
            process.send_signal(how)
        striking.back(s, old)
        s.running(perhaps=True)
        return ""

    return run


EVENTS: dict[str, Use] = {
    "idle": _idle, "sigterm": _all_end(signal.SIGTERM), "sigkill": _all_end(signal.SIGKILL),
    "sigstop": striking.sidecar_stopped, "rollback": changing.rollback,
    "reattach": striking.attach_again, "incarnation": striking.restart,
    "control": striking.control_killed,
}  # fmt: skip


def _lane(lane: str) -> Use:
    def use(s: Session, rng: Random) -> str:
        found = s.ask(lane, lambda: s.mesh.summon(*s.subjects, transport=lane, timeout=CALL_S))
        s.judge(f"summon by {lane}", found)
        return f"step {found.step}"

    return use


def _subscribed(to: str, **options: object) -> Use:
    def use(s: Session, rng: Random) -> str:
        return reading.subscribed(s, rng, to, list(s.subjects), options)

    return use


def _buffers(s: Session, rng: Random) -> str:
    s.running()
    found = s.ask("buffers", lambda: s.mesh.summon("*", buffers=True, timeout=CALL_S))
    s.judge("buffers", found)
    return f"step {found.step}"


def _export_begun(s: Session, rng: Random) -> str:
    s.pending = s.mesh.export(f"disk/{s.note().replace(' ', '-')}")  # type: ignore[attr-defined]
    return ""


def _export_ended(s: Session, rng: Random) -> str:
    return changing.export_ended(s, s.pending)  # type: ignore[attr-defined]


CACHED: dict[str, tuple[Use, Use]] = {
    "snapshot": (_lane("grpc"), _lane("grpc")), "live": (_lane("same-host"), _lane("same-host")),
    "view": (reading.view, reading.view), "gradients": (_subscribed("grads"), _subscribed("grads")),
    "gradient-stats": (_subscribed("grads", kind="stats"), _subscribed("grads")),
    "gradients-again": (_subscribed("grads"), reading.made_again),
    "deltas": (_subscribed("follow", deltas=True), _subscribed("follow", deltas=True)),
    "followed": (reading.open_stream, reading.next_frames), "stats": (reading.stats, reading.stats),
    "moments": (reading.optimizer, reading.optimizer), "buffers": (_buffers, _buffers),
    "layout": (reading.listing, reading.listing), "updates": (reading.updates, reading.updates),
    "replay": (reading.replay, reading.replay), "standing": (_idle, changing.rollback_standing),
    "marks": (changing.mark, changing.rollback), "undo": (changing.edit, changing.undo),
    "hyperparameters": (changing.hyperparameters, changing.undo),
    "export": (_export_begun, _export_ended),
    "schedule": (changing.schedule, changing.schedule_end),
}  # fmt: skip
CELLS = [f"{event}-{cached}" for event in EVENTS for cached in CACHED]


def walk(s: Session, cell: str, turn: int) -> str:
    """One cell. Raises DefectError."""
    event, _, cached = cell.partition("-")
    before, after = CACHED[cached]
    rng = Always(f"{cell} {turn}")
    steps: list[tuple[Sequence[str], Use]] = [
        ((), _marked), (FIRST, before), ((), EVENTS[event]), (THEN, after), (FIRST, before),
        ((), reading.summon), ((), reading.grads),
    ]  # fmt: skip
    told = []
    for subjects, use in steps:
        s.subjects = subjects
        try:
            told.append(bounded(lambda: use(s, rng), patience_s(60)))  # noqa: B023
        except NotNowError as reason:
            told.append(f"- {reason}")
    s.subjects = ()
    for name in list(s.streams):
        s.drop(name)
    return "; ".join(told)


def results(cells: Sequence[str], kind: str, turns: int) -> Iterator[tuple[str, str]]:
    """Each cell, and what was wrong: empty for nothing."""
    for _, group in groupby(cells, key=lambda cell: cell.partition("-")[0]):
        left = list(group)
        while left:
            with Session(kind, stands_in=False) as session:
                while left:
                    cell = left.pop(0)
                    try:
                        for turn in range(turns):
                            walk(session, cell, turn)
                    except Exception as error:
                        yield cell, f"{type(error).__name__}: {error}"
                        break
                    yield cell, ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sequences.pairs")
    parser.add_argument("--kind", default="ddp")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--turns", type=int, default=1, help="how often each cell is walked")
    given = parser.parse_args()
    leaks.adopt_orphans()
    failed = 0
    for cell, wrong in results(given.cells.split(","), given.kind, given.turns):
        failed += bool(wrong)
        print(f"{cell}: {'FAILED ' + wrong if wrong else 'ok'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    try:
        status = main()
    finally:
        end_warm_start()
        sys.stdout.flush()
    os._exit(status)
