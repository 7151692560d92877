"""The parts of each process, by name: a subject is in a process if it is in its list."""

from __future__ import annotations

from typing import Final

SIDECAR: Final = (
    "paramd_service.resume.sidecar:Resume",
    "paramd_service.edits.sidecar:RankEdits",
    "paramd_service.insight.sidecar:Insight",
    "paramd_service.hosts.sidecar:Hosts",
    "paramd_service.statistics.sidecar:Statistics",
    "paramd_service.follow.sidecar:Follow",
    "paramd_service.exports.sidecar:Exports",
    "paramd_service.gateway.sidecar:Gateway",
)
"""Parts of a sidecar. Their methods are called in this order."""

CONTROL: Final = (
    "paramd_service.insight.control:Insight",
    "paramd_service.edits.control:Edits",
    "paramd_service.alerts.control:Alerts",
    "paramd_service.exports.control:Exports",
    "paramd_service.audit.control:Audit",
)
"""Parts of a control plane. They close in the reverse order."""
