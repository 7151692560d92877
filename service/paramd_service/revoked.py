"""A bounded revocation list: tokens whose unexpired tickets are no longer good.

Tickets are verified offline, so verifiers must be told what was revoked. An id is kept only as
long as tickets of its token can be valid. When the list overflows, every ticket given for a
token before that moment is refused: holders of good tokens get new ones, and nothing that was
revoked comes back.
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
    """The ticket is genuine and has not expired, but its token is no longer good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """What a listener has not heard yet."""

    token_ids: tuple[str, ...]
    keep_s: float
    """How long to keep the ids, from now on; 0 if there are none."""
    refused_before_s: float
    """Tickets given for a token before this are refused; seconds since the Unix epoch, or 0."""
    serial: int
    """The serial that the listener has reached with it."""


class RevokedTokens:
    """The revocation list. Use on one thread."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = now_s,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        # (expiry on the monotonic clock, serial), in the order of arrival.
        self._kept: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._refused_before_s = 0.0
        self.serial = 0
        """Rises with everything new."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, token_id: str) -> bool:
        known = self._kept.get(token_id)
        return known is not None and self._clock() < known[0]

    @property
    def refused_before_s(self) -> float:
        """Tickets given for a token before this time are refused; 0 if there is none."""
        return self._refused_before_s

    def learn(self, keep_s: Mapping[str, float], *, refused_before_s: float = 0.0) -> bool:
        """Refuse tickets of these tokens for that many seconds each; return whether any was new."""
        now_s, before = self._clock(), self.serial
        for token_id in [key for key, (until_s, _) in self._kept.items() if until_s <= now_s]:
            del self._kept[token_id]
        for token_id, for_s in keep_s.items():
            known = self._kept.get(token_id)
            self.serial += 1 if known is None else 0
            until_s, heard = known if known is not None else (now_s, self.serial)
            self._kept[token_id] = (max(until_s, now_s + for_s), heard)
        while len(self._kept) > MAX_REVOKED:
            # Forgetting an id would readmit its tickets: refuse all that were given until now.
            self._kept.popitem(last=False)
            refused_before_s = max(refused_before_s, self._wall_clock())
        if refused_before_s > self._refused_before_s:
            self._refused_before_s = refused_before_s
            self.serial += 1
        return self.serial > before

    def since(self, serial: int) -> Notice:
        """What was learnt after `serial`; with 0, everything that is still kept."""
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
        """Whether the ticket's token is no longer good."""
        if claims.token_id is None:
            return False
        return claims.token_id in self or claims.issued_s < self._refused_before_s

    def check(self, claims: Claims) -> None:
        """Raise TokenRevokedError if `refuses` says so."""
        if self.refuses(claims):
            raise TokenRevokedError(
                "the token that this ticket was given for has been revoked or has expired; ask "
                "an admin for another one (paramd token create), then connect again"
            )
