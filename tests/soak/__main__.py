"""Parse, run episodes until the time is over, print the table."""

import argparse
import gc
import secrets
import signal
import sys
import time

from tests import leaks
from tests.launch import end_warm_start, warm_start
from tests.leaks import first_grpc_use
from tests.soak import episode, plan
from tests.soak.oracle import Tally
from tests.soak.watchdog import Watchdog

LEFT_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="repeats the soak that printed it")
    parser.add_argument("--episode", type=int, default=None, help="runs this one alone")
    parser.add_argument("--first", type=int, default=0, help="begins with this episode")
    parser.add_argument(
        "--faults", help="one episode of these: 'sidecar clock +@0; sidecars all kill'"
    )
    parser.add_argument("--kind", default="ddp", help="of the model that they are done to")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--store", default="embedded", choices=plan.STORES)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else secrets.randbelow(1 << 31)
    print(f"seed {seed}", flush=True)
    leaks.adopt_orphans()
    # Who ends it early gets the same clearing up: processes, mounts, folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Forks the ranks of all episodes; it is there before the first, so no episode left it.
    warm_start()
    tally = Tally()
    begin_s = time.monotonic()
    first = arguments.episode if arguments.episode is not None else arguments.first
    alone = arguments.episode is not None or arguments.faults is not None
    until_s = float("inf") if alone else begin_s + 60 * arguments.minutes
    number, failed = first, False
    try:
        # gRPC's own descriptors live as long as any channel; they are no episode's.
        with first_grpc_use():
            while time.monotonic() < until_s:
                failed = not _run(
                    _chosen(arguments, seed, number),
                    f"make soak SEED={seed} EPISODE={number}",
                    tally,
                    until_s,
                )
                number += 1
                if failed or alone:
                    break
    finally:
        end_warm_start()
        table = _table(seed, first, number, tally, time.monotonic() - begin_s)
        print("\n".join(table))
    missed = {k: n - tally.struck[k] - _skipped(tally, k) for k, n in tally.planned.items()}
    missed = {k: n for k, n in missed.items() if n}
    if missed:
        print(f"planned and not reached: {missed}", file=sys.stderr)
    return int(failed or bool(missed))


def _chosen(given: argparse.Namespace, seed: int, number: int) -> plan.Episode:
    if given.faults is None:
        return plan.episode(seed, number)
    return plan.told(given.faults, kind=given.kind, world_size=given.ranks, store=given.store)


def _run(chosen: plan.Episode, again: str, tally: Tally, until_s: float) -> bool:
    print(
        f"episode {chosen.number}: {chosen.kind} x{chosen.world_size}, {chosen.store}", flush=True
    )
    before = leaks.holdings()
    try:
        with Watchdog(again) as watchdog:
            episode.run(chosen, tally, until_s, watchdog)
        gc.collect()
        left = leaks.wait_until_gone(before, timeout_s=LEFT_S)
        if left:
            raise episode.FailedError(f"left behind: {left}")
    except episode.FailedError as error:
        print(f"FAILED: {error}\nrepeat it with: {again}", file=sys.stderr, flush=True)
        return False
    return True


def _table(seed: int, first: int, end: int, tally: Tally, taken_s: float) -> list[str]:
    kinds = sorted(tally.planned)
    lines = [
        "",
        f"seed {seed}, episodes {first} to {end - 1}, {taken_s / 60:.1f} minutes",
        f"answers checked     {sum(tally.answers.values())}: {dict(tally.answers)}",
        f"refused             {dict(tally.refused)}",
        f"edits               {dict(tally.edits)}",
        "mixed, stale, split or lost: each ends the campaign; see FAILED",
        f"updates compared    {tally.updates}; loss digests equal: {tally.digests}",
        f"longest recovery    {tally.longest_recovery_s:.1f} s",
        f"faults              {sum(tally.struck.values())} of {sum(tally.planned.values())} "
        f"planned, {len(tally.struck)} kinds",
        *(f"  {kind:<38} {tally.struck[kind]} of {tally.planned[kind]}" for kind in kinds),
        *(f"  not possible here: {what} ({n} times)" for what, n in tally.not_possible.items()),
    ]
    return lines


def _skipped(tally: Tally, kind: str) -> int:
    return sum(n for what, n in tally.not_possible.items() if what.startswith(f"{kind}:"))


if __name__ == "__main__":
    raise SystemExit(main())
