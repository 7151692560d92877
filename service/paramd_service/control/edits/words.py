"""What an edit's machine takes in and what it asks for: events, actions. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Fate(Enum):
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
class Told:
    """The answer of a withdrawal."""

    rank: int
    fate: Fate


@dataclass(frozen=True, slots=True)
class NotTold:
    """A question found no answer: the sidecar is away, or knows nothing."""

    rank: int


@dataclass(frozen=True, slots=True)
class Shown:
    """A rank says how it applied the edit; None: it has not, as far as it knows."""

    rank: int
    applied: Applied | None


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """Its epoch is over."""

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
    | Told
    | NotTold
    | Shown
    | EpochEnded
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
    """Call WithdrawBoundary of a rank, at once or after a pause. Answered by Told or NotTold."""

    rank: int
    later: bool = False


@dataclass(frozen=True, slots=True)
class Show:
    """Call GetEdit of a rank. Answered by Shown or NotTold."""

    rank: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Withdraw what is committed at a rank, and drop what is staged. Not answered."""

    rank: int


Action: TypeAlias = Persist | Reach | Withdraw | Show | Forget
