"""python -m tests.sequences --kind ddp --seed 7 [--minutes n] [--steps n] [--only NAME[:n],...]

Without a kind, sequences of all kinds take turns. Prints a line for each operation.
"""

import argparse
import os
import random
import sys
import time

from tests import leaks
from tests.launch import end_warm_start, warm_children
from tests.sequences import reading
from tests.sequences.generate import BY_NAME, Failure, Item, drawn, run, shrunk
from tests.sequences.model import KINDS, WORLD_SIZES
from tests.sequences.session import SHORT, Counts

STEPS = 400
"""Operations of one training."""


def main() -> int:
    given = _parsed()
    reading.WRITES, reading.BURST = "writes" not in given.without.split(","), given.burst
    SHORT.update(one.split("=", 1) for one in given.set)
    leaks.adopt_orphans()
    warm_children()
    kinds = given.kind.split(",") if given.kind else list(KINDS)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    until_s = time.monotonic() + 60 * given.minutes
    counts, failed, turn = Counts(), 0, 0
    while time.monotonic() < until_s and (turn == 0 or not given.only):
        kind, here = kinds[turn % len(kinds)], seed + turn // len(kinds)
        items = _chosen(given.only) if given.only else drawn(here, given.steps)
        left_out, kept = given.without.split(","), given.of.split(",") if given.of else BY_NAME
        items = [item for item in items if item.name in kept and item.name not in left_out]
        share_s = (until_s - time.monotonic()) / max(1, len(kinds) - turn)
        print(f"--- {kind}, seed {here}", flush=True)
        failure = run(
            kind, here, items, until_s=time.monotonic() + share_s, counts=counts, tell=_say
        )
        if failure is not None:
            failed += 1
            _tell(kind, here, failure if given.whole else shrunk(kind, here, failure, _say))
            if not given.go_on:
                break
        turn += 1
    print(f"{counts}; {failed} sequences failed", flush=True)
    return int(failed > 0)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sequences")
    parser.add_argument("--kind", default="", help="one of, or several: " + ", ".join(WORLD_SIZES))
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
        assert name in BY_NAME, f"{name}: one of {', '.join(BY_NAME)}"
        found.append(Item(int(number or place), name))
    return found


def _tell(kind: str, seed: int, failure: Failure) -> None:
    only = ",".join(f"{item.name}:{item.number}" for item in failure.items)
    print(f"FAILED {kind}, seed {seed}: {failure.error}", flush=True)
    print(f"  python -m tests.sequences --kind {kind} --seed {seed} --only {only}", flush=True)


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
