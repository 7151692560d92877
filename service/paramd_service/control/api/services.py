"""The parts of a control plane that its routes use, in one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paramd_service.control.access.authority import Denied, Sessions, Tokens
from paramd_service.control.access.doorway import Doorway
from paramd_service.control.access.join import FailureLimit
from paramd_service.control.access.revocations import Revocations
from paramd_service.control.alerts.service import Watchers
from paramd_service.control.base.config import ControlConfig
from paramd_service.control.edits.service import EditRegistry
from paramd_service.control.exports.service import ExportService
from paramd_service.control.mesh.jobs import Jobs
from paramd_service.control.metrics.metrics import Metrics
from paramd_service.control.records.events import EventBus
from paramd_service.control.records.records import Records
from paramd_service.tls import ServerTls


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """Built once at start, shared by all routes."""

    config: ControlConfig
    listen_host: str
    """Host the HTTP server listens on."""
    grpc_address: str
    """gRPC target of this control plane."""
    jobs: Jobs
    """`jobs.get(job)` is the job's `Incarnation`: registry, layouts, statistics, bootstrap."""
    metrics: Metrics
    watchers: Watchers
    """`watchers.get(job)` holds the job's alerts."""
    tokens: Tokens
    """`tokens.principal(offered)` resolves a token to its principal."""
    revocations: Revocations
    """Revoked and expired tokens; sidecars and REST streams subscribe."""
    records: Records
    """Store, audit and metric history."""
    exports: ExportService
    """Exports, their schedules and destinations."""
    edits: EditRegistry
    """`edits.service(job)` runs the job's edits, `edits.pause(job)` its pause."""
    failures: FailureLimit
    events: EventBus
    """`events.publish(kind, data, job=)` pushes to all viewers of the job."""
    denied: Denied
    """Called for every refused request."""
    stopping: Callable[[], bool]
    """True while draining."""
    refusal: str = ""
    """Why all but the records is refused, of a job that has ended; empty while jobs are served."""
    tls: ServerTls | None = None
    """None: plain HTTP and gRPC, on loopback."""
    ca: bytes = b""
    """The job's own CA (PEM), if it signed our certificate."""
    doorway: Doorway = field(default_factory=Doorway)
    """REST connections, and which of them are authenticated."""
    sessions: Sessions = field(default_factory=Sessions)
    """Browser sessions."""
