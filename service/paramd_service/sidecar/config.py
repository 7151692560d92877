"""Settings of one sidecar."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paramd.errors import UsageError
from paramd.places import check_job_name
from paramd.wire import LEASE_S, MAX_LEASE_S
from paramd_service.tls import TlsFiles, check_exposure, tls_files


@dataclass(frozen=True, kw_only=True)
class SidecarConfig:
    """Settings of a sidecar before a trainer attaches. Contains no secrets."""

    job: str
    """Name of the job."""
    rank: int
    """Rank whose parameters it owns; 0 or more."""
    socket_path: Path
    """Unix socket for the handover, in a private directory with mode 0700."""
    listen: str = "127.0.0.1:0"
    """gRPC address "host:port"; port 0 picks a free one. Beyond loopback only with TLS."""
    stream_port: int = 0
    """TCP port of bulk streams, on the same host; 0 picks a free one, as when it is taken."""
    advertise: str = ""
    """Host that others connect to; empty: the one it listens on."""
    tls_cert: str = ""
    """Server certificate file, with its chain; empty: PARAMD_TLS_CERT."""
    tls_key: str = ""
    """Private key file; empty: PARAMD_TLS_KEY."""
    tls_client_ca: str = ""
    """CA that must have issued client certificates; empty: PARAMD_TLS_CLIENT_CA."""
    job_tls: bool = False
    """Serve mutual TLS within the job; the trainer passes its certificate on stdin first."""
    linger_s: float = 600.0
    """How long to keep serving after the trainer ends, or to wait for the first one; above 0."""
    trainer_pid: int = 0
    """The trainer that started this sidecar: if it ends before any has attached, the sidecar ends.
    0: started by something else."""
    budget_bytes: int | None = None
    """Snapshot budget, above 0; None: three times the arena plus 1 MiB. A third is reserved for
    the control plane and the owner; one token gets at most a third."""
    default_lease_s: float = LEASE_S
    """Lease of a snapshot if the request names none; above 0."""
    max_lease_s: float = MAX_LEASE_S
    """Longest lease granted; at least `default_lease_s`."""
    grace_s: float = 5.0
    """How long running calls get to finish while draining; 0 or more."""
    max_calls: int = 64
    """Concurrent calls; any beyond are refused; 1 or more."""
    max_deadline_s: float = 600.0
    """Longest deadline of a call; above 0."""
    idle_memory_s: float = 60.0
    """How long freed snapshot memory is kept for reuse; 0 or more."""
    edit_pool_bytes: int = 16 << 20
    """Shared memory kept ready for small edits, capped at about the arena's size; 0 or more."""
    edit_budget_bytes: int | None = None
    """Budget of edits not yet applied; None: three times the arena plus 64 MiB. One token gets
    at most three eighths."""
    undo_budget_bytes: int = 256 << 20
    """Budget of bytes kept to undo applied edits; 0 or more."""
    standing_budget_bytes: int | None = None
    """Budget of standing snapshots, including those of other ranks; None: all memory of the
    machine, up to two of the whole state of this rank and of each rank whose copies it keeps."""
    copy_rate_bytes: int = 64 << 20
    """Most bytes a second at which standing snapshots are sent to another host; above 0."""
    marks_budget_bytes: int | None = None
    """Budget of marks; None: all memory of the machine but the reserve."""
    delta_budget_bytes: int | None = None
    """Budget of states kept for followers that read deltas, 0 or more; None: twice the arena plus
    1 MiB, for the state that they have and the next one."""
    host_reserve: int | None = None
    """Bytes of the host's memory, and of each cgroup's, that stay free for the training, 0 or more;
    None: 5 % of it, or what a step of the training has been seen to take, if that is more."""
    edit_expiry_s: float = 600.0
    """How long an untouched staged edit is kept; above 0."""
    report_s: float = 2.0
    """Interval of reports to the control plane; above 0."""

    def __post_init__(self) -> None:
        check_job_name(self.job)
        check_listen(self.listen, tls=self.job_tls or self.tls_files is not None)
        if not 0 <= self.stream_port <= 65535:
            raise UsageError(f"stream_port: {self.stream_port}; expected 0 to 65535")
        not_negative = (
            "rank",
            "grace_s",
            "idle_memory_s",
            "edit_pool_bytes",
            "undo_budget_bytes",
            "trainer_pid",
            "delta_budget_bytes",
            "host_reserve",
        )
        for name, least in (*((name, 0) for name in not_negative), ("max_calls", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise UsageError(f"{name}: {value}; expected {least} or more")
        above = (
            "linger_s",
            "default_lease_s",
            "max_deadline_s",
            "report_s",
            "edit_expiry_s",
            "copy_rate_bytes",
            "budget_bytes",
            "edit_budget_bytes",
            "standing_budget_bytes",
            "marks_budget_bytes",
        )
        for name in above:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UsageError(f"{name}: {value}; expected a number above 0")
        if self.max_lease_s < self.default_lease_s:
            raise UsageError(
                f"max_lease_s: {self.max_lease_s}; expected at least default_lease_s "
                f"({self.default_lease_s})"
            )

    @property
    def tls_files(self) -> TlsFiles | None:
        """The TLS files; None without TLS. Raises UsageError if one is missing."""
        return tls_files(self.tls_cert, self.tls_key, self.tls_client_ca)


def check_listen(listen: str, *, tls: bool) -> None:
    """Raise UsageError unless `listen` is host:port, and loopback unless there is TLS."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise UsageError(f"listen: {listen!r}; expected host:port, for example 127.0.0.1:0")
    check_exposure(host, option="listen", tls=tls)
