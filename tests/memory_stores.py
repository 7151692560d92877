"""In-memory stores for unit tests, with the interfaces of the production ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paramd.errors import ConflictError, NotFoundError
from paramd.mesh.insight.reports import Alert
from paramd_service.alerts.store import State
from paramd_service.control.store.history import Sample
from paramd_service.control.store.tokens import TokenRow

MAX_KEPT = 2000


class MemoryTokens:
    """`TokenStore` in memory."""

    def __init__(self) -> None:
        self._rows: dict[str, TokenRow] = {}
        self.looks = 0
        """Times that all digests were read."""

    async def create(self, row: TokenRow) -> None:
        if row.name in self._rows:
            raise ConflictError(f"token {row.name!r}: the name has been used; take another")
        self._rows[row.name] = row

    async def find(self, digest: str) -> TokenRow | None:
        return next((row for row in self._rows.values() if row.digest == digest), None)

    async def digests(self, *, now_s: float) -> list[str]:
        self.looks += 1
        good = (row for row in self._rows.values() if row.ended_s > now_s)
        return [row.digest for row in good]

    async def list(self) -> list[TokenRow]:
        return [self._rows[name] for name in sorted(self._rows)]

    async def revoke(self, name: str, *, now_s: float) -> TokenRow:
        row = self._rows.get(name)
        if row is None:
            raise NotFoundError(f"token {name[:64]!r} does not exist; see: paramd token list")
        if row.revoked_s is None:
            row = TokenRow(
                name=row.name,
                digest=row.digest,
                role=row.role,
                created_s=row.created_s,
                expires_s=row.expires_s,
                revoked_s=now_s,
            )
            self._rows[name] = row
        return row


class MemoryStore:
    """`AlertStore` in memory, and what is offered to the history."""

    def __init__(self) -> None:
        self.alerts: dict[str, Alert] = {}
        self.points: list[Sample] = []

    async def save(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            self.alerts[alert.id] = alert
        while len(self.alerts) > MAX_KEPT:
            del self.alerts[next(iter(self.alerts))]

    async def load_firing(self, job: str, incarnation: int) -> Sequence[Alert]:
        return [
            alert
            for alert in self.alerts.values()
            if alert.state == State.FIRING and (alert.job, alert.incarnation) == (job, incarnation)
        ]

    def offer(self, points: Iterable[Sample]) -> None:
        self.points = [*self.points, *points][-MAX_KEPT:]
