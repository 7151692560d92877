"""Post alerts to the operator's URLs. An unreachable receiver delays only its own posts.

URLs come only from the operator's config and are never logged: many are secrets.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

import httpx2

from paramd_service.control.alerts.book import Alert, document
from paramd_service.control.alerts.config import AlertConfig

QUEUE_COUNT = 200
"""Posts queued per receiver; past the cap, the oldest is dropped."""

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0

log = logging.getLogger("paramd.control.alerts")

Sleep = Callable[[float], Awaitable[None]]


class Webhooks:
    """Life cycle: `start`, any number of `post`, `close`. Single event loop."""

    def __init__(
        self,
        config: AlertConfig,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """No I/O. Tests replace network and time through `transport` and `sleep`."""
        self._config = config
        self._sleep = sleep
        self._client = httpx2.AsyncClient(
            timeout=config.webhook_timeout_s,
            transport=transport,
            follow_redirects=False,
            # No proxy or credentials from the environment.
            trust_env=False,
        )
        self._queues = [asyncio.Queue[Alert](QUEUE_COUNT) for _ in config.webhooks]
        self._tasks: list[asyncio.Task[None]] = []
        self.posted_count = 0
        """Posts accepted by a receiver."""
        self.failed_count = 0
        """Posts abandoned or dropped."""

    def start(self) -> None:
        """Start posting."""
        self._tasks = [
            asyncio.create_task(self._run(url, queue), name="paramd-webhook")
            for url, queue in zip(self._config.webhooks, self._queues, strict=True)
        ]

    def post(self, alerts: Sequence[Alert]) -> None:
        """Queue alerts for every receiver. Never blocks, never fails."""
        for alert in alerts:
            for queue in self._queues:
                if queue.full():
                    queue.get_nowait()
                    self.failed_count += 1
                queue.put_nowait(alert)

    async def close(self) -> None:
        """Stop, dropping what is queued. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
        await self._client.aclose()

    async def _run(self, url: str, queue: asyncio.Queue[Alert]) -> None:
        host = urlsplit(url).hostname
        failing = ""
        while True:
            alert = await queue.get()
            reason = await self._deliver(url, alert)
            if reason:
                self.failed_count += 1
            else:
                self.posted_count += 1
            if reason != failing:
                failing = reason
                if reason:
                    log.warning("webhook of %s rejects alerts: %s", host, reason)
                else:
                    log.info("webhook of %s accepts alerts again", host)

    async def _deliver(self, url: str, alert: Alert) -> str:
        """Post one alert, retrying when that may help; return why it was abandoned, or ""."""
        text = document(alert).model_dump_json()
        headers = {"content-type": "application/json", "idempotency-key": _key(alert)}
        reason = ""
        for attempt in range(self._config.webhook_attempts):
            if attempt:
                full_s = min(FIRST_BACKOFF_S * 2.0 ** (attempt - 1), LAST_BACKOFF_S)
                await self._sleep(full_s * (0.5 + 0.5 * random.random()))
            try:
                answer = await self._client.post(url, content=text, headers=headers)
            except httpx2.HTTPError as error:
                # The error text may contain the URL.
                reason = type(error).__name__
                continue
            if answer.status_code < 300:
                return ""
            reason = f"HTTP {answer.status_code}"
            if answer.status_code < 500 and answer.status_code not in (408, 429):
                return reason
        return reason


def _key(alert: Alert) -> str:
    """Idempotency key: the same for every attempt at one message."""
    return f"{alert.id}-{alert.state.value}"
