"""What the routes work with, bundled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paramd_service.control.access.authority import Denied, Sessions, Tokens, no_audit
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
    """Parts of one control plane, made by main and used by the routes."""

    config: ControlConfig
    listen_host: str
    """Host that HTTP listens on."""
    grpc_address: str
    """gRPC target of this control plane."""
    jobs: Jobs
    """`jobs.get(job)` is the job's `Incarnation`: registry, layouts, statistics, bootstrap."""
    metrics: Metrics
    watchers: Watchers
    """`watchers.get(job)` knows the job's alerts."""
    tokens: Tokens
    """`tokens.principal(offered)`: whose token it is."""
    revocations: Revocations
    """Whose tokens are good no more; told to sidecars, and to streams of REST."""
    records: Records
    """Store, audit and metric history."""
    exports: ExportService
    """Exports, their schedules and destinations."""
    edits: EditRegistry
    """`edits.service(job)`: where edits of the job are asked for; `edits.hold(job)`: its hold."""
    failures: FailureLimit
    events: EventBus
    """`events.publish(kind, data, job=)`: what viewers of the job are told at once."""
    stopping: Callable[[], bool]
    """True once it drains."""
    tls: ServerTls | None = None
    """None: plain HTTP and gRPC, on loopback."""
    doorway: Doorway = field(default_factory=Doorway)
    """Connections of REST: who has shown a good token."""
    sessions: Sessions = field(default_factory=Sessions)
    """Those of browsers."""
    denied: Denied = no_audit
    """Is told of every refused request."""
