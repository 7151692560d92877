"""Request and response bodies of the REST API that several routes share.

In order: parameters and their statistics, snapshots, jobs and ranks.
Descriptions appear in the OpenAPI document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from paramd.layout.stats import STATISTICS
from paramd.mesh.peers.control import PeerAddress
from paramd.places import IncarnationRecord
from paramd.wire import LEASE_S, MAX_LEASE_S


class Request(BaseModel):
    """A body without unknown members."""

    model_config = ConfigDict(extra="forbid")


class WaitRequest(Request):
    """How long to wait."""

    wait_s: float = Field(
        30.0, ge=0, le=300, allow_inf_nan=False, description="Seconds to wait for it to end"
    )


_PARAM = {
    "name": "layers.0.up.weight",
    "aliases": [],
    "dtype": "bfloat16",
    "shape": [4096, 1024],
    "numel": 4194304,
    "kind": "parameter",
    "placement": "Shard(0) over 2",
}


def _example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


class ParamDocument(BaseModel):
    """One full parameter or buffer."""

    name: str = Field(description="As in the user's state_dict")
    aliases: list[str] = Field(description="Further names of the same tensor")
    dtype: str = Field(description="torch dtype without its prefix")
    shape: list[int] = Field(description="Full, unsharded shape")
    numel: int
    kind: str = Field(description="parameter or buffer")
    placement: str = Field(description="How it is distributed, for humans")
    trainable: bool | None = Field(
        description="Whether it required a gradient when the job was attached; null for buffers, "
        "and where it is not known"
    )


UNSETTLED = (
    "Training has not continued since that update, so its script may still change the values"
)


class MissingDocument(BaseModel):
    """A tensor that is not available now, and why."""

    name: str
    ranks: list[int] = Field(description="Unavailable ranks that alone hold a part of it")
    reason: str


class ParamPage(BaseModel):
    """A page of parameters, in module order."""

    layout_digest: str
    total_count: int = Field(description="Matching tensors on all pages")
    params: list[ParamDocument]
    next_page_token: str = Field(description="Pass it to get the next page; empty at the end")
    incarnation: int = Field(description="Run of the filter's statistics; -1 for none")
    step: int = Field(description="Step of those statistics, equal on all pages; -1 for none")
    unsettled: bool = Field(default=False, description=UNSETTLED)
    partial: bool = Field(description="Whether tensors are missing")
    missing: list[MissingDocument]

    model_config = _example(
        layout_digest="5b1c",
        total_count=2,
        params=[_PARAM],
        next_page_token="MTo6NWIxYw==",
        incarnation=-1,
        step=-1,
        partial=False,
        missing=[],
    )


class PieceDocument(BaseModel):
    """One region of a tensor that one rank holds."""

    rank: int
    region: str = Field(description="box of the full tensor, or interval of the flattened one")
    begin: list[int] = Field(description="First index in every dim, or the first element")
    end: list[int] = Field(description="One past the last, likewise")
    numel: int
    size_bytes: int


class ParamDetail(ParamDocument):
    """A tensor and which rank holds which part of it."""

    layout_digest: str
    piece_count: int
    pieces: list[PieceDocument] = Field(description="Ordered by rank; at most 4,096")


def _statistic_fields() -> dict[str, Any]:
    """Fields of a model for all statistics, counts first."""
    counts = [one for one in STATISTICS if one.kind is int]
    numbers = [one for one in STATISTICS if one.kind is not int]
    fields: dict[str, Any] = {}
    for one in counts:
        fields[one.name] = (int, Field(description=one.about or None))
    for one in numbers:
        fields[one.name] = (float | None, Field(description=one.about or None))
    return fields


if TYPE_CHECKING:
    from paramd_service.control.mesh.health import Verdict

    _Numbers = BaseModel
else:
    _Numbers = create_model(
        "_Numbers",
        name=(str, Field(description='Name that matched, or "total"')),
        dtype=(str, ...),
        shape=(list[int], ...),
        count=(int, Field(description="Elements")),
        **_statistic_fields(),
    )


class StatsDocument(_Numbers):
    """Statistics of one full tensor; replicas count once. null: NaN or infinite."""

    exponents: list[list[int]] = Field(
        description="[e, count] of elements with 2**e <= |x| < 2**(e+1), ascending; "
        "empty unless requested"
    )


class StatsList(BaseModel):
    """Statistics of tensors, all at one step."""

    incarnation: int
    step: int = Field(description="Step of all numbers")
    unsettled: bool = Field(default=False, description=UNSETTLED)
    stats: list[StatsDocument]
    total: StatsDocument = Field(
        description="Over all tensors that globs and facts select, without the missing ones"
    )
    partial: bool = Field(description="Whether tensors are missing")
    missing: list[MissingDocument]


class HistogramDocument(BaseModel):
    """Histogram of one tensor at one step."""

    incarnation: int
    step: int
    unsettled: bool = Field(default=False, description=UNSETTLED)
    name: str
    edges: list[float] = Field(description="Ascending; bin i is edges[i] <= x < edges[i+1]")
    counts: list[int] = Field(description="One per bin: one fewer than edges")
    below_count: int = Field(description="Finite elements below the first edge")
    above_count: int = Field(description="Finite elements at or above the last edge")
    nan_count: int
    inf_count: int

    model_config = _example(
        incarnation=3,
        step=1200,
        name="layers.0.up.weight",
        edges=[-1.0, 0.0, 1.0],
        counts=[2047, 2049],
        below_count=0,
        above_count=0,
        nan_count=0,
        inf_count=0,
    )


class HeatmapDocument(BaseModel):
    """Heat map of a tensor at one step: a matrix reduced to cells."""

    incarnation: int
    step: int
    unsettled: bool = Field(default=False, description=UNSETTLED)
    name: str
    mode: str
    shape: list[int] = Field(description="Shape of the tensor or slice shown")
    row_dims: int = Field(description="Leading dims that form the rows; the others form columns")
    row_count: int = Field(description="Rows of the matrix")
    col_count: int = Field(description="Columns of the matrix")
    cell_row_count: int = Field(
        description="Rows of cells; row r of the matrix is in floor(r * this / row_count)"
    )
    cell_col_count: int
    values: list[float | None] = Field(
        description="Row-major, 7 digits; over the finite elements, null if there are none"
    )
    nonfinite: list[list[int]] = Field(
        description="[row, column, count] of cells with NaN or infinite elements"
    )

    model_config = _example(
        incarnation=3,
        step=1200,
        name="layers.0.up.weight",
        mode="mean",
        shape=[2, 4],
        row_dims=1,
        row_count=2,
        col_count=4,
        cell_row_count=1,
        cell_col_count=2,
        values=[0.5, -0.25],
        nonfinite=[],
    )


class ValuesDocument(BaseModel):
    """Elements of one tensor or a slice of it, at one step."""

    incarnation: int
    step: int
    unsettled: bool = Field(default=False, description=UNSETTLED)
    name: str
    dtype: str
    begin: list[int] = Field(description="First index in every dim of the full tensor")
    shape: list[int]
    values: list[str] = Field(
        description='Row-major; each text converts back exactly: "0.5", "nan", "-inf", '
        '"9007199254740993", "true", "1.0+2.0j"'
    )

    model_config = _example(
        incarnation=3,
        step=1200,
        name="norm.weight",
        dtype="bfloat16",
        begin=[0],
        shape=[2],
        values=["1.0", "0.99609375"],
    )


class SnapshotRequest(Request):
    """Which tensors to pin, and for how long."""

    filter: str = Field(
        min_length=1, max_length=1024, description="Globs, and terms about facts", examples=["*"]
    )
    buffers: bool = False
    lease_s: float = Field(default=LEASE_S, ge=1, le=MAX_LEASE_S, description="Seconds")


class LeaseRequest(Request):
    """A lease's new length."""

    lease_s: float = Field(default=LEASE_S, ge=1, le=MAX_LEASE_S, description="Seconds from now")


