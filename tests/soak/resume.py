"""Kills trainings with resume="auto" over and over, and compares their ends with calm ones.

    python -m tests.soak.resume --kills 500 [--seed n] [--kind fsdp2]

A job of each kind is started, killed at a moment or point that the seed draws, started again, and
so on to its end; then parameters, optimizer state, random states, schedulers, scalers and loaders
of every rank must be those of a training that nobody killed. A start may lose what it made since
the last standing snapshot. It may begin afresh only if a sidecar was killed with its trainer, or
before a standing snapshot can have been there. A sidecar that leaves a successor without an answer
fails the campaign, even where all bits are right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests import leaks
from tests.launch import Ranks, end_warm_start, run_ranks, start_ranks, warm_start
from tests.soak.stage import MOST_PATIENCE, patience_s
from tests.soak.watchdog import Watchdog

WORKER = "tests.multiprocess.workers.resuming"
STEPS = 90
DEADLINE_S = 90.0
STRIKE_S = (MOST_PATIENCE + 1) * 240.0
PAUSE_S = 0.015
FIRST_STANDING = 4
"""Steps of a start after which a standing snapshot is there."""

KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp2": (2, ("--optimizer", "adamw", "--workers", "1")),
    "ddp": (2, ("--optimizer", "sgd", "--scaler")),
    "fsdp1-flat": (2, ("--optimizer", "adamw")),
    "hsdp": (2, ("--optimizer", "sgd", "--workers", "1")),
    "tp-fsdp2": (2, ("--optimizer", "adamw")),
    "plain": (1, ("--optimizer", "adamw", "--scaler")),
}
"""Ranks and options of each kind; all have dropout and a scheduler."""

IN_STEP = ("forward", "backward", "inside-begin", "inside-end", "update")
IN_ATTACH = ("looked", "opened", "moved", "restore")
STRIKES = (
    *("random", "random", "random"), *IN_STEP, *IN_ATTACH, "standing", "together", "sidecar",
    "control",
)  # fmt: skip


class FailedError(Exception):
    """The campaign found something wrong."""


@dataclass
class Tally:
    """What the campaign did and saw."""

    kills: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    lives: int = 0


@dataclass
class Life:
    """One job through its starts."""

    folder: Path
    kind: str
    stack: ExitStack
    env: dict[str, str]
    allowed_fresh: bool = True
    """Whether the next start may begin afresh: nothing can be there."""
    struck: bool = False
    """Whether a sidecar was killed before this start had told how it was resumed."""
    jobs: list[Ranks] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return KINDS[self.kind][0]

    def start(self) -> Ranks:
        options = [str(self.folder), "--kind", self.kind, *KINDS[self.kind][1]]
        ranks = self.stack.enter_context(
            start_ranks(
                WORKER,
                self.world_size,
                args=[*options, "--steps", str(STEPS), "--pause-s", str(PAUSE_S)],
                env=self.env,
                state_dir=self.folder / "state",
            )
        )
        self.jobs.append(ranks)
        return ranks

    @property
    def over(self) -> bool:
        return all((self.folder / f"final-{rank}").exists() for rank in range(self.world_size))

    def step(self, rank: int = 0) -> int:
        """Step that a rank was seen at last."""
        try:
            return int((self.folder / f"at-{rank}").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def starts(self) -> list[list[dict[str, Any] | None]]:
        """By rank, how each start was resumed."""
        return [
            [json.loads(line) for line in self._lines(f"starts-{rank}")]
            for rank in range(self.world_size)
        ]

    def helpers(self, name: str) -> list[psutil.Process]:
        """Living sidecars or control planes of this job."""
        found = []
        for ranks in self.jobs:
            for process in ranks.stragglers():
                with suppress(psutil.Error):
                    if name in process.cmdline():
                        found.append(process)
        return found

    def sidecar(self, rank: int) -> psutil.Process | None:
        for process in self.helpers("paramd_service.sidecar"):
            with suppress(psutil.Error):
                words = process.cmdline()
                if words[words.index("--rank") + 1] == str(rank):
                    return process
        return None

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


class Campaign:
    """Draws strikes and carries them out."""

    def __init__(
        self, seed: int, folder: Path, tally: Tally, watchdog: Watchdog, *, only: str, say: bool
    ) -> None:
        self._watchdog = watchdog
        self._draw = random.Random(seed)
        self._folder = folder
        self._tally = tally
        self._say = say
        self._calm: dict[str, Any] = {}
        self._kinds = [only] if only else list(KINDS)
        self._strikes: list[str] = []

    def run(self, kills: int) -> None:
        """Live jobs of all kinds until so many kills were made."""
        while sum(self._tally.kills.values()) < kills:
            kind = self._kinds[self._tally.lives % len(self._kinds)]
            self._live(kind, kills)
            self._tally.lives += 1

    def _live(self, kind: str, kills: int) -> None:
        with ExitStack() as stack:
            folder = self._folder / f"{self._tally.lives}-{kind}"
            folder.mkdir()
            faults = folder / "faults"
            faults.mkdir()
            env = {
                "PARAMD_FAULTS_DIR": str(faults),
                "PARAMD_TRAINER_FAULTS_DIR": str(faults),
                "PARAMD_LINGER_S": "120",
            }
            life = Life(folder, kind, stack, env)
            try:
                most = sum(self._tally.kills.values()) + max(4, -(-kills // len(self._kinds)))
                while sum(self._tally.kills.values()) < min(most, kills) and not life.over:
                    self._strike(life)
                if not life.over:
                    self._finish(life)
                self._compare(life)
            except Exception:
                keep = Path(tempfile.gettempdir(), f"paramd-resume-{os.getpid()}")
                shutil.copytree(folder, keep, dirs_exist_ok=True, ignore=_no_sockets)
                print(f"what it left is in {keep}", file=sys.stderr)
                print(life.jobs[-1].outputs() if life.jobs else "", file=sys.stderr)
                raise

    def _next_strike(self) -> str:
        if not self._strikes:
            self._strikes = list(STRIKES)
            self._draw.shuffle(self._strikes)
        return self._strikes.pop()

    def _strike(self, life: Life) -> None:
        """Start, strike, see that all have ended."""
        what, rank = self._next_strike(), self._draw.randrange(life.world_size)
        self._watchdog.expect(f"{what} at rank {rank} of {life.kind}", STRIKE_S)
        if what == "restore" and not any(self._state_left(life)):
            what = "looked"
        known = [len(one) for one in life.starts()]
        life.struck = False
        wait_s = self._draw.random() * 1.2
        later = self._draw.randint(3, 14)
        self._arm(life, what, rank, later)
        ranks = life.start()
        if self._say:
            print(f"  {life.kind:<10} {what:<13} rank {rank}", end="", flush=True)
        if what in ("random", "together", "sidecar", "control", "standing"):
            self._run_a_while(life, ranks, wait_s, least=later if what == "standing" else 0)
        victims = self._hit(life, ranks, what, rank, known)
        wait_for(lambda: "trainer" not in victims or ranks[rank].process.poll() is not None, ranks)
        # Only the victim's own end tells: its death makes the others fail.
        if ranks[rank].process.poll() not in (None, 0, -signal.SIGKILL):
            raise FailedError(f"a start of {life.kind} failed before {what} struck it")
        if victims:
            self._tally.kills[what] += 1
        self._end(ranks, life)
        self._disarm(life, rank)
        self._check_starts(life, known, ranks)
        attached = [len(one) for one in life.starts()] != known
        if "sidecar" in victims:
            life.allowed_fresh = True
        elif attached and self._standing_possible(life):
            life.allowed_fresh = False
        if self._say:
            print(
                f" at step {life.step()}; {_last(life.starts())}",
                flush=True,
            )

    @staticmethod
    def _state_left(life: Life) -> list[bool]:
        return [life.sidecar(rank) is not None for rank in range(life.world_size)]

    @staticmethod
    def _standing_possible(life: Life) -> bool:
        return min(life.step(rank) for rank in range(life.world_size)) >= FIRST_STANDING

    def _arm(self, life: Life, what: str, rank: int, later: int) -> None:
        if what in IN_STEP:
            # Told as a step to come, which a start that resumes far behind also reaches.
            step = min(life.step(rank) + later, STEPS - 2)
            (life.folder / f"die-{rank}").write_text(f"{what} {step}")
        elif what == "restore":
            (life.folder / f"die-{rank}").write_text("restore 0")
        elif what in IN_ATTACH:
            Path(life.env["PARAMD_FAULTS_DIR"], f"rank-{rank}").write_text(f"{what}:kill")
        elif what == "standing":
            text = f"standing-copied:stop@{1 + later % 3}"
            Path(life.env["PARAMD_FAULTS_DIR"], f"rank-{rank}.sock").write_text(text)

    @staticmethod
    def _disarm(life: Life, rank: int) -> None:
        for path in (
            life.folder / f"die-{rank}",
            Path(life.env["PARAMD_FAULTS_DIR"], f"rank-{rank}"),
            Path(life.env["PARAMD_FAULTS_DIR"], f"rank-{rank}.sock"),
        ):
            path.unlink(missing_ok=True)

    def _run_a_while(self, life: Life, ranks: Ranks, wait_s: float, *, least: int) -> None:
        """Until a moment after its first step, or anywhere in its start."""
        if least or self._draw.random() < 0.7:
            before = life.step()
            wait_for(lambda: life.step() != before or _ended(ranks), ranks)
        time.sleep(wait_s)

    def _hit(
        self, life: Life, ranks: Ranks, what: str, rank: int, known: Sequence[int]
    ) -> set[str]:
        """Carry the strike out; return who died of it."""
        if what in IN_STEP or what in IN_ATTACH:
            # A job that ends first was at its end.
            wait_for(lambda: ranks[rank].process.poll() is not None or life.over, ranks)
            return {"trainer"} if ranks[rank].process.poll() == -signal.SIGKILL else set()
        if life.over:
            return set()
        sidecar = life.sidecar(rank)
        if what == "standing" and sidecar is not None:
            until_s = time.monotonic() + 2.0
            while _state(sidecar) != psutil.STATUS_STOPPED and time.monotonic() < until_s:
                time.sleep(0.005)
            ranks[rank].process.send_signal(signal.SIGKILL)
            self._kill(ranks)
            sidecar.resume()
            return {"trainer"}
        if what == "control":
            for process in life.helpers("paramd_service.control"):
                _kill(process)
            time.sleep(self._draw.random() * 0.1)
        if what in ("sidecar", "together") and sidecar is not None:
            _kill(sidecar)
            if [len(one) for one in life.starts()] == known:
                life.struck = True
            if what == "sidecar":
                # Its trainer starts another and hands the memory over; then that one is killed.
                time.sleep(self._draw.random() * 1.5)
                ranks[rank].process.send_signal(signal.SIGKILL)
                return {"trainer", "sidecar"}
            ranks[rank].process.send_signal(signal.SIGKILL)
            return {"trainer", "sidecar"}
        ranks[rank].process.send_signal(signal.SIGKILL)
        time.sleep(self._draw.random() * 0.05)
        return {"trainer"}

    def _end(self, ranks: Ranks, life: Life) -> None:
        if life.over:
            wait_for(lambda: _ended(ranks, all_of_them=True), ranks)
        self._kill(ranks)

    @staticmethod
    def _kill(ranks: Ranks) -> None:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(signal.SIGKILL)
        wait_for(lambda: _ended(ranks, all_of_them=True), ranks)

    def _finish(self, life: Life) -> None:
        self._watchdog.expect(f"the end of {life.kind}", STRIKE_S)
        known = [len(one) for one in life.starts()]
        life.struck = False
        ranks = life.start()
        results = ranks.wait(timeout_s=patience_s(DEADLINE_S))
        if any(result.returncode for result in results):
            raise FailedError("a start that nobody disturbed failed")
        self._check_starts(life, known, ranks)

    def _check_starts(self, life: Life, known: list[int], ranks: Ranks) -> None:
        """The start's outcome is the same on all ranks that got so far, and allowed."""
        new = [one[n:] for one, n in zip(life.starts(), known, strict=True)]
        told = [one[0] for one in new if one]
        for rank in ranks:
            # One that was just killed cannot answer.
            if "gave no answer" in rank.stderr and not life.struck:
                raise FailedError("a sidecar left a successor without an answer")
        if not told:
            return
        if any(one != told[0] for one in told):
            raise FailedError(f"the ranks went on differently: {told}")
        resumed = told[0]
        if resumed is None:
            if not life.allowed_fresh and not life.struck:
                raise FailedError("started afresh although a state was there")
            self._tally.resumed["fresh"] += 1
            return
        self._tally.resumed[resumed["how"]] += 1
        self._tally.lost.append(resumed["lost"])

    def _compare(self, life: Life) -> None:
        final = _finals(life.folder, life.world_size)
        calm = self._undisturbed(life.kind)
        if final != calm:
            apart = [
                sorted(name for name in ours if ours[name] != theirs.get(name))
                for ours, theirs in zip(final, calm, strict=True)
            ]
            raise FailedError(f"{life.kind}: not the bits of a calm training: {apart}")

    def _undisturbed(self, kind: str) -> list[dict[str, str]]:
        if kind not in self._calm:
            self._watchdog.expect(f"{kind} without kills", STRIKE_S)
            world_size, options = KINDS[kind]
            folder = self._folder / f"calm-{kind}"
            folder.mkdir()
            args = [str(folder), "--kind", kind, *options, "--resume", "never"]
            run_ranks(
                WORKER,
                world_size,
                args=[*args, "--steps", str(STEPS)],
                timeout_s=patience_s(DEADLINE_S),
            )
            self._calm[kind] = _finals(folder, world_size)
        return list(self._calm[kind])


