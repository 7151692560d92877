"""Rounds of kernel kills, by the limit of a memory group and by that of the whole host in turn.

Each round begins with a reader that gets everything, and with both ranks training. Then memory runs
out: the group's limit is lowered, or another program takes what the host has left. The kernel
chooses who ends. Then, while a reader's snapshot still does not fit: trainers live and go
on, the helpers come back and stay, a reader is refused with the figures, and status, `paramd why`
and the sidecar's log tell of it. With memory again, a reader gets the same values as before. At the
end all is compared with a training without paramd.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from paramd import places
from paramd.errors import CapacityError, ExhaustedError, ParamdError
from paramd.mesh.mesh import Mesh
from tests.kills.groups import MemoryGroup
from tests.launch import ROOT, Ranks, start_ranks
from tests.multiprocess.truth import connect_to

Found = TypeVar("Found")

JOB = "enduring"
ENDURING = ROOT / "tests/kills/enduring.py"
"""A script, not a module: it starts, and starts its helpers, as a user's does."""

HOG = ROOT / "tests/kills/hog.py"
RANKS = 2
LADEN = "laden.weight"
LADEN_MIB = 128
"""Size of the frozen parameter: each rank has a half of it, and so has a reader's snapshot."""

STEP_BYTES = 8 << 20
"""By how much a limit is lowered at a time."""

PAUSE_S = 2.0
"""After each step: a small host has one core, which the helpers need, too."""

HELPER_BYTES = 64 << 20
"""What a helper takes to come back, at most."""

RESERVE_BYTES = 256 << 20
SPARE_BYTES = 192 << 20
"""What is left once they are back: too little for a reader's snapshot, enough for one tensor."""

PATIENCE_S = 900.0
POLL_S = 0.5
EXPLAINS = 25
"""Every so many rounds `paramd why` is asked, too, which starts slowly."""

STAYS_S = 3.0
"""For how long nothing more may be ended once the helpers are back."""

KILLED = "the kernel ended its last sidecar because memory had run out"
LOGGED = '"killed-for-memory"'


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One training and where its memory is limited."""

    ranks: Ranks
    mesh: Mesh
    folder: Path
    group: MemoryGroup

    @property
    def killed_count(self) -> int:
        """The kernel's own count."""
        return self.group.killed_count

    @property
    def steps(self) -> list[int]:
        """That the ranks have made."""
        return [int((self.folder / f"at-{rank}").read_text() or 0) for rank in range(RANKS)]

    def logs(self) -> list[str]:
        folder = self.ranks.state_dir / JOB
        return [(folder / f"rank-{rank}.log").read_text() for rank in range(RANKS)]


