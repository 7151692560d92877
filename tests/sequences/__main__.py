"""python -m tests.sequences --kind ddp --seed 7 [--minutes n] [--steps n] [--only NAME[:n],...]
python -m tests.sequences --loop closure [--kind fsdp2] --seed 7

Without a kind or a loop, sequences of all kinds and loops take turns; `--loop any`: of all loops.
A loop without a kind has one that its seed draws. Prints a line for each operation.
"""

import argparse
import importlib.util
import os
import random
import signal
import sys
import time

from tests import leaks
from tests.launch import end_warm_start, warm_children
from tests.sequences import reading
from tests.sequences.generate import BY_NAME, OF_LOOPS, Failure, Item, drawn, run, shrunk
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
    # Ended by its time, it ends the training that it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    leaks.adopt_orphans()
    warm_children()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    turns = _turns(given, seed)
    until_s = time.monotonic() + 60 * given.minutes
    counts, failed, turn = Counts(), 0, 0
    while time.monotonic() < until_s and (turn == 0 or not given.only):
        (kinds, loop), here = turns[turn % len(turns)], seed + turn // len(turns)
        kind = random.Random(f"kind {here} {loop}").choice(kinds)
        items = _chosen(given.only) if given.only else drawn(here, given.steps, loop)
        left_out, kept = given.without.split(","), given.of.split(",") if given.of else NAMES
        items = [item for item in items if item.name in kept and item.name not in left_out]
        share_s = (until_s - time.monotonic()) / max(1, len(turns) - turn)
        print(f"--- {kind}{', ' * bool(loop)}{loop}, seed {here}", flush=True)
        failure = run(
            kind, here, items, loop=loop, verifies=given.verify,
            until_s=time.monotonic() + share_s, counts=counts, tell=_say,
        )  # fmt: skip
        if failure is not None:
            failed += 1
            least = failure if given.whole else shrunk(kind, here, failure, _say, loop)
            _tell(kind, loop, here, least)
            if not given.go_on:
                break
        turn += 1
    print(f"{counts}; {failed} sequences failed", flush=True)
    return int(failed > 0)


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
        "--verify", action="store_true", help="of a loop: verify updates all the time"
    )
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
    return parser.parse_args()


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
    try:
        status = main()
    finally:
        end_warm_start()
        sys.stdout.flush()
    # Threads of a call that hangs would keep it.
    os._exit(status)
