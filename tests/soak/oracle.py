"""Judges every answer: of one step, not older than it may be, all edits in it or none lost.

What edited parameters may hold is kept as intervals: a value may be seen from when its edit
was asked for until another one was known to be there instead. An edit that ended unknown is
looked up (`actors.Editor`); until then both values may be seen, never a mix of them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tests.soak.stage import Job, Start
from tests.soak.trainer import role_of, stamp

GROUPS = ("blocks.1.up.", "blocks.1.down.", "blocks.1.wide.", "blocks.1.narrow.", "blocks.1.norm.")
"""What is edited together, and so always holds one value."""


REMEMBERED_S = 300.0
"""No question is older than that when it is answered."""


class WrongError(AssertionError):
    """An answer that paramd must never give."""


def group_of(name: str) -> str:
    """The group of an edited parameter."""
    return next(group for group in GROUPS if group in name)


@dataclass(eq=False)
class Sight:
    """A value of a group, and when and in which incarnation it may be seen."""

    value: float
    since_s: float
    salt: int | None = None
    """The incarnation; None while an edit's may still become any."""
    until_s: float = float("inf")


class Ledger:
    """What the groups of a job may hold, and when."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sights: dict[str, list[Sight]] = {group: [] for group in GROUPS}
        self._begun: set[tuple[str, int]] = set()

    def begin(self, group: str, value: float) -> Sight:
        """An edit to this value is about to be asked for."""
        sight = Sight(value, time.monotonic())
        with self._lock:
            self._sights[group].append(sight)
        return sight

    def applied(self, group: str, sight: Sight, salt: int) -> None:
        """It is known that this edit was applied in that incarnation, and nothing after it."""
        now_s = time.monotonic()
        with self._lock:
            self._know(group, salt)
            sight.salt = salt
            for other in self._sights[group]:
                if other.salt == salt and other is not sight:
                    other.until_s = min(other.until_s, now_s)

    def refused(self, sight: Sight) -> None:
        """It is known that this edit was applied nowhere."""
        with self._lock:
            sight.until_s = time.monotonic()

    def allowed(self, group: str, salt: int, begin_s: float, end_s: float) -> set[float]:
        """What may be seen by who asked and was answered at these times."""
        with self._lock:
            self._know(group, salt)
            self._sights[group] = [
                s for s in self._sights[group] if s.until_s > begin_s - REMEMBERED_S
            ]
            return {
                s.value
                for s in self._sights[group]
                if s.salt in (None, salt) and s.since_s <= end_s and s.until_s >= begin_s
            }

    def _know(self, group: str, salt: int) -> None:
        """Every incarnation begins with zeros."""
        if (group, salt) not in self._begun:
            self._begun.add((group, salt))
            self._sights[group].append(Sight(0.0, 0.0, salt))


@dataclass
class Tally:
    """What a campaign counts."""

    answers: Counter[str] = field(default_factory=Counter)
    """Right answers by lane."""
    refused: Counter[str] = field(default_factory=Counter)
    edits: Counter[str] = field(default_factory=Counter)
    planned: Counter[str] = field(default_factory=Counter)
    """Faults by kind."""
    struck: Counter[str] = field(default_factory=Counter)
    """Those that happened: the point was reached, the limit was set."""
    not_possible: Counter[str] = field(default_factory=Counter)
    digests: int = 0
    updates: int = 0
    longest_recovery_s: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def count(self, counter: Counter[str], key: str) -> None:
        with self._lock:
            counter[key] += 1


@dataclass(frozen=True)
class Question:
    """What was true of a job when somebody began to ask it."""

    begin_s: float
    start: Start
    finished: int


class Oracle:
    """Judges the answers of one job; raises WrongError."""

    def __init__(self, job: Job, tally: Tally) -> None:
        self.job = job
        self.tally = tally
        self.locks = {group: threading.RLock() for group in GROUPS}
        """Who edits a group has it; who restores has all."""
        self.ledger = Ledger()

    def ask(self) -> Question:
        """To be called before the question."""
        now = self.job.now
        return Question(time.monotonic(), now, now.finished())

    def judge(
        self, lane: str, question: Question, incarnation: int, step: int,
        values: Mapping[str, torch.Tensor], *, fresh: bool = True,
    ) -> None:  # fmt: skip
        """Tensors of one answer. `fresh`: it was asked for now, not sent some time."""
        start = self.job.start_of(incarnation)
        where = f"{lane}: incarnation {incarnation}, step {step}"
        self._check_age(where, question, start, step, fresh)
        groups: dict[str, set[float]] = {}
        expected = torch.tensor(stamp(step, start.salt))
        for name, tensor in values.items():
            role = role_of(name)
            if role == "stamped" and not bool((tensor.cpu() == expected).all()):
                seen = tensor.unique().tolist()[:4]
                raise WrongError(f"{where}: {name} holds {seen}, not {expected.item()}: mixed")
            if role == "edited":
                groups.setdefault(group_of(name), set()).update(tensor.flatten().tolist())
        self._check_groups(where, question, start, groups, fresh)
        self.tally.count(self.tally.answers, lane)

    def judge_ranges(
        self, lane: str, question: Question, incarnation: int, step: int,
        ranges: Mapping[str, tuple[float, float]],
    ) -> None:  # fmt: skip
        """Smallest and largest element of each tensor of one answer."""
        self.judge(
            lane, question, incarnation, step, {n: torch.tensor(r) for n, r in ranges.items()}
        )

    def _check_age(
        self, where: str, question: Question, start: Start, step: int, fresh: bool
    ) -> None:
        if not fresh or start.ended or question.start is not start:
            return
        if step < question.finished:
            raise WrongError(f"{where}: stale, {question.finished} updates were finished before")

    def _check_groups(
        self, where: str, question: Question, start: Start,
        groups: Mapping[str, set[float]], fresh: bool,
    ) -> None:  # fmt: skip
        end_s = time.monotonic()
        for group, seen in groups.items():
            if len(seen) > 1:
                raise WrongError(f"{where}: {group} holds {sorted(seen)[:4]}: an edit is split")
            allowed = self.ledger.allowed(group, start.salt, question.begin_s, end_s)
            if fresh and seen and not seen <= allowed:
                raise WrongError(
                    f"{where}: {group} holds {seen}, expected one of {sorted(allowed)}: "
                    "an edit is lost, or came twice"
                )


@contextmanager
def held(locks: Mapping[str, threading.RLock]) -> Iterator[None]:
    """All groups for one editor."""
    for lock in locks.values():
        lock.acquire()
    try:
        yield
    finally:
        for lock in reversed(list(locks.values())):
            lock.release()
