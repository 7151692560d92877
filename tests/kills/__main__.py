"""The kernel's own out-of-memory kills, under a real training: never the trainer, and no other bit.

    python -m tests.kills [--rounds 100] [--minutes 60] [--where both|group|host]
    python -m tests.kills --group FOLDER     in a memory group that is made in that one, here

Two ranks (gloo, FSDP2) and their helpers share a memory group on a small host (`small_host.py`),
which has a kernel of its own, so nothing of this machine is limited or killed. Without it, name a
folder of memory groups that you may use: one group is made in it for the programs of this run
alone, and removed at the end.

Ends with 1 if anything was not as `campaign.py` says, and with 3 where no limit can be made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from math import inf
from pathlib import Path

from tests import leaks
from tests.kills.small_host import KERNEL, run_in_small_host

V2 = Path("/sys/fs/cgroup")
ROUND_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=inf, help="no round begins later")
    parser.add_argument("--where", choices=("both", "group", "host"), default="both")
    parser.add_argument("--memory-mib", type=int, default=1792, help="of the small host")
    parser.add_argument("--group", type=Path, help="make the group in this one, on this machine")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    # So that groups and hosts are taken down then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if given.inside:
        wheres = ("group", "host") if given.where == "both" else (given.where,)
        return inside(given, V2, wheres)
    if given.group is not None:
        return inside(given, given.group, ("group",))
    program = os.environ.get(KERNEL) or shutil.which("linux.uml")
    if not program:
        print(
            "no limit of memory can be made here: linux.uml (Debian's user-mode-linux, or "
            f"{KERNEL}) is missing, and no --group is given", file=sys.stderr,
        )  # fmt: skip
        return 3
    command = [sys.executable, "-m", "tests.kills", "--inside"]
    command += ["--rounds", str(given.rounds), "--where", given.where]
    command += ["--minutes", str(given.minutes)]
    timeout_s = ROUND_S * (given.rounds + 2)
    return run_in_small_host(
        command, program=program, memory_mib=given.memory_mib, timeout_s=timeout_s
    )


def inside(given: argparse.Namespace, within: Path, wheres: Sequence[str]) -> int:
    """Here, in a new group within that one."""
    # Imports torch, which the small host's own process does not need.
    from tests.kills.campaign import campaign
    from tests.kills.groups import NoGroupError, memory_group
    from tests.launch import end_warm_start

    leaks.adopt_orphans()
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="paramd-kills-"))
        stack.callback(end_warm_start)
        try:
            group = stack.enter_context(memory_group(within))
        except NoGroupError as error:
            print(error, file=sys.stderr)
            return 3
        campaign(given.rounds, given.minutes, Path(name) / "work", group, wheres)
    return 0


if __name__ == "__main__":
    sys.exit(main())
