"""Cancel calls that run with a revoked token's tickets, and refuse later ones.

The control plane announces revocations on the sidecar's stream to it, all of them in its first
message. While disconnected, the sidecar keeps each one until every ticket of that token has
expired. A new process that the control plane has told nothing yet takes no user's ticket. It has
no audit log of its own; its reports include its refusals.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from paramd.security.tickets import Claims
from paramd.v1 import control_pb2
from paramd_service.admission import MAX_ID_CHARS, MAX_REVOKED, RevokedTokens

MAX_CHARS = 256


class Refusals:
    """Refused calls. Event loop thread only."""

    def __init__(self) -> None:
        self.count = 0
        """Since process start."""
        self.last = ""
        """Method and reason of the latest; empty before the first."""

    def saw(self, method: str, reason: str) -> None:
        """Record a refused call. Never fails, whatever the caller sent."""
        self.count += 1
        # The reason may quote the caller: keep it ASCII.
        told = f"{method[:MAX_CHARS]}: {reason}"[:MAX_CHARS]
        self.last = told.encode("ascii", "replace").decode()


class Revocations(RevokedTokens):
    """Revoked tokens and the calls that run with tickets. Event loop only."""

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[asyncio.Timeout, Claims] = {}
        self.heard = False
        """Whether the control plane has told this process which tokens are revoked."""
        self.on_news: list[Callable[[], object]] = []
        """Called when tickets that were valid are now refused."""

    def update(self, told: control_pb2.Revocations) -> int:
        """Apply revocations from the control plane; return how many running calls were ended."""
        self.heard = True
        named = [key for key in told.token_ids[:MAX_REVOKED] if len(key) <= MAX_ID_CHARS]
        is_news = self.learn(
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

    @asynccontextmanager
    async def running(self, claims: Claims) -> AsyncIterator[None]:
        """Wrap a call: cancel it once its token is revoked, and raise TokenRevokedError."""
        if claims.token_id is None:
            yield
            return
        # A cancel scope: `update` makes it expire now, which cancels only this call.
        call = asyncio.timeout(None)
        try:
            async with call:
                self._running[call] = claims
                # The ticket was verified before the request arrived, maybe long ago.
                self.check(claims)
                yield
        except TimeoutError:
            # Raises if the expiry was ours; otherwise the call itself timed out.
            self.check(claims)
            raise
        finally:
            self._running.pop(call, None)
