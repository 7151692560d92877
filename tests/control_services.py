"""A control plane as its routes see it, without servers and a store."""

from collections.abc import Sequence
from pathlib import Path

from paramd.parts import found
from paramd_service import parts
from paramd_service.control.access.authority import Tokens
from paramd_service.control.access.join import FailureLimit
from paramd_service.control.access.revocations import Revocations
from paramd_service.control.api.services import Services
from paramd_service.control.base.config import Bootstrap, ControlConfig
from paramd_service.control.mesh.jobs import ControlIdentity, Jobs
from paramd_service.control.metrics.metrics import LoopLag, Metrics
from paramd_service.control.parts import ControlHost, ControlPart
from paramd_service.control.records.events import EventBus
from paramd_service.control.records.records import Records
from tests.memory_stores import MemoryTokens

TOKEN = "a-token-of-the-user"
BOOTSTRAP = Bootstrap(job="run", incarnation=3, world_size=2, private_key=bytes(32), token=TOKEN)


def host(
    *, config: ControlConfig | None = None, names: Sequence[str] = parts.CONTROL
) -> ControlHost:
    """With one job, whose sidecars have not joined; its parts do not follow it."""
    jobs = Jobs(ControlIdentity(generation=1, silent_after_s=10.0), site=None)
    jobs.open(BOOTSTRAP)
    return ControlHost(
        config if config is not None else ControlConfig(job="run", no_watch=True),
        jobs=jobs,
        records=Records("", Path("/nonexistent"), chain="run"),
        events=EventBus(),
        parts=found(names, "control", ControlPart),
        grpc_address=lambda: "127.0.0.1:8471",
        # Of a job that trains, a folder for its exports would be made.
        shows_records=True,
    )


def services(of: ControlHost | None = None) -> Services:
    """With a token of the owner."""
    of = of if of is not None else host()
    return Services(
        host=of,
        listen_host="127.0.0.1",
        metrics=Metrics(host=of, lag=LoopLag(), tls=None),
        tokens=Tokens(TOKEN, MemoryTokens()),
        revocations=Revocations(ticket_ttl_s=600.0),
        denied=lambda *told: None,
        failures=FailureLimit(burst=1000.0),
        stopping=lambda: False,
    )