def wait_for(condition: Callable[[], bool], ranks: Ranks) -> None:
    """Raises FailedError with the ranks' output when it does not come true."""
    deadline_s = time.monotonic() + patience_s(DEADLINE_S)
    while not condition():
        if time.monotonic() > deadline_s:
            raise FailedError("nothing happened in time")
        time.sleep(0.005)


def _finals(folder: Path, world_size: int) -> list[dict[str, str]]:
    return [json.loads((folder / f"final-{rank}").read_text()) for rank in range(world_size)]


def _ended(ranks: Ranks, *, all_of_them: bool = False) -> bool:
    codes = [rank.process.poll() is not None for rank in ranks]
    return all(codes) if all_of_them else any(codes)


def _state(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str(process.status())
    return ""


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.kill()


def _last(starts: list[list[dict[str, Any] | None]]) -> str:
    return str([one[-1] if one else "none" for one in starts])


def _no_sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_socket()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.resume", description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None, help="repeats the strikes it printed")
    parser.add_argument("--kind", default="", choices=["", *KINDS], help="this kind alone")
    parser.add_argument("--verbose", action="store_true", help="a line for each kill")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else secrets.randbelow(1 << 31)
    print(f"seed {seed}", flush=True)
    leaks.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    warm_start()
    tally, begin_s, failure = Tally(), time.monotonic(), ""
    again = f"make soak-resume KILLS={given.kills} SEED={seed}"
    folder = Path(tempfile.mkdtemp(prefix="paramd-resume-"))
    try:
        with Watchdog(again) as watchdog:
            Campaign(seed, folder, tally, watchdog, only=given.kind, say=given.verbose).run(
                given.kills
            )
    except FailedError as error:
        failure = str(error)
    finally:
        end_warm_start()
        shutil.rmtree(folder, ignore_errors=True)
    told = ", ".join(f"{what} {count}" for what, count in sorted(tally.kills.items()))
    lost = sum(tally.lost)
    print(
        f"kills       {sum(tally.kills.values())}: {told}\n"
        f"started     {tally.resumed['live']} live, {tally.resumed['snapshot']} from a standing "
        f"snapshot, {tally.resumed['fresh']} afresh\n"
        f"steps lost  {lost} in {sum(n > 0 for n in tally.lost)} starts, at most "
        f"{max(tally.lost, default=0)} in one\n"
        f"took        {time.monotonic() - begin_s:.0f} s, {tally.lives} jobs"
    )
    if failure:
        print(f"FAILED: {failure}\nrepeat it with: {again}")
        return 1
    print("bits        all right: each job ended as one that nobody killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
