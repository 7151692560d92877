"""Documents of the REST side, as OpenAPI describes them: jobs, ranks, epochs."""

from __future__ import annotations

from pydantic import BaseModel, Field


class JobSummary(BaseModel):
    """One job that this control plane serves."""

    job: str = Field(description="Name of the job")
    epoch: int = Field(description="Incarnation of the job")
    world_size: int = Field(description="Ranks of the mesh")
    joined_count: int = Field(description="Ranks whose sidecar is joined now")
    step: int = Field(description="Lowest step that a joined rank reported; -1 when none is")
    state: str = Field(description="ok, starting, degraded, down or ended")
    reason: str = Field(description="Why the state is not ok; empty when it is")
    hold: str = Field(
        description="running, held or stepping, as the ranks last reported; see get_hold"
    )


class JobList(BaseModel):
    """All jobs of this control plane."""

    jobs: list[JobSummary]


class JobRegistration(BaseModel):
    """What a job that attaches says of itself."""

    job: str = Field(description="Name: letters, digits, . _ -", min_length=1, max_length=64)
    world_size: int = Field(description="Ranks of the mesh", ge=1, le=65_536)
    epoch_floor: int = Field(
        0, description="The epoch given is above this one", ge=0, le=1_000_000_000_000
    )


class RegisteredJob(BaseModel):
    """What the ranks of a new epoch need. Holds tickets: never log it."""

    job: str
    epoch: int = Field(description="Number of the new incarnation")
    control_address: str = Field(description='gRPC target "host:port" that sidecars join')
    public_key: str = Field(description="Verifies the epoch's tickets; hexadecimal digits")
    rank_tickets: list[str] = Field(description="By rank; lets its sidecar join as that rank")


class EpochDocument(BaseModel):
    """One incarnation of a job."""

    epoch: int
    world_size: int
    began_s: float = Field(description="Seconds since the Unix epoch")
    ended_s: float | None = Field(description="null while it goes on")
    reason: str = Field(description="Why it is over; empty while it goes on")
    step: int = Field(description="Last step known at its end; -1 when none is")


class EpochList(BaseModel):
    """Incarnations of a job, the present one last."""

    epochs: list[EpochDocument]


class PeerDocument(BaseModel):
    """Where one rank's sidecar is found."""

    rank: int
    address: str = Field(description='gRPC target "host:port"')
    socket_path: str = Field(description="Unix socket, for programs of the same host")
    host_id: str = Field(description="Names the running kernel of the host")


class JobDocument(JobSummary):
    """A job, how to reach its sidecars, and a ticket that lets a reader in."""

    layout_digest: str = Field(description="Layout in force; empty while none is agreed")
    control_address: str = Field(description='gRPC target "host:port" of the control plane')
    peers: list[PeerDocument] = Field(description="Joined sidecars, ordered by rank")
    ticket: str = Field(description="Signed; role reader; goes into gRPC metadata, nowhere else")
    ticket_expires_s: float = Field(description="Seconds since the Unix epoch")


class RankDocument(BaseModel):
    """One rank as its sidecar last reported it. Counters are -1 or 0 before the first report."""

    rank: int
    membership: str = Field(description="missing, joined, silent, gone or left")
    state: str = Field(description="ok, starting, degraded, down or ended")
    reason: str = Field(description="What is not as it should be; empty when all is well")
    age_s: float = Field(description="Seconds since the report, or since the stream ended")
    phase: str = Field(
        description="waiting, idle, forward_backward, update, summon, held, stalled, orphaned, "
        "torn, constant (an older sidecar's word) or unspecified"
    )
    step: int = Field(description="Finished updates; -1 before the first report")
    trainer_pid: int
    sidecar_pid: int
    step_time_ns: int = Field(description="Smoothed time between two boundaries")
    boundary_age_ns: int = Field(description="Time since the last boundary when reported; or -1")
    stall_count: int = Field(description="Updates that waited for a copy")
    stall_total_ns: int
    stall_max_ns: int
    abandoned_copy_count: int
    arena_bytes: int
    snapshot_bytes: int
    snapshot_count: int
    sidecar_rss_bytes: int = Field(description="Resident memory of the sidecar's process")
    trainer_rss_bytes: int = Field(description="Of the trainer's; 0 when it cannot be read")
    agreement_works: bool
    agreement_reason: str
    hold_left_ms: int = Field(description="Left of the lease of a hold; 0 when it is in none")
    hold_steps_left: int = Field(description="Boundaries that held training may still pass")
    edits: int = Field(description="Edits applied in this epoch")
    edit_bytes: int = Field(description="Memory of staged edits and of what undoes applied ones")
    alerts: list[str] = Field(description="Ids of what the sidecar itself finds wrong")
    version: str = Field(description="Version of the sidecar's paramd")


class RankList(BaseModel):
    """All ranks of the epoch, ordered by rank."""

    epoch: int
    stall_budget_s: float = Field(description="Longest that an update may wait for a copy")
    ranks: list[RankDocument]
