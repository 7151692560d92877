"""Live events: a bounded ring followed by many readers.

Readers share the ring and hold only their position in it, so a slow one costs nothing: once the
ring overtakes it, it gets the number of events that it missed.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from paramd.errors import UsageError
from paramd_service.admission import CALLER, Shares

RING_COUNT = 4096
"""Events kept for readers that reconnect."""
MAX_VIEWERS = 64
"""Most concurrent readers; one more is refused."""
MAX_DATA_CHARS = 16 << 10
"""Longest JSON data of an event; anything longer is replaced by a note."""
RETRY_MS = 2000
"""Delay after which a browser reconnects a broken stream."""

_ID = re.compile(r"([0-9a-f]{8})-([0-9]{1,15})\Z")


class Kind(StrEnum):
    """Subject of an event."""

    HELLO = "hello"
    """First in a stream: nothing is missed from here on."""
    GAP = "gap"
    """Events are missing here: `missed` of them, or -1 when unknown."""
    RANK = "rank"
    """A rank's membership, phase or reason changed."""
    STEP = "step"
    """Training advanced; at most once a second per job."""
    INCARNATION = "incarnation"
    """An incarnation of a job began or ended."""
    ALERT = "alert"
    """An alert was raised, changed or cleared."""
    EDIT = "edit"
    """An edit changed state."""
    PAUSE = "pause"
    """Training was paused, stepped or resumed."""
    MARK = "mark"
    """A state was kept under a name, or dropped."""
    SNAPSHOT = "snapshot"
    """A snapshot was pinned or released through the control plane."""
    EXPORT = "export"
    """An export began, progressed (at most once a second) or ended."""


@dataclass(frozen=True)
class Event:
    number: int
    """Rises by one with each event of this control plane, starting at 1."""
    id: str
    """Id that a reader passes back to resume after it."""
    kind: str
    job: str
    """Job it concerns; empty for none."""
    text: str
    """The data as one line of JSON, encoded once for all readers."""

    @cached_property
    def frame(self) -> bytes:
        """The SSE frame, encoded once for all readers; for `QUIET` a comment."""
        if not self.kind:
            return KEEPALIVE_COMMENT
        return format_sse_event(data_str=self.text, event=self.kind, id=self.id, retry=RETRY_MS)


QUIET = Event(0, "", "", "", "")
"""Keep-alive for a reader's connection after a time without events."""


class EventBus:
    """Distributes events to readers. Event loop only; publishing never blocks."""

    def __init__(
        self, *, ring_count: int = RING_COUNT, clock: Callable[[], float] = time.time
    ) -> None:
        self._ring: deque[Event] = deque(maxlen=ring_count)
        self._last = 0
        self._clock = clock
        # Numbers restart with each process; the name marks another process' ids.
        self._name = secrets.token_hex(4)
        self._news = asyncio.Event()
        self._viewers = Shares(MAX_VIEWERS, "viewers that follow the events")
        self._closed = False

    def publish(self, kind: str, data: Mapping[str, Any], *, job: str = "") -> Event:
        """Publish an event to all readers of `job` (empty: of any). Never blocks on readers, never
        fails because of them. `kind`: one of `Kind`. `data`: JSON-serializable; `time_s` (Unix
        time) and `job` are added."""
        whole = {"time_s": round(self._clock(), 3), "job": job, **data}
        text = json.dumps(whole, allow_nan=False, separators=(",", ":"))
        if len(text) > MAX_DATA_CHARS:
            whole = {"time_s": whole["time_s"], "job": job, "cut_chars": len(text)}
            text = json.dumps(whole)
        self._last += 1
        event = Event(self._last, self._id(self._last), str(kind), job, text)
        self._ring.append(event)
        # Wake waiting readers and swap in a fresh event: no reader has to clear a shared one.
        self._news.set()
        self._news = asyncio.Event()
        return event

    @asynccontextmanager
    async def follow(
        self, *, job: str, after: str | None = None, quiet_s: float = math.inf
    ) -> AsyncGenerator[AsyncGenerator[Event, None], None]:
        """Events of `job` (and of no job), from now on or after the event with id `after`.

        The first event is HELLO, or GAP when requested ones are gone. A reader overtaken by the
        ring also gets a GAP, and QUIET whenever nothing has happened for `quiet_s` seconds. Ends
        when the bus is closed.

        Raises:
            ExhaustedError: Too many readers.
            UsageError: `after` is not an event id.
        """
        begin, missed = self._place(after)
        with self._viewers.one(CALLER.get()):
            async with aclosing(self._events(job, begin, missed, quiet_s)) as events:
                yield events

    def close(self) -> None:
        """End all readers' streams."""
        self._closed = True
        self._news.set()

    async def _events(
        self, job: str, place: int, missed: int, quiet_s: float
    ) -> AsyncGenerator[Event, None]:
        """`place` is the number of the last event the reader has."""
        yield self._note(place, job, missed)
        while not self._closed:
            if place == self._last:
                if not await self._has_news(quiet_s):
                    yield QUIET
                continue
            # A returning reader replays thousands: yield to others.
            await asyncio.sleep(0)
            first = self._ring[0].number
            if place + 1 < first:
                missed, place = first - 1 - place, first - 1
                yield self._note(place, job, missed)
                continue
            event = self._ring[place + 1 - first]
            place = event.number
            if event.job in ("", job):
                yield event

    async def _has_news(self, quiet_s: float) -> bool:
        try:
            async with asyncio.timeout(quiet_s if quiet_s < math.inf else None):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    def _place(self, after: str | None) -> tuple[int, int]:
        """Where a reader starts, and how many events it missed (-1: unknown)."""
        if not after:
            return self._last, 0
        found = _ID.match(after)
        if found is None:
            raise UsageError(
                "Last-Event-ID: not an event id of this server; omit it to start from now"
            )
        number = int(found[2])
        if found[1] != self._name or number > self._last:
            return self._last, -1
        kept_from = self._ring[0].number if self._ring else self._last + 1
        return max(number, kept_from - 1), max(kept_from - 1 - number, 0)

    def _note(self, place: int, job: str, missed: int) -> Event:
        data: dict[str, Any] = {"time_s": round(self._clock(), 3), "job": job}
        if missed:
            data["missed"] = missed
        kind = Kind.GAP if missed else Kind.HELLO
        return Event(place, self._id(place), kind, job, json.dumps(data, separators=(",", ":")))

    def _id(self, number: int) -> str:
        return f"{self._name}-{number}"
