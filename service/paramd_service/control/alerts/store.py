"""Where alerts and metric history are kept beyond this process's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paramd_service.control.alerts.book import Alert, State

MAX_KEPT = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measured number, for the history."""

    job: str
    epoch: int
    name: str
    """step, step_time_s, stall_total_s (each by rank), norm (by tensor)."""
    subject: str
    """Rank as text, or the tensor's name."""
    step: int
    time_s: float
    """Seconds since the Unix epoch."""
    value: float


class AlertStore(Protocol):
    """Keeps alerts and history. Async methods raise ParamdErrors; none stops the event loop."""

    async def save_alerts(self, alerts: Sequence[Alert]) -> None:
        """Writes alerts anew or over their former state, by id."""

    async def load_firing(self, job: str, epoch: int) -> Sequence[Alert]:
        """Alerts of one epoch that fired when they were last written."""

    def offer(self, points: Sequence[Point]) -> None:
        """Takes in history. Never waits, never fails; drops what it cannot keep."""


class MemoryStore:
    """An `AlertStore` that forgets with its process."""

    def __init__(self) -> None:
        self.alerts: dict[str, Alert] = {}
        self.points: list[Point] = []

    async def save_alerts(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            self.alerts[alert.id] = alert
        while len(self.alerts) > MAX_KEPT:
            del self.alerts[next(iter(self.alerts))]

    async def load_firing(self, job: str, epoch: int) -> Sequence[Alert]:
        return [
            alert
            for alert in self.alerts.values()
            if alert.state is State.FIRING and (alert.job, alert.epoch) == (job, epoch)
        ]

    def offer(self, points: Sequence[Point]) -> None:
        self.points = [*self.points, *points][-MAX_KEPT:]
