"""What the routes of a control plane use, in one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paramd_service.control.access.authority import Denied, Sessions, Tokens
from paramd_service.control.access.doorway import Doorway
from paramd_service.control.access.join import FailureLimit
from paramd_service.control.access.revocations import Revocations
from paramd_service.control.metrics.metrics import Metrics
from paramd_service.control.parts import ControlHost
from paramd_service.tls import ServerTls


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """Built once at start, shared by all routes."""

    host: ControlHost
    """What parts may reach, too: jobs, records, events, and the parts themselves."""
    listen_host: str
    """Host the HTTP server listens on."""
    metrics: Metrics
    tokens: Tokens
    """`tokens.principal(offered)` resolves a token to its principal."""
    revocations: Revocations
    """Revoked and expired tokens; sidecars and REST streams subscribe."""
    failures: FailureLimit
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
