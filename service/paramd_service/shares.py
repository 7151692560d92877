"""A shared cap: a part of it is reserved, and no token can take all of the rest.

A quarter of every cap is reserved for the control plane and the owner. One token gets at most
half of the rest, so that its holder can exhaust its own share and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

from paramd.errors import ExhaustedError

Who: TypeAlias = str | None
"""A token; None: the control plane or the owner."""

CALLER: ContextVar[Who] = ContextVar("paramd_caller_token", default=None)
"""On whose behalf this task runs, and the tasks that it started."""


class Shares:
    """Counts how much of a cap is taken, and by whom. Use on one thread."""

    def __init__(self, capacity: int, what: str) -> None:
        """`what` is counted, as errors name it: "calls", for example."""
        self.capacity = capacity
        self._what = what
        self._for_tokens = capacity - capacity // 4
        self.share = max(self._for_tokens - self._for_tokens // 2, 1)
        """Most that one token may take."""
        self._taken: Counter[Who] = Counter()

    @property
    def taken(self) -> int:
        """Taken by all together."""
        return self._taken.total()

    def taken_by(self, who: Who) -> int:
        """Taken by `who`."""
        return self._taken[who]

    def check(self, who: Who, amount: int = 1) -> None:
        """Raise ExhaustedError if `amount` more is not available, saying whose limit was hit."""
        taken = self.taken
        if taken + amount > self.capacity:
            raise ExhaustedError(
                f"{taken:,} of {self.capacity:,} {self._what} are taken, and {amount:,} more are "
                "wanted; try again when others have ended"
            )
        if who is None:
            return
        if self._taken[who] + amount > self.share:
            raise ExhaustedError(
                f"your token has {self._taken[who]:,} {self._what}, its share of "
                f"{self.capacity:,} is {self.share:,}, and {amount:,} more are wanted; end some "
                "of them first"
            )
        if taken - self._taken[None] + amount > self._for_tokens:
            raise ExhaustedError(
                f"tokens have {taken - self._taken[None]:,} {self._what}, and the rest of "
                f"{self.capacity:,} is kept for the control plane and the owner; try again in a "
                "moment"
            )

    def count(self, who: Who, amount: int = 1) -> None:
        """Count what is already taken, regardless of the cap."""
        self._taken[who] += amount

    def take(self, who: Who, amount: int = 1) -> None:
        """Take `amount` until `give_back`. Raises as `check`."""
        self.check(who, amount)
        self._taken[who] += amount

    def give_back(self, who: Who, amount: int = 1) -> None:
        """Give back what was taken."""
        self._taken[who] -= amount
        assert self._taken[who] >= 0
        if not self._taken[who]:
            del self._taken[who]

    @contextmanager
    def one(self, who: Who) -> Iterator[None]:
        """Take one for the duration of a block. Raises as `check`."""
        self.take(who)
        try:
            yield
        finally:
            self.give_back(who)