class RankPinDocument(BaseModel):
    """One rank's part of a snapshot."""

    rank: int
    snapshot_id: str = Field(description="For ReadSnapshot of that rank's sidecar")
    size_bytes: int


class HeldDocument(BaseModel):
    """A snapshot of all needed ranks at one step, held until its lease ends."""

    id: str
    filter: str
    incarnation: int
    step: int
    unsettled: bool = Field(default=False, description=UNSETTLED)
    lease_left_s: float
    size_bytes: int
    pins: list[RankPinDocument]


class LeaseDocument(BaseModel):
    """One lease at a sidecar, of any client."""

    name: str = Field(description="First 8 characters of the snapshot's id")
    step: int = Field(description="-1 until the bytes are copied")
    size_bytes: int
    lease_left_ms: int
    at_boundary: bool


class RankSnapshots(BaseModel):
    """Leases at one rank's sidecar."""

    rank: int
    reason: str = Field(description="Why the sidecar did not answer; empty if it did")
    lease_count: int
    used_bytes: int
    budget_bytes: int
    snapshots: list[LeaseDocument]


class SnapshotList(BaseModel):
    """Snapshots held over REST, and all leases at all ranks."""

    held: list[HeldDocument]
    ranks: list[RankSnapshots] = Field(description="Ordered by rank")
    partial: bool = Field(description="Whether a rank did not answer")
    next_page_token: str = Field(description="Pass it to get further ranks; empty at the end")


