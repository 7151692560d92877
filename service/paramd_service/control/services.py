"""What the routes work with, bundled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paramd_service.control.auth import FailureLimit, UserToken
from paramd_service.control.config import Bootstrap, ControlConfig
from paramd_service.control.events import EventBus
from paramd_service.control.metrics import Metrics
from paramd_service.control.registry import Registry
from paramd_service.control.sidecars import LayoutSource
from paramd_service.control.statistics import StatsSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """Parts of one control plane, made by main and used by the routes."""

    config: ControlConfig
    bootstrap: Bootstrap
    listen_host: str
    """Host that HTTP listens on."""
    grpc_address: str
    """gRPC target of this control plane."""
    registry: Registry
    layouts: LayoutSource
    statistics: StatsSource
    metrics: Metrics
    user_token: UserToken
    failures: FailureLimit
    events: EventBus
    """`events.publish(kind, data, job=)`: what viewers of the job are told at once."""
    stopping: Callable[[], bool]
    """True once it drains."""
