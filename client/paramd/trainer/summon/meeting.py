"""A barrier with a timeout that names the missing ranks: all proceed or none does.

It works over the process group's store, not collectives: a collective that one rank never joins
hangs until the group's own timeout, and with NCCL kills the process.

Calls are numbered. The first verdict written decides a meeting for all: the last rank to arrive
writes "go" (or why not), a rank that times out writes "failed". A rank that arrives at a call
which failed without it moves on to the next number, so ranks meet again after a failure.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import distributed_c10d

from paramd.errors import AbortedError, ConflictError, DeadlineError, ParamdError

FIRST_POLL_S = 0.0002
LONGEST_POLL_S = 0.02
LEAVE_TIMEOUT_S = 1800.0
"""Longest wait for ranks still in their block."""

_next_numbers: dict[str, int] = {}
"""Next call number of each series. Outlives process groups, since their store may too."""

_stale_keys: dict[str, list[str]] = {}
"""Keys of finished meetings, by series, that this rank will delete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """What a rank says on arrival."""

    question: str
    """Must be the same on all ranks."""
    refusal: str = ""
    """Why this rank cannot proceed; then no rank does."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    state: str
    text: str = ""


class Rendezvous:
    """The meetings of some ranks. A single rank has no one to wait for.

    Args:
        name: the call's name in messages.
        ranks: global ranks, ascending, this one included.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self._name = name
        self._ranks = ranks
        self._alone = len(ranks) == 1
        self._me = ranks[0] if self._alone else dist.get_rank()
        self._store = None if self._alone else distributed_c10d._get_default_store()
        everybody = self._alone or len(ranks) == dist.get_world_size()
        self._series = "all" if everybody else "-".join(map(str, ranks))

    def enter(self, word: Proposal, *, timeout_s: float) -> int:
        """Wait until all ranks have arrived. Return the number of the call.

        All or none: returns on all ranks, or raises on every rank that arrived.

        Raises:
            DeadlineError: ranks missing after `timeout_s`; the message names them.
            ConflictError: a rank refused, or ranks asked different questions.
        """
        if self._store is None:
            if word.refusal:
                raise ConflictError(word.refusal)
            return 0
        while True:
            number = _next_numbers.get(self._series, 0)
            _next_numbers[self._series] = number + 1
            # One that was decided without us has failed: meet the others at the next.
            if not self._has(number, "enter", "verdict"):
                break
        message = json.dumps([word.question, word.refusal])
        verdict = self._meet(number, "enter", message, timeout_s)
        if verdict.state == "failed":
            raise DeadlineError(f"{self._name}: {verdict.text}")
        if verdict.state == "refused":
            raise ConflictError(f"{self._name}: {verdict.text}")
        return number

    def leave(self, number: int, problem: str, *, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Wait until all ranks have reached the end of their block, unless one has a problem.

        Args:
            problem: why no rank should proceed; empty if this one can. With a problem, returns
                at once.

        Raises:
            AbortedError: another rank had a problem.
            DeadlineError: ranks missing after `timeout_s`.
        """
        if self._store is None:
            return
        if problem:
            self._decide(number, "leave", _Verdict("refused", f"rank {self._me} {problem}"))
            return
        verdict = self._meet(number, "leave", json.dumps(["", ""]), timeout_s)
        if verdict.state != "go":
            kind: type[ParamdError] = DeadlineError if verdict.state == "failed" else AbortedError
            raise kind(f"{self._name}: {verdict.text}; no rank keeps its edits")

    def _meet(self, number: int, part: str, message: str, timeout_s: float) -> _Verdict:
        assert self._store is not None
        deadline = time.monotonic() + timeout_s
        # The message before the count: the last rank counted judges all messages.
        self._store.set(self._key(number, part, str(self._me)), message)
        if self._store.add(self._key(number, part, "came"), 1) == len(self._ranks):
            self._decide(number, part, self._judged(number, part))
        pause_s = FIRST_POLL_S
        while not self._has(number, part, "verdict"):
            if time.monotonic() > deadline:
                # May lose to a verdict written meanwhile; the one read below counts.
                self._decide(number, part, self._missing(number, part, timeout_s))
                break
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_POLL_S)
        state, text = json.loads(self._store.get(self._key(number, part, "verdict")))
        if state == "go":
            self._tidy(number, part)
        return _Verdict(state, text)

    def _judged(self, number: int, part: str) -> _Verdict:
        assert self._store is not None
        store = self._store
        words = {r: json.loads(store.get(self._key(number, part, str(r)))) for r in self._ranks}
        refusals = [f"rank {rank}: {refusal}" for rank, (_, refusal) in words.items() if refusal]
        if refusals:
            return _Verdict("refused", "; ".join(refusals[:3]))
        first = self._ranks[0]
        for rank, (question, _) in words.items():
            if question != words[first][0]:
                return _Verdict(
                    "refused",
                    f"rank {first} asks for {words[first][0]}, but rank {rank} for {question}; "
                    "call it alike on every rank",
                )
        return _Verdict("go")

    def _missing(self, number: int, part: str, timeout_s: float) -> _Verdict:
        missing = [rank for rank in self._ranks if not self._has(number, part, str(rank))]
        return _Verdict(
            "failed",
            f"ranks {missing} of {len(self._ranks)} did not come in {timeout_s:g} s; every rank "
            "must call it at the same place",
        )

    def _decide(self, number: int, part: str, verdict: _Verdict) -> None:
        assert self._store is not None
        message = json.dumps([verdict.state, verdict.text])
        # Only sets a missing key: the first verdict stands.
        self._store.compare_set(self._key(number, part, "verdict"), "", message)

    def _has(self, number: int, part: str, name: str) -> bool:
        assert self._store is not None
        return bool(self._store.check([self._key(number, part, name)]))

    def _tidy(self, number: int, part: str) -> None:
        """Delete keys of earlier meetings: all ranks here have read those verdicts."""
        assert self._store is not None
        stale = _stale_keys.setdefault(self._series, [])
        if part == "enter":
            for key in stale:
                self._store.delete_key(key)
            stale.clear()
        names = [str(self._me)]
        if self._me == self._ranks[0]:
            names += ["came", "verdict"]
        stale += [self._key(number, part, name) for name in names]

    def _key(self, number: int, part: str, name: str) -> str:
        return f"paramd/summon/{self._series}/{number}/{part}/{name}"
