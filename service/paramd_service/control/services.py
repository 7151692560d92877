"""What the routes work with, bundled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paramd_service.control.alerts.watchers import Watchers
from paramd_service.control.auth import FailureLimit
from paramd_service.control.config import ControlConfig
from paramd_service.control.edits.book import Edits
from paramd_service.control.events import EventBus
from paramd_service.control.exports.exports import Exports
from paramd_service.control.jobs import Jobs
from paramd_service.control.metrics import Metrics
from paramd_service.control.records import Records
from paramd_service.control.tokens.authority import Denied, Tokens, unheard
from paramd_service.control.tokens.revocations import Revocations
from paramd_service.control.tokens.sessions import Sessions
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
    exports: Exports
    """Exports, their schedules and destinations."""
    edits: Edits
    """`edits.desk(job)`: where edits of the job are asked for; `edits.hold(job)`: its hold."""
    failures: FailureLimit
    events: EventBus
    """`events.publish(kind, data, job=)`: what viewers of the job are told at once."""
    stopping: Callable[[], bool]
    """True once it drains."""
    tls: ServerTls | None = None
    """None: plain HTTP and gRPC, on loopback."""
    sessions: Sessions = field(default_factory=Sessions)
    """Those of browsers."""
    denied: Denied = unheard
    """Is told of every refused request."""
