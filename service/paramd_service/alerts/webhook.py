"""Post alerts to the operator's URLs: each change once to each. For retries, grouping or silences,
use Prometheus' Alertmanager (docs/alerts.md).

URLs come only from the operator's config and are never logged: many are secrets.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from urllib.parse import urlsplit

import httpx2

from paramd import bounds
from paramd.mesh.insight.reports import Alert
from paramd_service.aio import kept, stopped

TIMEOUT_S = bounds.WEBHOOK.within_s
"""Time limit of a post as a whole: a receiver that trickles does not extend it."""

MAX_POSTS = 50
"""Concurrent posts to one receiver; more are counted as failed, and keep no other waiting."""

log = logging.getLogger("paramd.control.alerts")


class Webhooks:
    """Life cycle: any number of `post`, `close`. Single event loop."""

    def __init__(
        self, urls: Sequence[str], *, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        """No I/O. Tests replace the network through `transport`."""
        self._urls = urls
        self._client = httpx2.AsyncClient(
            timeout=TIMEOUT_S,
            limits=httpx2.Limits(max_connections=MAX_POSTS * max(len(urls), 1)),
            # The default one reads all certificate authorities, which nobody needs without URLs.
            transport=transport if urls else httpx2.AsyncBaseTransport(),
            follow_redirects=False,
            # No proxy or credentials from the environment.
            trust_env=False,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: Counter[str] = Counter()
        """Posts to each receiver."""
        self.posted_count = 0
        """Posts accepted by a receiver."""
        self.failed_count = 0
        """Posts that were not."""

    def post(self, alerts: Sequence[Alert]) -> None:
        """Begin to post alerts to every receiver. Never blocks, never fails."""
        for alert in alerts:
            for url in self._urls:
                if self._under_way[url] >= MAX_POSTS:
                    self._failed(url, alert, f"{MAX_POSTS} posts are under way")
                    continue
                self._under_way[url] += 1
                task = kept(self._tasks, self._post(url, alert), "paramd-webhook")
                # Also of one that is cancelled before it has begun.
                task.add_done_callback(partial(self._ended, url))

    def _ended(self, url: str, _: asyncio.Task[None]) -> None:
        self._under_way[url] -= 1

    async def close(self) -> None:
        """Stop. Posts in progress have `TIMEOUT_S` to arrive. Idempotent."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=TIMEOUT_S)
        await stopped(*self._tasks)
        await self._client.aclose()

    async def _post(self, url: str, alert: Alert) -> None:
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                # Of an answer only its head is read: its body could be of any size.
                self._client.stream("POST", url, json=asdict(alert)) as answer,
            ):
                status = answer.status_code
        except (httpx2.HTTPError, TimeoutError, asyncio.CancelledError) as error:
            # The error text may contain the URL.
            self._failed(url, alert, type(error).__name__)
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        if status < 300:
            self.posted_count += 1
        else:
            self._failed(url, alert, f"HTTP {status}")

    def _failed(self, url: str, alert: Alert, why: str) -> None:
        self.failed_count += 1
        host = urlsplit(url).hostname
        log.warning("webhook of %s: %s %s is not posted: %s", host, alert.state, alert.id, why)
