"""Boundary requests of one epoch: ready, agreed, captured; or why not. Runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from paramd.errors import ConflictError, UsageError
from paramd.memory.control_page import Word
from paramd_service.sidecar.capture import Boundary, Outcome
from paramd_service.sidecar.copier import Copier
from paramd_service.sidecar.owner import Possession
from paramd_service.sidecar.snapshot import Fill, Snapshot, copy_spans
from paramd_service.sidecar.snapshots import SnapshotStore

_OUTCOMES_KEPT = 64
_GAVE_UP = 2


@dataclass(eq=False, slots=True)
class _Capturing:
    """A boundary request and its answer, kept so that it may be asked again."""

    snapshot_ids: tuple[str, ...]
    done: asyncio.Future[Outcome]


class Boundaries:
    """Fills prepared snapshots at boundaries that all trainers agree on."""

    def __init__(self, possession: Possession, store: SnapshotStore, copier: Copier) -> None:
        self._possession = possession
        self._store = store
        self._copier = copier
        self._loop = asyncio.get_running_loop()
        self._captures: dict[int, _Capturing] = {}
        self._ended = ""

    @property
    def highest(self) -> int:
        """Highest boundary request that was asked for; 0 before the first."""
        return max(self._captures, default=0)

    def end(self, reason: str) -> None:
        """No boundary will come any more. Those asked for are given up by the copier."""
        self._ended = reason

    async def capture(
        self, number: int, snapshot_ids: Sequence[str], *, timeout_s: float
    ) -> Outcome:
        """Fills prepared snapshots at the boundary that request `number` is agreed at.

        Asking again for the same number gives the same answer.

        Raises:
            NotFoundError: a lease has ended.
            ConflictError: no boundary will come, a snapshot was not prepared for one or is
                in use, or the number was asked with other snapshots.
        """
        capturing = self._captures.get(number)
        if capturing is None:
            capturing = self._begin(number, tuple(snapshot_ids))
        elif capturing.snapshot_ids != tuple(snapshot_ids):
            raise ConflictError(f"boundary {number} was asked already, with other snapshots")
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(capturing.done)
        except TimeoutError:
            self._copier.withdraw(number, self._why_not_agreed(number, timeout_s))
            return await asyncio.shield(capturing.done)
        except asyncio.CancelledError:
            self._copier.withdraw(number, f"who asked for boundary {number} went away")
            raise

    def _begin(self, number: int, snapshot_ids: tuple[str, ...]) -> _Capturing:
        if self._ended:
            raise ConflictError(f"no boundary will come: {self._ended}")
        if len(set(snapshot_ids)) != len(snapshot_ids):
            raise UsageError("snapshot_ids: a snapshot is named twice")
        snapshots = [self._store.get(snapshot_id).snapshot for snapshot_id in snapshot_ids]
        for snapshot in snapshots:
            _check_capturable(snapshot)
        capturing = _Capturing(snapshot_ids, self._loop.create_future())
        self._captures[number] = capturing
        for old in [n for n, c in self._captures.items() if c.done.done()][:-_OUTCOMES_KEPT]:
            del self._captures[old]
        for snapshot in snapshots:
            self._store.hold(snapshot).fill = Fill.PENDING
        arena_address = self._possession.arena.address

        def done(outcome: Outcome) -> None:
            # From the copying thread; the event loop may be closing.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end, capturing, snapshots, outcome)

        self._copier.arm(
            Boundary(
                number,
                [span for one in snapshots for span in copy_spans(one, arena_address)],
                any(snapshot.with_buffers for snapshot in snapshots),
                done,
            )
        )
        return capturing

    def _end(self, capturing: _Capturing, snapshots: Sequence[Snapshot], outcome: Outcome) -> None:
        for snapshot in snapshots:
            snapshot.fill = Fill.FILLED if outcome.captured else Fill.EMPTY
            snapshot.step = outcome.step
            self._store.drop(snapshot)
        capturing.done.set_result(outcome)

    def _why_not_agreed(self, number: int, timeout_s: float) -> str:
        page = self._possession.page
        if page[Word.AGREEMENT_STATE] == _GAVE_UP:
            return "the trainers gave up agreeing in this epoch; attach again to make it work"
        return (
            f"the trainers did not agree on boundary {number} within {timeout_s:.1f} s (this rank "
            f"is at step {page[Word.STEP]}); training is paused, or a rank is not ready"
        )


def _check_capturable(snapshot: Snapshot) -> None:
    if not snapshot.at_boundary:
        raise ConflictError("a snapshot was not pinned with at_boundary; pin it so")
    if snapshot.fill is Fill.PENDING or snapshot.map_count or snapshot.tainted:
        raise ConflictError("a snapshot is in use by another request; pin another one")
