"""Tokens whose tickets are good no more, though these have not expired: a bounded list.

Tickets are verified offline, so whoever verifies them must be told what was revoked. An id is
kept only as long as tickets of its token can be valid. Were there ever more ids than are kept,
every ticket that was given for a token before that moment is refused: whose token is good gets
another one, and nothing that was revoked comes back.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from paramd.clock import now_s
from paramd.errors import DeniedError
from paramd.security.tickets import Claims

MAX_REVOKED: Final = 4096
"""Ids kept at once."""

MAX_ID_CHARS: Final = 64


class TokenRevokedError(DeniedError):
    """The ticket is genuine and has not expired, but its token is good no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """What somebody has not heard yet."""

    token_ids: tuple[str, ...]
    keep_s: float
    """From now on; 0 when there are no ids."""
    refused_before_s: float
    """Tickets given for a token earlier are refused; in seconds since the Unix epoch, or 0."""
    serial: int
    """What the listener has heard then."""


class RevokedTokens:
    """Use on one thread."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = now_s,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        # (until when on the monotonic clock, serial), in the order in which they were heard of.
        self._kept: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._refused_before_s = 0.0
        self.serial = 0
        """Rises with everything that is learnt."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, token_id: str) -> bool:
        known = self._kept.get(token_id)
        return known is not None and self._clock() < known[0]

    @property
    def refused_before_s(self) -> float:
        """Tickets given for a token before this time are refused; 0 when there is none."""
        return self._refused_before_s

    def learn(self, keep_s: Mapping[str, float], *, refused_before_s: float = 0.0) -> bool:
        """Refuses tickets of these tokens for so many seconds each. True when any was news."""
        now_s, before = self._clock(), self.serial
        for token_id in [key for key, (until_s, _) in self._kept.items() if until_s <= now_s]:
            del self._kept[token_id]
        for token_id, for_s in keep_s.items():
            known = self._kept.get(token_id)
            self.serial += 1 if known is None else 0
            until_s, heard = known if known is not None else (now_s, self.serial)
            self._kept[token_id] = (max(until_s, now_s + for_s), heard)
        while len(self._kept) > MAX_REVOKED:
            self._kept.popitem(last=False)
            refused_before_s = max(refused_before_s, self._wall_clock())
        if refused_before_s > self._refused_before_s:
            self._refused_before_s = refused_before_s
            self.serial += 1
        return self.serial > before

    def since(self, serial: int) -> Notice:
        """What was learnt after that `serial`; after 0 everything that is still kept."""
        now_s = self._clock()
        news = [
            (token_id, until_s - now_s)
            for token_id, (until_s, heard) in self._kept.items()
            if heard > serial and until_s > now_s
        ]
        return Notice(
            token_ids=tuple(token_id for token_id, _ in news),
            keep_s=max((left_s for _, left_s in news), default=0.0),
            refused_before_s=self._refused_before_s,
            serial=self.serial,
        )

    def refuses(self, claims: Claims) -> bool:
        """Whether a ticket is one of a token that is good no more."""
        if claims.token_id is None:
            return False
        return claims.token_id in self or claims.issued_s < self._refused_before_s

    def check(self, claims: Claims) -> None:
        """Raises TokenRevokedError when `refuses` says so."""
        if self.refuses(claims):
            raise TokenRevokedError(
                "the token that this ticket was given for has been revoked or has expired; ask "
                "an admin for another one (paramd token create), then connect again"
            )
