"""What pinning asks for and what it gets: spans, one rank's pin, pins of one state. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paramd.errors import ConflictError, DeadlineError


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
    iteration: int = -1
    """Backward passes before the update that made `step`; equal on ranks in lock-step."""
    unsettled: bool = False
    """Training has not gone on since update `step`."""


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
    unsettled: bool = False
    """On some rank training has not gone on since update `step`."""


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
    unsettled: bool = False
    """Parameters changed after their update will do, too, while training has not gone on."""


def one_step(pins: Sequence[RankPin]) -> tuple[int, int, int] | None:
    """The state (epoch, step, edits) that all pins share, or None.

    Raises:
        ConflictError: the same step was made in different iterations of training.
    """
    found = {(pin.epoch, pin.step, pin.edits) for pin in pins}
    if len(found) != 1:
        return None
    ((epoch, step, edits),) = found
    if step >= 0 and len({pin.iteration for pin in pins}) > 1:
        raise out_of_lockstep(step, {pin.rank: pin.iteration for pin in pins})
    return (epoch, step, edits) if step >= 0 else None


def out_of_lockstep(step: int, iterations: Mapping[int, int]) -> ConflictError:
    """What is raised when ranks made the same step in different iterations of training."""
    told = ", ".join(f"rank {rank} in iteration {of}" for rank, of in list(iterations.items())[:8])
    return ConflictError(
        f"the ranks are not at the same step of training: update {step} was made by {told}. One of "
        "them left an update out: its optimizer raised, or its gradient scaler skipped alone. "
        "Restart the training from a checkpoint"
    )


def no_step_in_time(spans: Spans, reason: str) -> DeadlineError:
    """What is raised when no try led to one step."""
    return DeadlineError(
        f"no step that all of ranks {_listed(list(spans))} share was had in time; last "
        f"reason: {reason}; allow more time (timeout=), or pause training"
    )


def pinned_at(common: tuple[int, int, int], pins: Sequence[RankPin]) -> Pinned:
    """The pins of all ranks, which share this (epoch, step, edits)."""
    epoch, step, edits = common
    unsettled = any(pin.unsettled for pin in pins)
    return Pinned(epoch, step, {pin.rank: pin for pin in pins}, edits, unsettled)


def told_step(pin: RankPin) -> str:
    """Step of a pin, and its edits when there are any."""
    return f"{pin.step} with {pin.edits} edits" if pin.edits > 0 else str(pin.step)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} ranks)"


@dataclass(slots=True)
class FastPathBackoff:
    """Whether to try what the ranks have before asking for a boundary.

    Each failed try costs a round of copies. So after steps differed, the boundary is
    asked for at once during a while that doubles as tries keep failing.
    """

    first_pause_s: float = 0.5
    last_pause_s: float = 8.0
    _pause_s: float = 0.0
    _until_s: float = field(default=float("-inf"))

    def tries(self, now_s: float) -> bool:
        """Whether to try at `now_s`."""
        return now_s >= self._until_s

    def differed(self, now_s: float) -> None:
        """A try ended with different steps."""
        self._pause_s = min(max(2 * self._pause_s, self.first_pause_s), self.last_pause_s)
        self._until_s = now_s + self._pause_s

    def agreed(self) -> None:
        """A try ended with equal steps."""
        self._pause_s = 0.0
        self._until_s = float("-inf")