class WatchDocument(BaseModel):
    """One thing that is watched, or is not."""

    what: str = Field(description="values, gradients or slow ranks")
    state: str = Field(description="on, warming up, off or failing")
    every_s: float = Field(description="Seconds between two checks; 0 when it is off")
    age_s: float | None = Field(description="Seconds since the last check; null before the first")
    text: str = Field(description='In words: "values checked every 40 s, last 12 s ago"')
    turn_on: str = Field(description="The command that turns it on; empty when it is on")


class VerdictDocument(BaseModel):
    """What is to be said of a job now; the page, the command line and metrics say the same."""

    level: str = Field(description="ok, info, warning, critical or ended: its color")
    word: str = Field(
        description="ok, running (nothing is wrong, but not all is watched), starting, paused, "
        "warning, degraded, critical, down or ended"
    )
    line: str = Field(
        description="What is wrong, with which rank or layer, since which step; or what was looked "
        "at. Never empty"
    )
    cause: str = Field(description="Id of the alert of the line; empty: none fires")
    more: list[str] = Field(description="The other firing alerts in words, worst first")
    ranks: list[int] = Field(description="Ranks that firing alerts name")
    names: list[str] = Field(description="Tensors that firing alerts name")
    step: int = Field(description="Since which step; -1 when unknown")
    watches: list[WatchDocument] = Field(description="What is watched, and what is not")

    @classmethod
    def of(cls, verdict: Verdict) -> VerdictDocument:
        """The document of a verdict."""
        watches = [
            WatchDocument(
                what=one.what,
                state=one.state.value,
                every_s=one.every_s,
                age_s=one.age_s,
                text=one.text,
                turn_on=one.turn_on,
            )
            for one in verdict.watches
        ]
        return cls(
            level=verdict.level,
            word=verdict.word,
            line=verdict.line,
            cause=verdict.cause,
            more=list(verdict.more),
            ranks=list(verdict.ranks),
            names=list(verdict.names),
            step=verdict.step,
            watches=watches,
        )


class JobSummary(BaseModel):
    """One job of this control plane."""

    job: str = Field(description="Name of the job")
    incarnation: int = Field(description="Last run of the job")
    world_size: int = Field(description="Ranks of the mesh")
    joined_count: int = Field(description="Ranks whose sidecar is joined now")
    alive_count: int = Field(description="Ranks whose trainer is known to be alive")
    step: int = Field(description="Lowest step reported by a joined rank; -1 when none is joined")
    state: str = Field(
        description="ok, starting, degraded, down, finished (its last step is served) or ended"
    )
    reason: str = Field(description="Why the state is not ok; empty when it is")
    pause: str = Field(
        description="running, paused or stepping, as the ranks last reported; see get_pause"
    )
    health: str = Field(description="The verdict's word")
    why: str = Field(description="The verdict's line; empty when the word is ok")
    cause: str = Field(description="The verdict's alert")
    verdict: VerdictDocument
    critical_count: int = Field(description="Critical alerts firing")
    warning_count: int = Field(description="Other alerts firing")


class JobList(BaseModel):
    """All jobs of this control plane."""

    jobs: list[JobSummary]


class JobRegistration(BaseModel):
    """A job that attaches."""

    job: str = Field(description="Name: letters, digits, . _ -", min_length=1, max_length=64)
    world_size: int = Field(description="Ranks of the mesh", ge=1, le=65_536)
    incarnation_floor: int = Field(
        0, description="The new run is above this one", ge=0, le=1_000_000_000_000
    )
    succeeds: int = Field(
        0,
        description="Present run of a training that continues in the new one; 0: the job starts",
        ge=0,
        le=1_000_000_000_000,
    )
    rank_hosts: list[str] = Field(
        default_factory=list,
        max_length=65_536,
        description="Name or address of each rank, if ranks on several hosts need certificates",
    )


class TlsDocument(BaseModel):
    """A certificate of a job's own CA, with its key: never log it. PEM."""

    ca: str = Field(description="The CA's certificate")
    cert: str
    key: str = Field(description="Private key of cert")


class RegisteredJob(BaseModel):
    """What the ranks of a new run need. Contains tickets: never log it."""

    job: str
    incarnation: int = Field(description="Number of the new run")
    control_address: str = Field(description='gRPC target "host:port" that sidecars join')
    public_key: str = Field(description="Verifies the run's tickets; hexadecimal")
    rank_tickets: list[str] = Field(description="By rank; lets a sidecar join as that rank")
    copy_tickets: list[str] = Field(
        default_factory=list,
        description="By rank; lets a sidecar send copies of its standing snapshots to another host",
    )
    rank_tls: list[TlsDocument] = Field(
        default_factory=list, description="By rank; empty unless rank_hosts were given"
    )


class IncarnationList(BaseModel):
    """Incarnations of a job, oldest first."""

    incarnations: list[IncarnationRecord]


