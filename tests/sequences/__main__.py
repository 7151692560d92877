"""python -m tests.sequences --kind ddp --seed 7 [--minutes n] [--steps n] [--only NAME[:n],...]
python -m tests.sequences --loop closure [--kind fsdp2] --seed 7

Without a kind or a loop, sequences of all kinds and loops take turns; `--loop any`: of all loops.
A loop without a kind has one that its seed draws. Prints a line for each operation.

    python -m tests.sequences --all-loops --readers 6 --minutes 30

goes through each loop with each of its kinds once, with threads that read and verify beside the
operations, prints what each of them found, and exits 1 if anything was wrong.
"""

import argparse
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests import leaks
from tests.launch import end_warm_start, warm_children
from tests.sequences import reading
from tests.sequences.generate import BY_NAME, OF_LOOPS, Beside, Failure, Item, drawn, run, shrunk
from tests.sequences.loops.loops import LOOPS
from tests.sequences.model import KINDS, WORLD_SIZES
from tests.sequences.session import SHORT, Counts

STEPS = 400
"""Operations of one training."""
NAMES = BY_NAME | OF_LOOPS


def main() -> int:
    given = _parsed()
    reading.WRITES, reading.BURST = "writes" not in given.without.split(","), given.burst
    SHORT.update(one.split("=", 1) for one in given.set)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _cut)
    leaks.adopt_orphans()
    rows: list[Row] = []
    try:
        warm_children()
        _take_turns(given, rows)
    except KeyboardInterrupt:
        print("cut", flush=True)
    if given.all_loops or given.readers:
        print(table(rows), flush=True)
    counts = sum((row.counts for row in rows), Counts())
    failed = sum(row.failure is not None for row in rows)
    print(f"{counts}; {failed} sequences failed", flush=True)
    return int(failed > 0)


