"""What the control plane says of a real training in trouble: the right cause first, and no other.

One training of two ranks has one trouble after the other, each healed before the next.
"""

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.launch import start_ranks
from tests.longer import share, takes_all
from tests.multiprocess.striking import allowed_s
from tests.web.door import Door, wait_for
from tests.web.training import JOB

WORKER = "tests.multiprocess.workers.troubled"
TOLD_S = 30.0
"""Within this time the cause is told."""
WATCH = {"watch_share": 1, "stats_every_s": 2, "gradients_every_s": 2, "digests_every_s": 5}
LEAST_NORMS = 8
"""A baseline of gradients, and as many samples of what the ranks are doing."""
LIMITLESS = resource.RLIM_INFINITY

TROUBLES = {
    "explode": "gradient-jump layers.2",
    "vanish": "gradient-jump layers.2",
    "slow": "slow-rank rank 1",
    "data": "slow-rank mesh",
    "stuck": "stuck rank 1",
    "drift": "replica-drift layers.3",
    "full disk": "store control plane",
    "restarted": "",
    "nan": "non-finite layers.1",
    "dead": "stale-rank rank 1",
}
"""The cause, or its layer; the last is not healed. CI has most of them of other trainings, too
(`python -m benchmarks verdicts --cases ci`)."""
ALONGSIDE = {"nan": {"logged-number loss of rank 0: nonfinite"}}
"""What may be told first, for seconds: the loss is the first to be not finite."""


def cause_of(door: Door) -> str:
    """Rule and subject of what is said to be the cause; empty while all is well."""
    (job,) = door.get("/jobs")["jobs"]
    told = {one["id"]: one for one in door.get("alerts")["alerts"]}
    one = told.get(job["cause"])
    said = f"{one['rule']} {one['name'] or one['subject']}" if one is not None else ""
    return said.removesuffix(".weight").removesuffix(".bias")


def planted(door: Door, trouble: str) -> Callable[[], object]:
    """Brings it about; returns what heals it."""
    if trouble == "full disk":
        limit = partial(resource.prlimit, door.control_pid, resource.RLIMIT_FSIZE)
        limit((1, LIMITLESS))
        return lambda: limit((LIMITLESS, LIMITLESS))
    (door.folder / trouble).touch()
    return (door.folder / trouble).unlink


def restarted(door: Door) -> Door:
    """The same training with another control plane."""
    os.kill(door.control_pid, signal.SIGKILL)
    path = door.ranks.state_dir / JOB / "endpoint.json"
    pid = door.control_pid
    wait_for("another", lambda: json.loads(path.read_text())["pid"] != pid, allowed_s(TOLD_S))
    found = Door(door.ranks, door.folder)
    found.wait_until_well()
    return found


def told_of(door: Door, trouble: str, cause: str) -> set[str]:
    """All that is said to be the cause until the right one is, or for `TOLD_S`."""
    wait_for("a healthy training", lambda: cause_of(door) == "", allowed_s(TOLD_S))
    began_s, told = time.monotonic(), set[str]()
    door = restarted(door) if trouble == "restarted" else door
    heal = planted(door, trouble) if cause else lambda: None
    limit_s = allowed_s(TOLD_S) if cause else TOLD_S

    def is_told() -> bool:
        told.add(cause_of(door))
        return cause in told - {""}

    with suppress(AssertionError):  # the caller compares
        wait_for(trouble, is_told, limit_s)
    print(f"{trouble}: {told} after {time.monotonic() - began_s:.1f} s")
    heal()
    return told - {""} - ALONGSIDE.get(trouble, set())


@pytest.mark.in_turns
@pytest.mark.timeout(900)
def test_a_planted_trouble_is_told_with_its_cause_and_no_other(tmp_path: Path) -> None:
    env = {"PARAMD_ALERTS": json.dumps(WATCH)}
    found = {}
    with start_ranks(WORKER, 2, args=[str(tmp_path)], env=env) as ranks:
        ranks.wait_for_text("attached", rank=0)
        door = Door(ranks, tmp_path)
        door.wait_until_well()

        def norms() -> int:
            return len(door.get("history", metric="grad_norm", subject="total")["points"])

        wait_for("a baseline", lambda: norms() >= LEAST_NORMS, allowed_s(TOLD_S))
        some = ["stuck", *share(["explode", "drift"], 2)]
        for trouble in TROUBLES if takes_all() else some:
            found[trouble] = told_of(Door(ranks, tmp_path), trouble, TROUBLES[trouble])
    assert found == {one: {TROUBLES[one]} - {""} for one in found}
