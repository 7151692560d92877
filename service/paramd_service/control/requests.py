"""What all ranks are asked to do together, and the number and token that name it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from paramd.v1 import sidecar_pb2

_TOKEN_BITS = 63


class BoundaryAction(IntEnum):
    """What is done at an agreed boundary; the numbers are those of paramd.v1."""

    CAPTURE = sidecar_pb2.BOUNDARY_ACTION_UNSPECIFIED
    """Fill snapshots; there may be none."""
    EDIT = sidecar_pb2.BOUNDARY_ACTION_EDIT
    """Apply a staged edit."""
    HOLD = sidecar_pb2.BOUNDARY_ACTION_HOLD
    """Hold training under a lease."""
    STEP = sidecar_pb2.BOUNDARY_ACTION_STEP
    """Let held training pass some boundaries."""
    RESUME = sidecar_pb2.BOUNDARY_ACTION_RESUME
    """End the hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryRequest:
    """One request, the same for all ranks but for their snapshots."""

    number: int
    """Rises by one with every request of an epoch."""
    token: int
    """Names the content, 1 to 2**63 - 1: of two control planes that use one number each,
    trainers agree with neither."""
    action: BoundaryAction = BoundaryAction.CAPTURE
    edit_id: str = ""
    step_count: int = 0
    """Boundaries that STEP lets pass."""
    lease_ms: int = 0
    """Lease of a HOLD, in milliseconds."""


def token_of(
    generation: int, number: int, action: BoundaryAction, digests: Sequence[bytes] = ()
) -> int:
    """The token of a request: equal for equal content, 1 to 2**63 - 1.

    Args:
        digests: of what an edit does and of its data.
    """
    told = hashlib.blake2b(f"{generation}:{number}:{int(action)}".encode(), digest_size=8)
    for digest in digests:
        told.update(len(digest).to_bytes(4, "big") + digest)
    return max(1, int.from_bytes(told.digest(), "big") >> (64 - _TOKEN_BITS))
