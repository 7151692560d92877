"""One edit: events in, actions out. Pure: no I/O, no clock.

    STAGING --all ranks have it, replicas alike--> STAGED --Commit--> COMMITTED --> APPLIED
       |                                             |                  |    |
       +--------------- called off ------------------+----> ABORTED <---+    +----> LOST

STAGING, STAGED    on no rank, and no trainer knows of it. The data is in the sidecars.
COMMITTED          number and token are in the store, so that whoever comes after us can ask.
                   Some sidecars may be ready; trainers may have agreed, or may agree any moment.
APPLIED            every rank has said so: same boundary, token, step, number of edits and
                   manifest, and replicas took the same data.
ABORTED            on no rank, now and ever: it was never committed, or one rank's sidecar is
                   certain that its trainer never takes part.
LOST               the incarnation ended, or a trainer did, before it was known to be on all ranks.

The last three never change. A rank that cannot be asked, or is in doubt, is asked again for as
long as the incarnation goes on; that is why every question of a rank is answered by exactly one
event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TypeAlias

SameData = Callable[[Mapping[int, tuple[bytes, ...]]], str]
"""Data digests of the ranks -> which replicas differ, in words; empty when none do."""


class Outcome(Enum):
    """What a sidecar says became of a boundary request; as `paramd.v1.BoundaryFate`."""

    WITHDRAWN = 1
    IN_DOUBT = 2
    AGREED = 3
    DONE = 4
    TORN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What one rank says of an edit that it has applied."""

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
    """It shall not happen: somebody said so, its time is over, or it cannot be staged."""

    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """It has its turn."""

    boundary: int
    token: int


@dataclass(frozen=True, slots=True)
class Reached:
    """A sidecar answered that the trainers agreed and its own has done it."""

    rank: int


@dataclass(frozen=True, slots=True)
class NotReached:
    """A sidecar refused, gave up, or gave no answer; its trainer may have agreed all the same."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reported:
    """The answer of a withdrawal."""

    rank: int
    fate: Outcome


@dataclass(frozen=True, slots=True)
class Unreported:
    """A question found no answer: the sidecar is away, or knows nothing."""

    rank: int


@dataclass(frozen=True, slots=True)
class Shown:
    """A rank says how it applied the edit; None: it has not, as far as it knows."""

    rank: int
    applied: Applied | None


@dataclass(frozen=True, slots=True)
class IncarnationEnded:
    """Its incarnation is over."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """The control plane began anew and read the edit from the store."""


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


# Actions, to be taken in order; what follows a Persist only once it is durable.
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
    """Withdraw what is committed at a rank, and drop what is staged. Not answered."""

    rank: int


Action: TypeAlias = Persist | Reach | Withdraw | Show | Forget


class EditState(StrEnum):
    """Where an edit stands; see the module's text."""

    STAGING = "STAGING"
    STAGED = "STAGED"
    COMMITTED = "COMMITTED"
    APPLIED = "APPLIED"
    ABORTED = "ABORTED"
    LOST = "LOST"


TERMINAL = frozenset({EditState.APPLIED, EditState.ABORTED, EditState.LOST})


def no_data(_: Mapping[int, tuple[bytes, ...]]) -> str:
    """The `SameData` of an edit without replicas."""
    return ""


@dataclass(kw_only=True, slots=True)
class EditMachine:
    """What is known of one edit. `handle` is its only way on."""

    world_size: int
    manifest_digest: bytes
    same_data: SameData = no_data
    state: EditState = EditState.STAGING
    reason: str = ""
    """Why it is ABORTED or LOST; before that, why it is being called off."""
    boundary: int = 0
    token: int = 0
    step: int = -1
    """Step at whose boundary it was applied."""
    edits: int = -1
    """Edits of the incarnation, this one included, when it was applied."""
    stop_ns: int = 0
    """Longest time that it kept a trainer."""
    agreed: bool = False
    """The trainers are known to have agreed on it."""
    calling_off: bool = False
    _staged: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    _applied: dict[int, Applied] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether the state will not change any more."""
        return self.state in TERMINAL

    @property
    def data_digests(self) -> list[bytes]:
        """Of all ranks' data, in order: for the token."""
        return [digest for rank in sorted(self._staged) for digest in self._staged[rank]]

    def handle(self, event: Event) -> list[Action]:
        """Takes an event in; returns what to do now."""
        if self.ended:
            return []
        match event:
            case IncarnationEnded(reason):
                return self._incarnation_ended(reason)
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
                # Without its answer we do not know; with others' we know that it was agreed.
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

    def _incarnation_ended(self, reason: str) -> list[Action]:
        if self.state is not EditState.COMMITTED:
            return self._abort(reason)
        return self._lose(f"{reason}, before all ranks had said whether it was applied")

    def _abort(self, reason: str) -> list[Action]:
        self.state, self.reason = EditState.ABORTED, reason
        return [Persist(), *(Forget(rank) for rank in range(self.world_size))]

    def _lose(self, reason: str) -> list[Action]:
        self.state, self.reason = EditState.LOST, reason
        return [Persist()]
