"""Documents of the REST side, as OpenAPI describes them."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Problem(BaseModel):
    """An error, after RFC 9457 (application/problem+json)."""

    type: str = Field(description="urn:paramd:error:<reason>, stable; what programs look at")
    title: str = Field(description="The HTTP status in words")
    status: int = Field(description="HTTP status")
    detail: str = Field(description="What was wrong, what was expected, what to do next")


class JobSummary(BaseModel):
    """One job that this control plane serves."""

    job: str = Field(description="Name of the job")
    epoch: int = Field(description="Incarnation of the job")
    world_size: int = Field(description="Ranks of the mesh")
    joined_count: int = Field(description="Ranks whose sidecar is joined now")
    step: int = Field(description="Lowest step that a joined rank reported; -1 when none is")
    reason: str = Field(description="Why the mesh is degraded; empty when it is not")


class JobList(BaseModel):
    """All jobs of this control plane."""

    jobs: list[JobSummary]


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
    reason: str = Field(description="What is not as it should be; empty when all is well")
    age_s: float = Field(description="Seconds since the report, or since the stream ended")
    phase: str = Field(description="waiting, constant, update, orphaned, torn or unspecified")
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
    agreement_works: bool
    agreement_reason: str
    version: str = Field(description="Version of the sidecar's paramd")


class RankList(BaseModel):
    """All ranks of the epoch, ordered by rank."""

    epoch: int
    ranks: list[RankDocument]


class ParamDocument(BaseModel):
    """One full parameter or buffer."""

    fqn: str = Field(description="Name, as a user's state_dict has it")
    aliases: list[str] = Field(description="Further names of the same tensor")
    dtype: str = Field(description="torch dtype without its prefix")
    shape: list[int] = Field(description="Full, unsharded shape")
    numel: int
    kind: str = Field(description="parameter or buffer")
    placement: str = Field(description="How it is distributed, in words")


class ParamPage(BaseModel):
    """A page of parameters, in the order of the module tree."""

    layout_digest: str
    total_count: int = Field(description="Tensors that match, on all pages")
    params: list[ParamDocument]
    next_page_token: str = Field(description="Ask with it for the next page; empty at the end")


class StatsDocument(BaseModel):
    """Statistics of one full tensor; replicas count once. null: not a number."""

    name: str = Field(description='Name it was found by, or "total"')
    dtype: str
    shape: list[int]
    count: int = Field(description="Elements")
    zero_count: int
    nan_count: int
    inf_count: int
    norm: float | None = Field(description="Of the finite elements, like all that follow")
    mean: float | None
    std: float | None = Field(description="Unbiased")
    min: float | None
    max: float | None
    exponents: list[tuple[int, int]] = Field(
        description="[e, count] of elements with 2**e <= |x| < 2**(e+1), rising; "
        "empty unless asked for"
    )


class StatsList(BaseModel):
    """Statistics of tensors, all at one step."""

    epoch: int
    step: int = Field(description="The step that all numbers belong to")
    stats: list[StatsDocument]
    total: StatsDocument = Field(description="Over all elements of all tensors above")