def _cut(*_: object) -> None:
    """Ended from outside, it ends the training that it has started, however often it is told."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@dataclass
class Row:
    """What one sequence did."""

    kind: str
    loop: str
    seed: int
    seconds: float = 0.0
    cpu_s: float = 0.0
    """Of this process and of all that it has started and seen end."""
    counts: Counts = field(default_factory=Counts)
    beside: Beside = field(default_factory=Beside)
    failure: Failure | None = None


def _take_turns(given: argparse.Namespace, rows: list[Row]) -> None:
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    turns = _turns(given, seed)
    until_s = time.monotonic() + 60 * given.minutes
    turn = 0
    while turn == 0 or not (given.only or (given.all_loops and turn == len(turns))):
        if time.monotonic() > until_s:
            break
        (kinds, loop), here = turns[turn % len(turns)], seed + turn // len(turns)
        kind = random.Random(f"kind {here} {loop}").choice(kinds)
        items = _chosen(given.only) if given.only else drawn(here, given.steps, loop)
        left_out, kept = given.without.split(","), given.of.split(",") if given.of else NAMES
        items = [item for item in items if item.name in kept and item.name not in left_out]
        began_s, began_cpu_s = time.monotonic(), _cpu_s()
        share_s = (until_s - began_s) / max(1, len(turns) - turn)
        print(f"--- {kind}{', ' * bool(loop)}{loop}, seed {here}", flush=True)
        rows.append(row := Row(kind, loop, here))
        try:
            row.failure = run(
                kind, here, items, loop=loop, verifies=given.verify, reader_count=given.readers,
                until_s=began_s + share_s, counts=row.counts, beside=row.beside, tell=_say,
            )  # fmt: skip
        finally:
            row.seconds, row.cpu_s = time.monotonic() - began_s, _cpu_s() - began_cpu_s
        if row.failure is not None:
            # What runs beside the operations is not in a shorter sequence.
            whole = given.whole or given.readers or given.verify
            least = row.failure if whole else shrunk(kind, here, row.failure, _say, loop)
            _tell(kind, loop, here, least)
            if not (given.go_on or given.all_loops):
                break
        turn += 1


def _cpu_s() -> float:
    return sum(os.times()[:4])


def table(rows: Sequence[Row]) -> str:
    """What each sequence did, and all of them."""
    lines = [f"{'loop':16} {'kind':9} {'s':>5} {'CPU s':>6} {'answers':>8} {'/CPU s':>6} "
             f"{'refused':>8} {'verified':>8} {'kills':>5}  finding"]  # fmt: skip
    everything = Row("", "all", 0)
    for row in rows:
        everything.seconds += row.seconds
        everything.cpu_s += row.cpu_s
        everything.counts += row.counts
        everything.beside.answers += row.beside.answers
        everything.beside.refused += row.beside.refused
        everything.beside.verified += row.beside.verified
    for row in [*rows, everything]:
        answers = row.counts.answers + row.beside.answers.total()
        finding = str(row.failure.error).splitlines()[0][:160] if row.failure is not None else ""
        lines.append(
            f"{row.loop:16} {row.kind:9} {row.seconds:5.0f} {row.cpu_s:6.0f} {answers:8} "
            f"{answers / max(1.0, row.cpu_s):6.0f} {row.beside.refused.total():8} "
            f"{row.beside.verified['verified']:8} {row.counts.kills:5}  {finding}"
        )
    for name, found in (("answers", everything.beside.answers),
                        ("refused", everything.beside.refused),
                        ("verify", everything.beside.verified)):  # fmt: skip
        lines.append(f"{name}: " + ", ".join(f"{n} {what}" for what, n in found.most_common()))
    return "\n".join(lines)


def _turns(given: argparse.Namespace, seed: int) -> list[tuple[tuple[str, ...], str]]:
    """Kinds, of which one is drawn, and the loop; those of packages that are not here are not."""
    kinds = tuple(given.kind.split(",")) if given.kind else ()
    if given.loop or not kinds:
        names = list(LOOPS) if given.loop in ("", "any") else given.loop.split(",")
        names = [
            n for n in names if not LOOPS[n].package or importlib.util.find_spec(LOOPS[n].package)
        ]
    else:
        names = []
    fitting = {n: tuple(k for k in LOOPS[n].kinds if not kinds or k in kinds) for n in names}
    turns = [(of, name) for name, of in fitting.items() if of]
    if given.all_loops:
        turns = [((kind,), name) for of, name in turns for kind in of]
    if not given.loop:
        turns += [((kind,), "") for kind in kinds or KINDS]
    if not kinds:
        random.Random(f"turns {seed}").shuffle(turns)
    assert turns, f"{given.loop} has none of {given.kind}"
    return turns


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sequences")
    parser.add_argument("--kind", default="", help="one of, or several: " + ", ".join(WORLD_SIZES))
    parser.add_argument("--loop", default="", help="any, one of, or several: " + ", ".join(LOOPS))
    parser.add_argument(
        "--all-loops", action="store_true", help="each loop with each of its kinds, in --minutes"
    )
    parser.add_argument(
        "--readers", type=int, default=0, help="threads that read beside the operations of a loop"
    )
    parser.add_argument(
        "--verify", "--verify-beside", action="store_true",
        help="of a loop: verify updates beside the operations; a part of --all-loops",
    )  # fmt: skip
    parser.add_argument("--seed", type=int)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=STEPS, help="operations of one training")
    parser.add_argument(
        "--only", default="", help="these operations, with the numbers they draw by"
    )
    parser.add_argument("--of", default="", help="of these operations alone")
    parser.add_argument("--without", default="", help="none of these operations, or writes")
    parser.add_argument("--burst", type=int, default=reading.BURST, help="reads of one burst")
    parser.add_argument(
        "--set", action="append", default=[], help="a setting of the job: PARAMD_IDLE_MEMORY_S=600"
    )
    parser.add_argument("--whole", action="store_true", help="do not look for a shorter sequence")
    parser.add_argument("--go-on", action="store_true", help="with other sequences after a failure")
    given = parser.parse_args()
    if given.all_loops:
        given.loop, given.verify = given.loop or "any", True
    return given


def _chosen(text: str) -> list[Item]:
    found = []
    for place, one in enumerate(text.split(",")):
        name, _, number = one.partition(":")
        assert name in NAMES, f"{name}: one of {', '.join(NAMES)}"
        found.append(Item(int(number or place), name))
    return found


def _tell(kind: str, loop: str, seed: int, failure: Failure) -> None:
    only = ",".join(f"{item.name}:{item.number}" for item in failure.items)
    print(f"FAILED {kind}, seed {seed}: {failure.error}", flush=True)
    of = f"--kind {kind}" + f" --loop {loop}" * bool(loop)
    print(f"  python -m tests.sequences {of} --seed {seed} --only {only}", flush=True)


def _say(text: str) -> None:
    if text:
        print(text, flush=True)


if __name__ == "__main__":
    status = 1
    try:
        status = main()
    finally:
        end_warm_start()
        sys.stdout.flush()
    # Threads of a call that hangs would keep it.
    os._exit(status)