class JobDocument(JobSummary):
    """A job, its sidecars' addresses, and a ticket for them."""

    layout_digest: str = Field(description="Current layout; empty until one is agreed")
    control_address: str = Field(description='gRPC target "host:port" of the control plane')
    peers: list[PeerAddress] = Field(description="Joined sidecars, ordered by rank")
    ticket: str = Field(description="Signed, with the token's rights; for gRPC metadata only")
    ticket_seed: str = Field(
        description="Seed of the servers' keys; each server sees only its own; empty with `rank`"
    )
    reads: str = Field(
        "", description="With `gather`: the rank's ticket to read others, for metadata paramd-reads"
    )
    ticket_expires_s: float = Field(description="Seconds since the Unix epoch")
    tls: TlsDocument | None = Field(
        None, description="Certificates for mtls:// addresses; null when there are none"
    )


class DeviceDocument(BaseModel):
    """A GPU, as NVML tells of it. Numbers are -1 where it does not tell."""

    index: int
    name: str
    busy: float = Field(description="Share of the time that a kernel ran")
    clock_mhz: int
    most_clock_mhz: int
    throttled: list[str] = Field(
        description="Why its clock is held down: heat, power, hardware or synchronized"
    )
    celsius: int
    used_bytes: int
    memory_bytes: int
    ecc_errors: int = Field(description="Uncorrected, since the driver began")
    xid: int = Field(description="The last Xid error since the sidecar began; 0 for none")


class HostDocument(BaseModel):
    """What a rank's sidecar sees of its host between two samples. Shares are from 0 to 1; numbers
    are -1 where the host does not tell."""

    age_ms: int
    window_ms: int = Field(description="Time between the two samples")
    processors: int
    busy: float = Field(description="Share of all processors in use")
    others: float = Field(description="Share of them that processes of others use")
    stolen: float = Field(description="Share of them that the hypervisor takes")
    disk_wait: float = Field(description="Share of them that waits for disks")
    trainer_processors: float = Field(description="Processors that the trainer uses")
    trainer_delay: float = Field(
        description="Share of the time that the trainer's main thread is ready without a processor"
    )
    memory_available_bytes: int
    memory_bytes: int
    memory_pressure: float = Field(description="Share of the time that a process waits for memory")
    swap_in_bytes_s: float
    swap_out_bytes_s: float
    disk_busy: float = Field(description="Share of the time that the busiest disk is busy")
    network_bytes_s: float
    network_lost_s: float = Field(description="Packets dropped or damaged per second")
    retransmits_s: float = Field(description="TCP segments sent again per second")
    clock_jump_ms: int = Field(description="Jump of the wall clock since the sidecar began")
    why: str = Field(description="Which of these may slow the rank; empty when none")
    devices: list[DeviceDocument]


class RankDocument(BaseModel):
    """One rank as last reported by its sidecar. Counters are -1 or 0 before the first report."""

    rank: int
    membership: str = Field(description="missing, joined, silent, gone or left")
    state: str = Field(
        description="ok, starting, degraded, down, finished (its last step is served) or ended"
    )
    reason: str = Field(description="Why the state is not ok; empty when it is")
    age_s: float = Field(description="Seconds since the last report, or since the stream ended")
    phase: str = Field(
        description="waiting, idle, forward_backward, update, summon, paused, stalled, orphaned, "
        "torn, constant (an older sidecar's word) or unspecified"
    )
    step: int = Field(description="Finished updates; -1 before the first report")
    trainer_pid: int
    sidecar_pid: int
    step_time_ns: int = Field(description="Smoothed time between two boundaries")
    boundary_age_ns: int = Field(description="Time from the last boundary to the report; or -1")
    stall_count: int = Field(description="Updates that waited for a copy")
    stall_total_ns: int
    stall_max_ns: int
    abandoned_copy_count: int
    arena_bytes: int
    snapshot_bytes: int
    snapshot_count: int
    sidecar_rss_bytes: int = Field(description="Resident memory of the sidecar")
    trainer_rss_bytes: int = Field(description="Resident memory of the trainer; 0 when unknown")
    agreement_works: bool
    agreement_reason: str
    pause_left_ms: int = Field(description="Time left of a pause's lease; 0 when not paused")
    pause_steps_left: int = Field(description="Boundaries that paused training may still pass")
    edits: int = Field(description="Edits applied in this run")
    edit_bytes: int = Field(description="Memory of staged edits and of undo data")
    alerts: list[str] = Field(description="Ids of problems the sidecar itself detects")
    version: str = Field(description="Version of the sidecar's paramd")
    host: HostDocument | None = Field(
        description="Its host and GPUs, and why they may slow it; null before the second sample"
    )


class RankList(BaseModel):
    """All ranks of the run, ordered by rank."""

    incarnation: int
    stall_budget_s: float = Field(description="Longest time an update may wait for a copy")
    ranks: list[RankDocument]
