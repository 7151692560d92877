"""Parse, run episodes until the time is over, report."""

from __future__ import annotations

import argparse
import gc
import secrets
import sys
import time

import psutil

from tests import leaks
from tests.soak import episode, plan
from tests.soak.usage import MIB, Usage


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="repeats the soak that printed it")
    parser.add_argument("--episode", type=int, default=None, help="runs this one alone")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else secrets.randbelow(1 << 31)
    print(f"seed {seed}", flush=True)
    leaks.adopt_orphans()
    if arguments.episode is not None:
        _run(seed, arguments.episode)
        return 0
    return _soak(seed, arguments.minutes)


def _soak(seed: int, minutes: float) -> int:
    end_s = time.monotonic() + 60 * minutes
    client, answers, number = Usage("this client"), 0, 0
    while time.monotonic() < end_s:
        answers += _run(seed, number)
        gc.collect()
        client.sample(psutil.Process())
        number += 1
    complaint = client.complaint(rss_bytes=16 * MIB, descriptors=4)
    print(f"{number} episodes, {answers} right answers, none wrong; seed {seed}")
    print(f"client: {[b // MIB for b in client.rss_bytes]} MiB, {client.descriptors} descriptors")
    if complaint:
        print(complaint, file=sys.stderr)
    return int(bool(complaint))


def _run(seed: int, number: int) -> int:
    chosen = plan.episode(seed, number)
    pace = "lockstep" if chosen.lockstep else "free"
    print(f"episode {number}: {chosen.kind} x{chosen.world_size}, {pace}, ends {chosen.end}")
    before = leaks.holdings()
    try:
        found = episode.run(chosen)
    except BaseException:
        again = f"--seed {seed} --episode {number}"
        print(f"FAILED; repeat it with: python -m tests.soak {again}", file=sys.stderr)
        raise
    left = leaks.wait_until_gone(before, timeout_s=10)
    assert not left, left
    print(
        f"  {found.right} right answers at {len(found.steps)} steps, "
        f"refused {dict(found.refused)}, "
        f"longest {found.longest_s:.2f} s {found.longest_reason[:80]}",
        flush=True,
    )
    return found.right


if __name__ == "__main__":
    raise SystemExit(main())
