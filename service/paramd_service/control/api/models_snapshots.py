"""Documents of snapshots and their leases, as OpenAPI describes them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from paramd.wire import LEASE_S, MAX_LEASE_S


class SnapshotRequest(BaseModel):
    """What to pin, and for how long."""

    filter: str = Field(
        min_length=1, max_length=1024, description="Globs, and terms about facts", examples=["*"]
    )
    buffers: bool = False
    lease_s: float = Field(default=LEASE_S, ge=1, le=MAX_LEASE_S, description="Seconds")

    model_config = ConfigDict(extra="forbid")


class LeaseRequest(BaseModel):
    """How long a lease shall go on."""

    lease_s: float = Field(default=LEASE_S, ge=1, le=MAX_LEASE_S, description="Seconds from now on")

    model_config = ConfigDict(extra="forbid")


class RankPinDocument(BaseModel):
    """One rank's part of a snapshot."""

    rank: int
    snapshot_id: str = Field(description="For ReadSnapshot of that rank's sidecar")
    size_bytes: int


class HeldDocument(BaseModel):
    """A snapshot of all needed ranks at one step, held until its lease ends."""

    id: str
    filter: str
    epoch: int
    step: int
    lease_left_s: float
    size_bytes: int
    pins: list[RankPinDocument]


class LeaseDocument(BaseModel):
    """One lease at a sidecar, whoever pinned."""

    name: str = Field(description="First 8 characters of the snapshot's id")
    step: int = Field(description="-1 while the bytes are not there")
    size_bytes: int
    lease_left_ms: int
    at_boundary: bool


class RankSnapshots(BaseModel):
    """Leases at one rank's sidecar."""

    rank: int
    reason: str = Field(description="Why it does not say; empty when it does")
    lease_count: int
    used_bytes: int
    budget_bytes: int
    snapshots: list[LeaseDocument]


class SnapshotList(BaseModel):
    """Snapshots held through REST, and all leases of all ranks."""

    held: list[HeldDocument]
    ranks: list[RankSnapshots] = Field(description="Ordered by rank")
    partial: bool = Field(description="A rank does not say")
    next_page_token: str = Field(description="For further ranks; empty at the end")