def told(ranks: Ranks) -> str:
    """For a failure's message."""
    said = [f"helpers {helpers(ranks)}", ranks.outputs()]
    for path in sorted((ranks.state_dir / JOB).glob("*.log")):
        said.append(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")
    return "\n".join(said)


def until(done: Callable[[], Found], what: str, ranks: Ranks) -> Found:
    """Polls a condition, seldom: a small host has one core. Gives what it found."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := done()):
        assert time.monotonic() < deadline_s, (
            f"not within {PATIENCE_S:.0f} s: {what}\n{told(ranks)}"
        )
        assert lives(ranks), f"a trainer has ended: {what}\n{told(ranks)}"
        time.sleep(POLL_S)
    return found


def lives(ranks: Ranks) -> bool:
    return all(rank.process.poll() is None for rank in ranks)


def campaign(
    rounds: int, minutes: float, folder: Path, group: MemoryGroup, wheres: Sequence[str]
) -> None:
    """Raises AssertionError. `group`: without a limit yet. `wheres`: "group", "host"; in turn.

    No round begins once so many minutes are over.
    """
    folder.mkdir(parents=True)
    # The sidecars are to refuse a reader, not the reader itself.
    os.environ["PARAMD_HOST_RESERVE"] = "0"
    args = [str(folder), "--group", str(group.folder), "--laden-mib", str(LADEN_MIB), "--attach"]
    args += ["--pause-s", str(PAUSE_S)]
    env = {
        "PYTHONPATH": str(ROOT),
        "PARAMD_HOST_RESERVE": str(RESERVE_BYTES),
        "PARAMD_STANDING_EVERY": "20",
        # Samples of values take snapshots of all, too.
        "PARAMD_ALERTS": '{"watch": false, "look": false}',
        # A small host is slow, and starts three helpers at once.
        "PARAMD_SIDECAR_START_TIMEOUT_S": str(PATIENCE_S),
    }
    began_s = time.monotonic()
    kills = 0
    with ExitStack() as stack:
        ranks = stack.enter_context(start_ranks(ENDURING, RANKS, args=args, env=env))
        at = [folder / f"at-{rank}" for rank in range(RANKS)]
        until(lambda: all(path.exists() for path in at), "trains", ranks)
        endpoint = ranks.state_dir / JOB / places.ENDPOINT_FILE
        until(endpoint.exists, "a control plane", ranks)
        mesh = stack.enter_context(connect_to(ranks.state_dir, JOB))
        scene = Scene(ranks=ranks, mesh=mesh, folder=folder, group=group)
        await_helpers(scene, {})
        print(f"trains, with all helpers, after {time.monotonic() - began_s:.0f} s", flush=True)
        wanted = got(scene)
        print(f"read after {time.monotonic() - began_s:.0f} s", flush=True)
        number = 0
        while number < rounds and time.monotonic() < began_s + 60 * minutes:
            before_s, before = time.monotonic(), scene.killed_count
            where = wheres[number % len(wheres)]
            gone = one_round(scene, wanted, where=where, explains=number % EXPLAINS == 0)
            number += 1
            kills += scene.killed_count - before
            print(
                f"round {number}: {where}, ended {', '.join(sorted(gone))}, "
                f"{kills} kills by now, step {scene.steps[0]}, "
                f"{time.monotonic() - before_s:.0f} s", flush=True,
            )  # fmt: skip
        (folder / "stop").touch()
        ranks.end_well(PATIENCE_S)
    found = final(folder)
    steps = found[0]["steps"]
    calm = folder / "calm"
    calm.mkdir()
    args = [str(calm), "--laden-mib", str(LADEN_MIB), "--steps", steps]
    with start_ranks(ENDURING, RANKS, args=args, env={"PYTHONPATH": str(ROOT)}) as ranks:
        ranks.end_well(PATIENCE_S + int(steps))
    assert found == final(calm), "other bits than without paramd"
    print(
        f"{number} rounds, {kills} kills by the kernel, no trainer; {steps} steps of {RANKS} "
        f"ranks, {len(found[0]) - 1} digests of each as without paramd; "
        f"{time.monotonic() - began_s:.0f} s",
        flush=True,
    )


def one_round(
    scene: Scene, wanted: torch.Tensor, *, where: str, explains: bool
) -> Mapping[str, int]:
    """Returns the helpers that the kernel ended."""
    before, counted, kills = helpers(scene.ranks), logged(scene), scene.killed_count
    with ExitStack() as stack:
        make_short = lower if where == "group" else hog
        shortage = stack.enter_context(make_short(scene))
        gone = until(lambda: ended(scene, before), "a helper was ended", scene.ranks)
        assert scene.killed_count - kills >= len(gone), told(scene.ranks)
        shortage(len(gone) * HELPER_BYTES + SPARE_BYTES)
        steps = scene.steps
        await_helpers(scene, gone)
        since = scene.killed_count
        # A helper that came back with less leaves more.
        why = until(lambda: refusal(scene, shortage), "a reader is refused", scene.ranks)
        assert "stay free for the training (PARAMD_HOST_RESERVE)" in why, why
        of = [int(name.split()[1]) for name in gone if name.startswith("sidecar")]
        until(lambda: is_told(scene, of, counted), "it is told", scene.ranks)
        if explains and of:
            until(lambda: KILLED in explained(scene), "`paramd why` tells it", scene.ranks)
        time.sleep(STAYS_S)
        # It came back without what did not fit, and the refused reader cost nobody his life.
        assert scene.killed_count == since, told(scene.ranks)
        assert lives(scene.ranks), told(scene.ranks)
        until(lambda: min(scene.steps) > max(steps), "training goes on", scene.ranks)
    assert torch.equal(got(scene), wanted), "other values than before the kill"
    return gone


Shortage = Callable[[int], None]
"""Leaves so many bytes, and no more, from now on."""


@contextmanager
def lower(scene: Scene) -> Iterator[Shortage]:
    """The group's limit was lowered until the kernel had ended a process."""
    group = scene.group
    try:
        limit_bytes, kills = group.used_bytes, group.killed_count
        # Its victim takes a moment to end: a limit that is lowered meanwhile costs another.
        while group.killed_count == kills:
            limit_bytes -= STEP_BYTES
            group.limit(limit_bytes)
        yield lambda left_bytes: group.limit(group.used_bytes + left_bytes)
    finally:
        group.limit(None)


@contextmanager
def hog(scene: Scene) -> Iterator[Shortage]:
    """Another program has taken the host's memory until the kernel had ended a process."""
    command = [sys.executable, str(HOG)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        ask, answer = process.stdin, process.stdout
        assert ask is not None
        assert answer is not None

        def leave(left_bytes: int) -> None:
            ask.write(f"{left_bytes >> 20}\n".encode())
            ask.flush()
            assert answer.readline(), told(scene.ranks)

        try:
            # Its own end would be no answer.
            assert answer.readline(), told(scene.ranks)
            yield leave
        finally:
            process.kill()


def helpers(ranks: Ranks) -> dict[str, int]:
    """Pids of the living helpers by program and rank."""
    found = {}
    for process in ranks.stragglers():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        for program in ("sidecar", "control"):
            if f"paramd_service.{program}" in command:
                rank = command[command.index("--rank") + 1] if program == "sidecar" else ""
                found[f"{program} {rank}".strip()] = process.pid
    return found


def ended(scene: Scene, before: Mapping[str, int]) -> dict[str, int]:
    now = helpers(scene.ranks)
    return {name: pid for name, pid in before.items() if now.get(name) != pid}


def await_helpers(scene: Scene, gone: Mapping[str, int]) -> None:
    """Until all helpers are there, none of those that are gone among them, and answer."""

    def back() -> bool:
        now = helpers(scene.ranks)
        return len(now) == RANKS + 1 and not gone.items() & now.items()

    until(back, "the helpers are back", scene.ranks)
    until(lambda: served(scene), "served", scene.ranks)


def served(scene: Scene) -> bool:
    with suppress(ParamdError):
        return bool(scene.mesh.summon("head.weight", transport="grpc"))
    return False


def got(scene: Scene) -> torch.Tensor:
    """What a reader gets, once there is memory for it again."""

    def read() -> Mapping[str, torch.Tensor]:
        with suppress(ParamdError):
            return scene.mesh.summon("*")
        return {}

    return until(read, "a reader gets all", scene.ranks)[LADEN]


def refusal(scene: Scene, shortage: Shortage) -> str:
    """Why a reader is refused; empty where it is not, or helpers are away."""
    shortage(SPARE_BYTES)
    try:
        scene.mesh.summon("*", transport="grpc")
    except (ExhaustedError, CapacityError) as error:
        # Where the reader has the same limit, it refuses itself.
        return str(error)
    except ParamdError:
        pass
    return ""


def logged(scene: Scene) -> list[int]:
    return [log.count(LOGGED) for log in scene.logs()]


def is_told(scene: Scene, of: list[int], counted: list[int]) -> bool:
    """Whether the sidecars' logs and the status tell of the kernel's kills of these ranks."""
    try:
        rows = scene.mesh.status()
    except ParamdError:
        return False
    now = logged(scene)
    return all(now[rank] > counted[rank] and KILLED in rows[rank].reason for rank in of)


def explained(scene: Scene) -> str:
    """What `paramd why` prints; a control plane that has just come back may be late."""
    done = subprocess.run(
        [sys.executable, "-m", "paramd.cli", "why", "--job", JOB],
        env=os.environ | {"PARAMD_STATE_DIR": str(scene.ranks.state_dir)},
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def final(folder: Path) -> list[dict[str, str]]:
    return [json.loads((folder / f"final-{rank}").read_text()) for rank in range(RANKS)]
