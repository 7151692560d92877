"""State machine of one edit: events in, actions out. No I/O, no clock.

    STAGING --all ranks have it, replicas alike--> STAGED --Commit--> COMMITTED --> APPLIED
       |                                             |                  |    |
       +--------------- called off ------------------+----> ABORTED <---+    +----> LOST

STAGING, STAGED    applied on no rank; no trainer knows of it. The data is in the sidecars.
COMMITTED          boundary number and token are in the store, so a restarted control plane can
                   ask about them. Trainers may have agreed, or may agree at any moment.
APPLIED            every rank reported it: same boundary, token, step, edit count and manifest,
                   and replicas took the same data.
ABORTED            applied on no rank, and never will be: it was not committed, or one rank's
                   sidecar has proof that its trainer will not take part.
LOST               the incarnation or a trainer ended before all ranks were known to have it, or
                   the ranks disagree.

The last three are final. A rank that is unreachable or in doubt is asked again until the
incarnation ends, so every action on a rank except Forget is answered by exactly one event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from paramd.layout.edits.ops import EDIT_ENDS, EditState

SameData = Callable[[Mapping[int, tuple[bytes, ...]]], str]
"""From data digests by rank, a message that names the replicas that differ; empty if none do."""


class Outcome(Enum):
    """Outcome of a boundary request, as a sidecar reports it (`paramd.v1.BoundaryFate`)."""

    WITHDRAWN = 1
    IN_DOUBT = 2
    AGREED = 3
    DONE = 4
    TORN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """One rank's report of an edit it applied."""

    boundary: int
    token: int
    step: int
    edits: int
    manifest_digest: bytes
    data_digests: tuple[bytes, ...] = ()
    stop_ns: int = 0


# Events.
@dataclass(frozen=True, slots=True)
class Staged:
    """A rank has the whole edit, verified."""

    rank: int
    manifest_digest: bytes
    data_digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class CallOff:
    """Abort the edit if still possible: on request, after a timeout, or because staging failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """The edit has its turn; ask the ranks to apply it at this boundary."""

    boundary: int
    token: int


@dataclass(frozen=True, slots=True)
class Reached:
    """A sidecar answered that the trainers agreed and its own applied the edit."""

    rank: int


@dataclass(frozen=True, slots=True)
class NotReached:
    """A sidecar refused, timed out or did not answer; its trainer may still have agreed."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reported:
    """The answer to a Withdraw."""

    rank: int
    fate: Outcome


@dataclass(frozen=True, slots=True)
class Unreported:
    """A Withdraw or Show got no answer."""

    rank: int


@dataclass(frozen=True, slots=True)
class Shown:
    """A rank's report of how it applied the edit; None if the rank does not know that it did."""

    rank: int
    applied: Applied | None


@dataclass(frozen=True, slots=True)
class IncarnationEnded:
    """The edit's incarnation is over."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """A new control plane read the COMMITTED edit from the store."""


Event: TypeAlias = (
    Staged
    | CallOff
    | Commit
    | Reached
    | NotReached
    | Reported
    | Unreported
    | Shown
    | IncarnationEnded
    | Restarted
)


# Actions, performed in order; those after a Persist only once it is durable.
@dataclass(frozen=True, slots=True)
class Persist:
    """Write state, reason, boundary, token and step to the store."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Call ReachBoundary of a rank. Answered by Reached or NotReached."""

    rank: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Call WithdrawBoundary of a rank, at once or later. Answered by Reported or Unreported."""

    rank: int
    later: bool = False


@dataclass(frozen=True, slots=True)
class Show:
    """Call GetEdit of a rank. Answered by Shown or Unreported."""

    rank: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Withdraw a commit and drop the staged data on a rank. Not answered."""

    rank: int


Action: TypeAlias = Persist | Reach | Withdraw | Show | Forget


def no_data(_: Mapping[int, tuple[bytes, ...]]) -> str:
    """The `SameData` of an edit without replicas."""
    return ""


