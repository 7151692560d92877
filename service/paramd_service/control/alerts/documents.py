"""An alert as JSON: the same for REST, events and webhooks."""

from __future__ import annotations

from pydantic import BaseModel, Field

from paramd_service.control.alerts.book import Alert


class AlertDocument(BaseModel):
    """One trouble, from its first to its last sight."""

    id: str
    job: str
    epoch: int
    rule: str = Field(
        description="non-finite, norm-jump, replica-drift, stale-rank, stalled-rank, straggler, "
        "stall-budget, layout-mismatch or certificate"
    )
    subject: str = Field(description="What it is about: a rank, a tensor, the mesh")
    severity: str = Field(description="warning or critical")
    state: str = Field(description="firing or resolved")
    reason: str = Field(description="In words; names ranks and tensors, never values")
    ranks: list[int] = Field(description="Ranks it is about")
    fqn: str = Field(description="Tensor it is about; empty when about none")
    step: int = Field(description="Step it was last found at; -1 when about none")
    first_seen_s: float = Field(description="Seconds since the Unix epoch, as the next two")
    last_seen_s: float
    resolved_s: float | None = Field(description="null while it fires")
    seen_count: int = Field(description="How often it was found")


def document(alert: Alert) -> AlertDocument:
    """The alert for programs."""
    found = alert.finding
    return AlertDocument(
        id=alert.id,
        job=alert.job,
        epoch=alert.epoch,
        rule=found.rule.value,
        subject=found.subject,
        severity=found.severity.value,
        state=alert.state.value,
        reason=found.reason,
        ranks=list(found.ranks),
        fqn=found.fqn,
        step=found.step,
        first_seen_s=alert.first_seen_s,
        last_seen_s=alert.last_seen_s,
        resolved_s=alert.resolved_s,
        seen_count=alert.seen_count,
    )
