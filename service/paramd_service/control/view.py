"""What the reports add up to: the mesh as a whole, with a reason for each rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from paramd.v1 import common_pb2

_PHASE_REASONS = {
    common_pb2.PHASE_WAITING: "no trainer has attached yet",
    common_pb2.PHASE_ORPHANED: "its trainer has ended; its last step is still served",
    common_pb2.PHASE_TORN: "its trainer ended inside an update; its parameters are refused",
}


class Membership(Enum):
    """How a rank's sidecar stands to this control plane."""

    MISSING = "missing"
    """It has never joined in this epoch."""
    JOINED = "joined"
    """Its stream is open and it reports."""
    SILENT = "silent"
    """Its stream is open, but the last report is old: stopped, hung or cut off."""
    GONE = "gone"
    """Its stream ended without a farewell: killed, or its host is gone."""
    LEFT = "left"
    """It said farewell: the trainer detached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The last thing one sidecar said."""

    rank: int
    step: int
    layout_digest: str
    peer: common_pb2.Peer
    state: common_pb2.RankState
    version: str
    leaving: bool
    connected: bool
    """Its stream is open."""
    changed_s: float
    """When it was received, or when the stream ended; on the monotonic clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankView:
    """One rank, with the reason when something is not as it should be."""

    rank: int
    membership: Membership
    reason: str
    """Empty when all is well."""
    report: Report | None
    age_s: float
    """Seconds since `report.changed_s`; 0 when there is none."""

    @property
    def connected(self) -> bool:
        """Its stream is open, so it may be called. Silence alone does not forbid that."""
        return self.membership in (Membership.JOINED, Membership.SILENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshView:
    """All ranks of the epoch, ordered by rank."""

    ranks: tuple[RankView, ...]
    layout_digest: str
    """What all connected ranks report; empty when none does or they differ."""
    reason: str
    """Why the mesh as a whole is degraded; empty when it is not."""

    @property
    def joined(self) -> tuple[Report, ...]:
        """Reports of the ranks that may be called, ordered by rank."""
        return tuple(r.report for r in self.ranks if r.connected and r.report is not None)

    @property
    def absent(self) -> tuple[RankView, ...]:
        """Ranks that cannot be called."""
        return tuple(rank for rank in self.ranks if not rank.connected)

    @property
    def highest_boundary(self) -> int:
        """Highest boundary request any rank was ever ready for."""
        return max((report.state.ready_boundary for report in self.joined), default=0)


def mesh_view(
    reports: Mapping[int, Report], *, world_size: int, now_s: float, silent_after_s: float
) -> MeshView:
    """The mesh at `now_s` (monotonic), as the reports by rank tell it."""
    ranks = tuple(_rank_view(r, reports.get(r), now_s, silent_after_s) for r in range(world_size))
    digests = {
        rank.report.layout_digest
        for rank in ranks
        if rank.connected and rank.report is not None and rank.report.layout_digest
    }
    return MeshView(
        ranks=ranks,
        layout_digest=next(iter(digests)) if len(digests) == 1 else "",
        reason=_mesh_reason(ranks, len(digests)),
    )


def listed(ranks: Sequence[int]) -> str:
    """Ranks in words, the first eight by number."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} ranks)"


def why_end(
    view: MeshView, *, empty_since_s: float | None, now_s: float, empty_end_s: float
) -> str | None:
    """Why a control plane has nothing left to do, or None. `empty_since_s`: see Registry."""
    if all(rank.membership is Membership.LEFT for rank in view.ranks):
        return f"all {len(view.ranks)} ranks have detached"
    if empty_since_s is not None and now_s - empty_since_s >= empty_end_s:
        return f"no sidecar has been joined for {empty_end_s:g} s"
    return None


def _rank_view(rank: int, report: Report | None, now_s: float, silent_after_s: float) -> RankView:
    age_s = max(now_s - report.changed_s, 0.0) if report is not None else 0.0
    membership, reason = _standing(report, age_s, silent_after_s)
    return RankView(rank=rank, membership=membership, reason=reason, report=report, age_s=age_s)


def _standing(report: Report | None, age_s: float, silent_after_s: float) -> tuple[Membership, str]:
    if report is None:
        return Membership.MISSING, "its sidecar has not joined"
    if report.leaving:
        return Membership.LEFT, "its trainer has detached"
    if not report.connected:
        return Membership.GONE, f"its sidecar was lost {age_s:.0f} s ago"
    if age_s > silent_after_s:
        return Membership.SILENT, f"its sidecar has not reported for {age_s:.0f} s"
    reason = _PHASE_REASONS.get(report.state.phase, "")
    if not reason and not report.state.agreement_works:
        told = report.state.agreement_reason or "no reason given"
        reason = f"the trainers gave up agreeing: {told}"
    return Membership.JOINED, reason


def _mesh_reason(ranks: Sequence[RankView], digest_count: int) -> str:
    absent = [rank.rank for rank in ranks if not rank.connected]
    if absent:
        return f"{len(ranks) - len(absent)} of {len(ranks)} ranks are joined; not: {listed(absent)}"
    if digest_count > 1:
        return "the ranks report different layouts"
    troubled = [rank for rank in ranks if rank.reason]
    if troubled:
        also = f" (and {len(troubled) - 1} more)" if len(troubled) > 1 else ""
        return f"rank {troubled[0].rank}: {troubled[0].reason}{also}"
    return ""