@dataclass(kw_only=True, slots=True)
class EditMachine:
    """State of one edit; only `handle` changes it."""

    world_size: int
    manifest_digest: bytes
    same_data: SameData = no_data
    state: EditState = EditState.STAGING
    reason: str = ""
    """Why it is ABORTED or LOST, or is being called off."""
    boundary: int = 0
    token: int = 0
    step: int = -1
    """Step at whose boundary it was applied; -1 until then."""
    edits: int = -1
    """Edits applied in the incarnation up to and including this one; -1 until then."""
    stop_ns: int = 0
    """Longest time that it stopped a trainer."""
    agreed: bool = False
    """The trainers are known to have agreed on it, so it can no longer be aborted."""
    calling_off: bool = False
    _staged: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    _applied: dict[int, Applied] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state in EDIT_ENDS

    @property
    def data_digests(self) -> list[bytes]:
        """Digests of all ranks' data in rank order; part of the token."""
        return [digest for rank in sorted(self._staged) for digest in self._staged[rank]]

    def handle(self, event: Event) -> list[Action]:
        """Process an event; return the actions to perform."""
        if self.ended:
            return []
        match event:
            case IncarnationEnded(reason):
                if self.state is not EditState.COMMITTED:
                    return self._abort(reason)
                return self._lose(f"{reason}, before all ranks had said whether it was applied")
            case CallOff(reason):
                return self._called_off(reason)
            case Staged():
                return self._on_staged(event)
            case Commit(boundary, token):
                return self._commit(boundary, token)
        return self._committed(event) if self.state is EditState.COMMITTED else []

    def _committed(self, event: Event) -> list[Action]:
        match event:
            case Reached(rank):
                return self._agreed_by(rank)
            case NotReached(rank, reason):
                # If another rank proved agreement, this one is asked until it has applied the edit.
                return [Withdraw(rank)] if self.agreed else self._called_off(reason)
            case Reported(rank, fate):
                return self._told(rank, fate)
            case Unreported(rank):
                return [Withdraw(rank, later=True)]
            case Shown(rank, applied):
                return self._shown(rank, applied)
            case Restarted():
                return self._called_off("the control plane was restarted before it was agreed")
        return []

    def _on_staged(self, event: Staged) -> list[Action]:
        if self.state is not EditState.STAGING:
            return []
        if event.manifest_digest != self.manifest_digest:
            return self._called_off(
                f"rank {event.rank} has another manifest staged under this id; use a new one"
            )
        self._staged[event.rank] = event.data_digests
        if len(self._staged) < self.world_size:
            return []
        if differing := self.same_data(self._staged):
            return self._called_off(differing)
        self.state = EditState.STAGED
        return [Persist()]

    def _commit(self, boundary: int, token: int) -> list[Action]:
        if self.state is not EditState.STAGED:
            return []
        self.state = EditState.COMMITTED
        self.boundary, self.token = boundary, token
        return [Persist(), *(Reach(rank) for rank in range(self.world_size))]

    def _called_off(self, reason: str) -> list[Action]:
        if self.state is not EditState.COMMITTED:
            return self._abort(reason)
        if self.calling_off or self.agreed:
            return []
        self.calling_off, self.reason = True, reason
        return [Withdraw(rank) for rank in range(self.world_size)]

    def _agreed_by(self, rank: int) -> list[Action]:
        self.agreed = True
        return [Show(rank)]

    def _told(self, rank: int, fate: Outcome) -> list[Action]:
        if fate is Outcome.WITHDRAWN:
            if not self.agreed:
                return self._abort(self.reason)
            return self._lose(
                f"rank {rank} will not apply what others have agreed on; the ranks' parameters "
                "differ: go back to a checkpoint"
            )
        if fate is Outcome.TORN:
            return self._lose(f"the trainer of rank {rank} ended while it was being applied")
        if fate is Outcome.DONE:
            return self._agreed_by(rank)
        self.agreed = self.agreed or fate is Outcome.AGREED
        return [Withdraw(rank, later=True)]

    def _shown(self, rank: int, applied: Applied | None) -> list[Action]:
        if applied is None:
            return [Withdraw(rank, later=True)]
        named = (applied.boundary, applied.token, applied.manifest_digest)
        if named != (self.boundary, self.token, self.manifest_digest):
            return self._lose(
                f"rank {rank} has applied something else under this id; the ranks' parameters "
                "may differ: go back to a checkpoint"
            )
        self.agreed = True
        self._applied[rank] = applied
        if len(self._applied) < self.world_size:
            return []
        return self._all_applied()

    def _all_applied(self) -> list[Action]:
        found = self._applied.values()
        places = {(one.step, one.edits) for one in found}
        differing = self.same_data({rank: one.data_digests for rank, one in self._applied.items()})
        if len(places) > 1 or differing:
            what = differing or "the ranks applied it at different steps"
            return self._lose(f"{what}; their parameters differ: go back to a checkpoint")
        ((self.step, self.edits),) = places
        self.stop_ns = max(one.stop_ns for one in found)
        self.state, self.reason = EditState.APPLIED, ""
        return [Persist()]

    def _abort(self, reason: str) -> list[Action]:
        self.state, self.reason = EditState.ABORTED, reason
        return [Persist(), *(Forget(rank) for rank in range(self.world_size))]

    def _lose(self, reason: str) -> list[Action]:
        self.state, self.reason = EditState.LOST, reason
        return [Persist()]
