"""Membership: each rank's latest report, fenced by epoch and by stream.

Storing a report is O(1) in the number of ranks; `view` is O(ranks).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from paramd.errors import ConflictError, UsageError
from paramd.mesh.asked import no_way
from paramd.security.tls import check_address
from paramd.state_files import host_id
from paramd.v1 import common_pb2, control_pb2
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.view import MeshView, RankView, Report, mesh_view, rank_views

MAX_TEXT_CHARS = 4096
"""Longest text field in a report."""

MAX_ALERTS = 64
MAX_ALERT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Member:
    """One stream's claim to a rank, valid until another stream takes the rank over."""

    rank: int
    serial: int


class Registry:
    """The mesh of one epoch. Event loop only; nothing blocks."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        *,
        silent_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bootstrap = bootstrap
        self._silent_after_s = silent_after_s
        self._clock = clock
        self._here = host_id()
        self._reports: dict[int, Report] = {}
        self._serials: dict[int, int] = {}
        self._digests: Counter[str] = Counter()
        self._next_serial = 0
        self._empty_since_s: float | None = clock()

    @property
    def empty_since_s(self) -> float | None:
        """When the mesh last became empty (at first: when it was made); None while it is not."""
        return self._empty_since_s

    @property
    def layout_digest(self) -> str:
        """As `MeshView.layout_digest`, without visiting every rank."""
        return next(iter(self._digests)) if len(self._digests) == 1 else ""

    @property
    def last_step(self) -> int:
        """Lowest step among all ranks' latest reports, whether still joined or not; else -1."""
        return min((report.step for report in self._reports.values()), default=-1)

    def view(self) -> MeshView:
        """The mesh now."""
        return mesh_view(
            self._reports,
            world_size=self._bootstrap.world_size,
            now_s=self._clock(),
            silent_after_s=self._silent_after_s,
        )

    def rank_views(self, ranks: range) -> tuple[RankView, ...]:
        """A range of ranks now, without building a view of all of them."""
        return rank_views(
            self._reports, ranks, now_s=self._clock(), silent_after_s=self._silent_after_s
        )

    def peers(self) -> list[common_pb2.Peer]:
        """Peers of the joined sidecars, ordered by rank."""
        reports = (self._reports[rank] for rank in sorted(self._reports))
        return [report.peer for report in reports if _present(report)]

    def join(self, request: control_pb2.JoinRequest) -> Member:
        """Store a stream's first report. The newest stream of a rank takes it over.

        Raises:
            UsageError: rank, world size or a text is out of range.
            ConflictError: another job or epoch.
        """
        self._check(request)
        # Newest wins: a respawned sidecar may join before its predecessor's stream breaks.
        self._next_serial += 1
        member = Member(request.header.rank, self._next_serial)
        self._serials[member.rank] = member.serial
        self._store(request)
        return member

    def update(self, member: Member, request: control_pb2.JoinRequest) -> None:
        """Store a stream's later report.

        Raises:
            UsageError, ConflictError: as `join`, or another stream took the rank over.
        """
        self._check(request)
        if request.header.rank != member.rank:
            raise UsageError(f"rank {request.header.rank} on the stream of rank {member.rank}")
        if self._serials.get(member.rank) != member.serial:
            raise ConflictError(f"another sidecar has joined as rank {member.rank}")
        self._store(request)

    def lose(self, member: Member) -> None:
        """Mark the stream's rank as disconnected. No-op if another stream took the rank over."""
        # A predecessor's stream may end long after its successor joined.
        if self._serials.get(member.rank) != member.serial:
            return
        del self._serials[member.rank]
        report = self._reports[member.rank]
        self._put(replace(report, connected=False, changed_s=self._clock()))

    def _store(self, request: control_pb2.JoinRequest) -> None:
        self._put(
            Report(
                rank=request.header.rank,
                step=request.header.step,
                layout_digest=request.header.layout_digest,
                peer=request.peer,
                state=request.state,
                version=request.version,
                leaving=request.leaving,
                connected=True,
                changed_s=self._clock(),
                no_way=no_way(
                    request.peer.rank, request.peer.address, request.peer.host_id, self._here
                ),
            )
        )

    def _put(self, report: Report) -> None:
        before = self._reports.get(report.rank)
        self._count(before, -1)
        self._reports[report.rank] = report
        self._count(report, +1)
        present = bool(self._serials) and (_present(report) or self._any_present())
        if present:
            self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = self._clock()

    def _any_present(self) -> bool:
        # Reached only when a rank leaves: O(ranks) once per rank, not once per report.
        return any(_present(self._reports[rank]) for rank in self._serials)

    def _count(self, report: Report | None, by: int) -> None:
        if report is None or not _present(report) or not report.layout_digest:
            return
        self._digests[report.layout_digest] += by
        if self._digests[report.layout_digest] == 0:
            del self._digests[report.layout_digest]

    def _check(self, request: control_pb2.JoinRequest) -> None:
        header, mine = request.header, self._bootstrap
        if header.job != mine.job or header.epoch != mine.epoch:
            raise ConflictError(
                f"the report is of job {header.job[:64]!r}, epoch {header.epoch}; this is the "
                f"control plane of job {mine.job!r}, epoch {mine.epoch}"
            )
        if request.world_size != mine.world_size:
            raise UsageError(f"world_size: {request.world_size}; this mesh has {mine.world_size}")
        if not 0 <= header.rank < mine.world_size:
            raise UsageError(f"rank: {header.rank}; expected 0 to {mine.world_size - 1}")
        if not header.rank == request.peer.rank == request.state.rank:
            raise UsageError(
                f"header, peer and state speak of different ranks: {header.rank}, "
                f"{request.peer.rank}, {request.state.rank}"
            )
        _check_texts(request)


def _present(report: Report) -> bool:
    return report.connected and not report.leaving


def _check_texts(request: control_pb2.JoinRequest) -> None:
    texts = {
        "address": request.peer.address,
        "socket_path": request.peer.socket_path,
        "host_id": request.peer.host_id,
        "version": request.version,
        "layout_digest": request.header.layout_digest,
        "agreement_reason": request.state.agreement_reason,
        "phase_reason": request.state.phase_reason,
        "last_refusal": request.state.last_refusal,
    }
    for name, text in texts.items():
        if len(text) > MAX_TEXT_CHARS:
            raise UsageError(f"{name}: {len(text)} characters; expected at most {MAX_TEXT_CHARS}")
    alerts = request.state.alerts
    if len(alerts) > MAX_ALERTS or any(len(alert) > MAX_ALERT_CHARS for alert in alerts):
        raise UsageError(
            f"alerts: expected at most {MAX_ALERTS} of at most {MAX_ALERT_CHARS} characters"
        )
    check_address(request.peer.address)
