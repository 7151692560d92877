"""What pinning asks for and what it gets: spans, one rank's pin, pins of one state. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paramd.errors import DeadlineError

LEASE_S = 30.0
"""Lease asked for; renewed at a third of it."""


@dataclass(frozen=True, slots=True)
class RankPin:
    """One rank's answer to a pin. `step` is -1 while a boundary has not filled it."""

    rank: int
    snapshot_id: str
    epoch: int
    step: int
    size_bytes: int
    lease_s: float
    edits: int = -1
    """With epoch and step it names the state of the bytes."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The control plane's answer: all snapshots filled at `step`, or why not."""

    captured: bool
    epoch: int
    step: int
    reason: str
    edits: int = -1


@dataclass(frozen=True, slots=True)
class Pinned:
    """Snapshots of all needed ranks of one state: epoch, step and edits."""

    epoch: int
    step: int
    pins: Mapping[int, RankPin]
    edits: int = -1
    """Edits applied in the epoch; -1 for what edits do not change (gradients)."""


Spans = Mapping[int, Sequence[tuple[int, int]]]
"""Arena spans wanted, by rank: sorted, half-open, in bytes."""


class PinTransport(Protocol):
    """What pinning needs from the outside; all methods raise ParamdErrors."""

    async def pin(
        self, rank: int, spans: Sequence[tuple[int, int]], how: PinKind, timeout_s: float
    ) -> RankPin:
        """Pins spans of one rank."""

    async def schedule(self, pins: Sequence[RankPin], timeout_s: float) -> Captured:
        """Has prepared snapshots filled at one agreed boundary."""

    async def renew(self, pin: RankPin) -> float:
        """Prolongs a lease; returns the seconds granted."""

    def release(self, pin: RankPin) -> None:
        """Ends a lease in the background; never fails and never waits."""


@dataclass(frozen=True, slots=True)
class PinKind:
    """How a sidecar shall pin."""

    at_boundary: bool = False
    with_buffers: bool = False


def one_step(pins: Sequence[RankPin]) -> tuple[int, int, int] | None:
    """The state (epoch, step, edits) that all pins share, or None."""
    found = {(pin.epoch, pin.step, pin.edits) for pin in pins}
    if len(found) != 1:
        return None
    ((epoch, step, edits),) = found
    return (epoch, step, edits) if step >= 0 else None


def no_step_in_time(spans: Spans, reason: str) -> DeadlineError:
    """What is raised when no try led to one step."""
    return DeadlineError(
        f"no step that all of ranks {_listed(list(spans))} share was had in time; last "
        f"reason: {reason}; allow more time (timeout=), or pause training"
    )


def pinned_at(common: tuple[int, int, int], pins: Sequence[RankPin]) -> Pinned:
    """The pins of all ranks, which share this (epoch, step, edits)."""
    epoch, step, edits = common
    return Pinned(epoch, step, {pin.rank: pin for pin in pins}, edits)


def told_step(pin: RankPin) -> str:
    """Step of a pin, and its edits when there are any."""
    return f"{pin.step} with {pin.edits} edits" if pin.edits > 0 else str(pin.step)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} ranks)"
