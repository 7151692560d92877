"""Ends what runs with tickets of tokens that were revoked, and refuses what comes later.

The control plane tells which those are, on the stream that the sidecar holds to it. Without
one the sidecar keeps what it has heard, each until no ticket of that token can be valid.
A sidecar keeps no audit of its own; its reports carry what it refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from paramd.security.tickets import Claims
from paramd.v1 import control_pb2
from paramd_service.revoked import MAX_ID_CHARS, MAX_REVOKED, RevokedTokens

MAX_CHARS = 256


class Refusals:
    """Counts on the event loop's thread."""

    def __init__(self) -> None:
        self.count = 0
        """Since the process began."""
        self.last = ""
        """Method and reason of the last one; empty before the first."""

    def saw(self, method: str, reason: str) -> None:
        """One call was refused. Never fails, whatever the caller wrote."""
        self.count += 1
        # What a caller wrote may stand in the reason: only what any log can show.
        told = f"{method[:MAX_CHARS]}: {reason}"[:MAX_CHARS]
        self.last = told.encode("ascii", "replace").decode()


class Revocations:
    """Use on the event loop."""

    def __init__(self) -> None:
        self._tokens = RevokedTokens()
        self._running: dict[asyncio.Timeout, Claims] = {}
        self.on_news: list[Callable[[], object]] = []
        """Called when tickets are refused that were good before."""

    def heard(self, told: control_pb2.Revocations) -> int:
        """Takes in what the control plane says. How many running calls were ended for it."""
        named = [key for key in told.token_ids[:MAX_REVOKED] if len(key) <= MAX_ID_CHARS]
        is_news = self._tokens.learn(
            dict.fromkeys(named, max(told.keep_ms, 0) / 1000),
            refused_before_s=told.refused_before_ns / 1e9,
        )
        if not is_news:
            return 0
        for tell in self.on_news:
            tell()
        doomed = [call for call, claims in self._running.items() if self.refuses(claims)]
        for call in doomed:
            del self._running[call]
            call.reschedule(asyncio.get_running_loop().time())
        return len(doomed)

    def refuses(self, claims: Claims) -> bool:
        """Whether the ticket's token is good no more."""
        return self._tokens.refuses(claims)

    def check(self, claims: Claims) -> None:
        """Raises TokenRevokedError when `refuses` says so."""
        self._tokens.check(claims)

    @asynccontextmanager
    async def running(self, claims: Claims) -> AsyncIterator[None]:
        """Around what a call does: cancels it once its token is good no more.

        Raises:
            TokenRevokedError: it was cancelled for that.
        """
        if claims.token_id is None:
            yield
            return
        call = asyncio.timeout(None)
        try:
            async with call:
                self._running[call] = claims
                # The ticket was looked at before the request came, which may be long ago.
                self.check(claims)
                yield
        except TimeoutError:
            self.check(claims)
            raise
        finally:
            self._running.pop(call, None)
