"""A cap that several share: a part of it is kept back, and nobody takes all of the rest.

A quarter of every cap is for the control plane and the owner alone. Of the rest one token
takes at most half, so that whoever holds one can exhaust its own part and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

from paramd.errors import ExhaustedError

Who: TypeAlias = str | None
"""Names a token; None is the control plane, or the owner."""

CALLER: ContextVar[Who] = ContextVar("paramd_caller_token", default=None)
"""Who asked for what runs in this task, and in those that it began."""


class Shares:
    """Counts what of one cap is taken, by whom. Use on one thread."""

    def __init__(self, capacity: int, what: str) -> None:
        """`what` names in errors what there are `capacity` of, for example "calls"."""
        self.capacity = capacity
        self._what = what
        self._for_tokens = capacity - capacity // 4
        self.share = max(self._for_tokens - self._for_tokens // 2, 1)
        """Most that one token takes."""
        self._taken: Counter[Who] = Counter()

    @property
    def taken(self) -> int:
        """What all have together."""
        return self._taken.total()

    def taken_by(self, who: Who) -> int:
        """What one has."""
        return self._taken[who]

    def check(self, who: Who, amount: int = 1) -> None:
        """Raises ExhaustedError when `amount` more is not to be had, saying whose fault it is."""
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
        """Takes what is taken already, whatever the cap."""
        self._taken[who] += amount

    def take(self, who: Who, amount: int = 1) -> None:
        """Takes, until `give_back`. Raises as `check`."""
        self.check(who, amount)
        self._taken[who] += amount

    def give_back(self, who: Who, amount: int = 1) -> None:
        """What was taken is free again."""
        self._taken[who] -= amount
        assert self._taken[who] >= 0
        if not self._taken[who]:
            del self._taken[who]

    @contextmanager
    def one(self, who: Who) -> Iterator[None]:
        """Around the use of one of them. Raises as `check`."""
        self.take(who)
        try:
            yield
        finally:
            self.give_back(who)
