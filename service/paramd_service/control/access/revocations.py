"""Announce ended tokens to sidecars and to open streams here.

A token ends when it is revoked, here or at another control plane of the same store, or when it
expires. Revocations here are announced at once; the store is polled every second for the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final

from paramd.clock import now_s
from paramd.errors import UnreachableError
from paramd.security.tickets import CLOCK_SKEW_S, Claims
from paramd_service.admission import MAX_REVOKED, Notice, RevokedTokens
from paramd_service.aio import stopped
from paramd_service.control.access.authority import KEPT_S, token_id
from paramd_service.control.store.tokens import TokenRow, TokenStore

LOOK_S: Final = 1.0

Write = Callable[[Notice], Awaitable[None]]

log = logging.getLogger("paramd.control")


class Revocations:
    """Ended tokens and their listeners. Single event loop."""

    def __init__(self, *, ticket_ttl_s: float, clock: Callable[[], float] = now_s) -> None:
        """No I/O. `ticket_ttl_s` is the longest validity of a user's ticket, in seconds."""
        # Twice the skew: a sidecar's clock may lag that much, and its expiry check adds as much.
        self._keep_s = ticket_ttl_s + 2 * CLOCK_SKEW_S + KEPT_S
        self._clock = clock
        self._tokens = RevokedTokens(wall_clock=clock)
        self._store: TokenStore | None = None
        self._lasting: dict[str, tuple[bool, float]] = {}
        self._listeners: set[_Listener] = set()
        self._followers: dict[str, set[asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self, store: TokenStore) -> None:
        """Load the tokens that have already ended, then keep polling the store."""
        self._store = store
        await self._look(store)
        self._task = asyncio.create_task(self._watch(store), name="paramd-revocations")

    async def stop(self) -> None:
        """Stop polling. Idempotent."""
        await stopped(self._task)
        self._task = None

    def check(self, claims: Claims) -> None:
        """Raise TokenRevokedError if the ticket's token has ended."""
        self._tokens.check(claims)

    async def has_ended(self, token_id: str | None) -> bool:
        """Whether a token has been revoked or has expired, however long ago; known for `LOOK_S`.

        Raises:
            UnreachableError: If the store cannot be reached now.
        """
        if token_id is None or self._store is None:
            return False
        if token_id in self._tokens:
            return True
        ended, until_s = self._lasting.get(token_id, (False, 0.0))
        if (now_s := self._clock()) >= until_s:
            row = await self._store.of_id(token_id)
            ended = row is None or row.ended_s <= now_s
            if len(self._lasting) >= MAX_REVOKED:
                self._lasting.clear()
            self._lasting[token_id] = ended, now_s + LOOK_S
        return ended

    def revoked(self, row: TokenRow) -> None:
        """Announce a token that was revoked here, at once."""
        self._learn([row])

    @contextlib.asynccontextmanager
    async def telling(self, write: Write) -> AsyncIterator[None]:
        """Send everything known to a sidecar's stream on entry, and updates within the block, one
        `write` at a time. An error of the first is raised; a later error stops the updates, since
        the stream has then ended."""
        listener = _Listener(self._tokens, write)
        self._listeners.add(listener)
        try:
            await listener.tell()
            yield
        finally:
            self._listeners.discard(listener)
            await listener.close()

    @contextlib.contextmanager
    def following(self, token_id: str | None) -> Iterator[asyncio.Future[None]]:
        """A future that is done once the token has ended."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if token_id is None:
            yield ended
            return
        mine = self._followers.setdefault(token_id, set())
        mine.add(ended)
        if token_id in self._tokens:
            ended.set_result(None)
        try:
            yield ended
        finally:
            mine.discard(ended)
            if not mine:
                self._followers.pop(token_id, None)

    async def _watch(self, store: TokenStore) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look(store)

    async def _look(self, store: TokenStore) -> None:
        now_s = self._clock()
        # Tokens that ended before the last blanket refusal of tickets need no id.
        since_s = max(now_s - self._keep_s, self._tokens.refused_before_s - KEPT_S)
        try:
            self._learn(await store.ended(since_s=since_s, now_s=now_s, limit=MAX_REVOKED + 1))
        except UnreachableError as error:
            log.debug("revoked tokens cannot be read now: %s", error)

    def _learn(self, rows: Sequence[TokenRow]) -> None:
        now_s = self._clock()
        keep_s = {token_id(row): self._keep_s - (now_s - row.ended_s) for row in rows}
        if not self._tokens.learn({key: left_s for key, left_s in keep_s.items() if left_s > 0}):
            return
        for listener in self._listeners:
            listener.has_news()
        for ended in [f for key in keep_s for f in self._followers.get(key, ())]:
            if not ended.done():
                ended.set_result(None)


class _Listener:
    """One stream and the last serial sent to it, one message at a time."""

    def __init__(self, tokens: RevokedTokens, write: Write) -> None:
        self._tokens = tokens
        self._write = write
        self._heard = 0
        self._busy = True
        self._task: asyncio.Task[None] | None = None

    async def tell(self) -> None:
        """Write until the stream is up to date."""
        while True:
            notice = self._tokens.since(self._heard)
            # Before the write: tokens that arrive during it have a higher serial and are sent next.
            self._heard = notice.serial
            await self._write(notice)
            if self._heard == self._tokens.serial:
                self._busy = False
                return

    def has_news(self) -> None:
        """Start writing, unless a write is in progress: its loop sends the news, too."""
        if not self._busy:
            self._busy = True
            self._task = asyncio.create_task(self._tell_news())

    async def close(self) -> None:
        await stopped(self._task)

    async def _tell_news(self) -> None:
        try:
            await self.tell()
        except Exception as error:  # any gRPC error: the stream's reader ends it
            log.debug("revoked tokens could not be sent to a sidecar: %r", error)
