"""Membership: the ranks' latest reports, and the state of the mesh derived from them.

Registry keeps the reports, fenced by incarnation and by stream: storing one is O(1), `view` is
O(ranks). The functions above it are pure.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from paramd.errors import ConflictError, UsageError
from paramd.mesh.peers.control import PeerAddress
from paramd.mesh.peers.ends import ended_well
from paramd.mesh.peers.grpc import RankUnreachableError, boundary_age_s, no_way, slow_text
from paramd.mesh.peers.waits import NOBODY, Awaited, awaited_of, with_waits
from paramd.security.tls import check_address
from paramd.state_files import host_id
from paramd.v1 import common_pb2, control_pb2
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.origin import Origin

REPORT_RANKS = 1024
"""Larger meshes report `REPORT_STRETCH` times less often."""
REPORT_STRETCH = 2.5

MAX_TEXT_CHARS = 4096
"""Longest text field in a report."""

UNJOINED_TIMES = 10
"""How much longer an incarnation may be empty before any sidecar has joined."""

MAX_ALERTS = 64 + 5  # with the causes of stands
MAX_ALERT_CHARS = 256
MAX_DEVICES = 16
MAX_THROTTLES = 8
MAX_DEVICE_CHARS = 64

TOGETHER_S = 5.0
"""Ends of trainers within so many seconds may have one cause."""
SAME_S = 0.05
"""Seconds between two ends below which no report can tell which came first."""


class Membership(Enum):
    """A rank's sidecar as seen by this control plane."""

    MISSING = "missing"
    """It has never joined in this incarnation."""
    JOINED = "joined"
    """Its stream is open and it reports."""
    SILENT = "silent"
    """Its stream is open, but the last report is old: stopped, hung or cut off."""
    GONE = "gone"
    """Its stream ended without a goodbye: it was killed, or its host is gone."""
    LEFT = "left"
    """Its stream ended after a goodbye: the trainer detached."""


class State(Enum):
    """Health of a rank or of the whole mesh, worst last."""

    ENDED = "ended"
    """The trainer has detached."""
    FINISHED = "finished"
    """The trainer's script ran to its end without detaching; its last step is still served."""
    OK = "ok"
    """Training runs and is served."""
    STARTING = "starting"
    """Its sidecar or its trainer has not arrived yet."""
    DEGRADED = "degraded"
    """It answers, but something is wrong; the reason says what."""
    DOWN = "down"
    """Its parameters cannot be read: no sidecar, or they are torn."""


_PHASES: Mapping[int, tuple[State, str]] = {
    common_pb2.PHASE_WAITING: (State.STARTING, "no trainer has attached yet"),
    common_pb2.PHASE_ORPHANED: (
        State.DEGRADED,
        "its trainer has ended; its last step is still served",
    ),
    common_pb2.PHASE_TORN: (
        State.DOWN,
        "its trainer ended inside an update; its parameters are refused",
    ),
    common_pb2.PHASE_STALLED: (State.DEGRADED, "its trainer has stalled"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The latest report of one sidecar."""

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
    no_way: str = ""
    """Why its address is unreachable from here; empty when it is good."""
    host: str = ""
    """IP address behind its address; empty: not to be dialed."""

    @property
    def address(self) -> str:
        """Address to call. Raises RankUnreachableError if it is unreachable from here."""
        if self.no_way:
            raise RankUnreachableError(self.rank, self.no_way)
        return self.peer.address


class RankView(NamedTuple):
    """One rank, with a reason when something is wrong. A frozen dataclass took four times as long
    to make, for all ranks every second and for every page."""

    rank: int
    membership: Membership
    state: State
    reason: str
    """Empty when nothing is wrong."""
    report: Report | None
    age_s: float
    """Seconds since `report.changed_s`; 0 when there is none."""

    @property
    def connected(self) -> bool:
        """Its stream is open, so it may be called, even when silent."""
        return self.membership in (Membership.JOINED, Membership.SILENT)

    @property
    def ended_well(self) -> bool:
        """Whether its trainer's script ran to its end, and its last step is served."""
        joined = self.membership is Membership.JOINED and self.report is not None
        return joined and self.report is not None and ended_well(self.report.state)

    @property
    def is_late(self) -> bool:
        """Whether its report, or its next boundary, should have come, and nothing else is wrong."""
        if self.membership is Membership.SILENT:
            return True
        stalled = self.report is not None and self.report.state.phase == common_pb2.PHASE_STALLED
        return stalled and self.state is State.DEGRADED


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshView:
    """All ranks of the incarnation, ordered by rank."""

    ranks: tuple[RankView, ...]
    layout_digest: str
    """The digest that all connected ranks report; empty when none does or they differ."""
    state: State
    reason: str
    """Why the mesh as a whole is not OK; empty when it is."""

    @property
    def joined(self) -> tuple[Report, ...]:
        """Reports of the ranks that may be called, ordered by rank."""
        return tuple(r.report for r in self.ranks if r.connected and r.report is not None)

    @property
    def absent(self) -> tuple[RankView, ...]:
        """Ranks that cannot be called."""
        return tuple(rank for rank in self.ranks if not rank.connected)

    @property
    def is_late(self) -> bool:
        """Whether all that is wrong is that reports or boundaries of some ranks are late, which may
        be a busy machine, or an evaluation, or that some ranks' scripts have ended before others'.
        """
        late = [rank for rank in self.ranks if rank.is_late or rank.ended_well]
        well = sum(rank.state in (State.OK, State.STARTING) for rank in self.ranks)
        return bool(late) and len(late) + well == len(self.ranks)

    @property
    def highest_boundary(self) -> int:
        """Highest boundary request that any joined rank was ever ready for."""
        return max((report.state.ready_boundary for report in self.joined), default=0)


@dataclass(frozen=True, slots=True)
class ReportInterval:
    """How often ranks report, and after how long without a report one is silent."""

    interval_s: float
    silent_after_s: float


def report_interval(world_size: int, *, report_s: float, silent_after_s: float) -> ReportInterval:
    """The report interval of a mesh; both times are stretched on large meshes."""
    stretch = REPORT_STRETCH if world_size > REPORT_RANKS else 1.0
    return ReportInterval(report_s * stretch, silent_after_s * stretch)


def mesh_view(
    reports: Mapping[int, Report], *, world_size: int, now_s: float, silent_after_s: float
) -> MeshView:
    """The mesh at `now_s` (monotonic), from the reports by rank."""
    ranks = rank_views(
        reports,
        range(world_size),
        now_s=now_s,
        silent_after_s=silent_after_s,
        awaited=awaited_now(reports.values()),
    )
    digests = {
        rank.report.layout_digest
        for rank in ranks
        if rank.connected and rank.report is not None and rank.report.layout_digest
    }
    state, reason = _mesh_state(ranks, len(digests))
    return MeshView(
        ranks=ranks,
        layout_digest=next(iter(digests)) if len(digests) == 1 else "",
        state=state,
        reason=reason,
    )


def rank_views(
    reports: Mapping[int, Report],
    ranks: range,
    *,
    now_s: float,
    silent_after_s: float,
    awaited: Awaited,
) -> tuple[RankView, ...]:
    """A range of the mesh's ranks at `now_s` (monotonic). `awaited`: as `awaited_now` says."""
    return tuple([_rank_view(r, reports.get(r), now_s, silent_after_s, awaited) for r in ranks])


def awaited_now(reports: Iterable[Report]) -> Awaited:
    """The ranks that work while others wait for them."""
    return awaited_of(one.state for one in reports if _present(one))


def listed(ranks: Sequence[int]) -> str:
    """Format ranks as text, listing at most eight."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} ranks)"


def why_end(
    view: MeshView, *, empty_since_s: float | None, now_s: float, empty_end_s: float
) -> str | None:
    """Why an incarnation should end, or None. `empty_since_s` is the Registry's."""
    if view.state is State.ENDED:
        return f"all {len(view.ranks)} ranks have detached"
    if all(rank.report is None for rank in view.ranks):
        # Attaching takes long with very many tensors, and its trainer ends this if it fails.
        empty_end_s *= UNJOINED_TIMES
    if empty_since_s is not None and now_s - empty_since_s >= empty_end_s:
        return f"no sidecar has been joined for {empty_end_s:g} s"
    return None


def waited_for(view: MeshView) -> str:
    """Which rank a boundary of all ranks waits for, and since when, in words: the rank with the
    oldest boundary, as the others wait for it, or soon will. A rank that itself only waits is
    named last."""
    rank = max(view.ranks, key=_waiting)
    if rank.report is None or not rank.connected:
        return f"rank {rank.rank}: {rank.reason}"
    told = f"; {rank.reason}" if rank.reason else ""
    said, age_s = rank.report.state, _waiting(rank)[1]
    return slow_text(rank.rank, said.phase, rank.report.step, age_s) + told


def _waiting(rank: RankView) -> tuple[bool, float, int]:
    """(it does not only wait itself, seconds since its last boundary, the negative rank, so that
    of equal ranks the lower comes first)."""
    state = rank.report.state if rank.report is not None and rank.connected else None
    if state is None:
        return True, math.inf, -rank.rank
    return not state.waits_for_others, boundary_age_s(state) + rank.age_s, -rank.rank


def trains(view: MeshView) -> bool:
    """Whether any rank's trainer is known to be alive, so that the job's name is in use."""
    return alive_count(view) > 0


def alive_count(view: MeshView) -> int:
    """Count the ranks whose trainer is known to be alive."""
    return sum(_lives(rank) and rank.membership is Membership.JOINED for rank in view.ranks)


def may_train(view: MeshView) -> bool:
    """Whether any rank's trainer may be alive: also one whose sidecar is silent."""
    return any(_lives(rank) and rank.connected for rank in view.ranks)


def _lives(rank: RankView) -> bool:
    """Whether the rank's trainer was alive at its last report."""
    return rank.report is not None and rank.report.state.phase not in _WITHOUT_TRAINER


def ended_s_of(rank: RankView) -> float:
    """Seconds since the process of the rank's trainer ended; 0 while it lives or is unknown."""
    ended_ms = rank.report.state.trainer_ended_ms if rank.report is not None else 0
    return ended_ms / 1e3 + rank.age_s if ended_ms else 0.0


def is_killed(rank: RankView) -> bool:
    """Whether a signal has killed the rank's trainer, as far as is known."""
    return rank.report is not None and rank.report.state.trainer_signal > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """How the first rank of an incarnation died."""

    reason: str
    step: int
    killed: bool
    """A signal has killed it."""
    at_s: float
    """When its process ended; on the monotonic clock."""

    def is_before(self, other: Death) -> bool:
        """Whether it is the cause of the other one. A rank that a signal has killed comes before
        others that ended in the same seconds: they may be heard of before it."""
        if self.killed != other.killed and abs(self.at_s - other.at_s) < TOGETHER_S:
            return self.killed
        return self.at_s < other.at_s - SAME_S


def death_of(view: MeshView, now_s: float) -> Death | None:
    """The death of the trainer that ended first, without having detached; None while all live."""
    first: Death | None = None
    for rank in view.ranks:
        found = _death(rank, now_s) if rank.connected else None
        if found is not None and (first is None or found.is_before(first)):
            first = found
    return first


def _death(rank: RankView, now_s: float) -> Death | None:
    report = rank.report
    how = _how_it_died(report.state) if report is not None else ""
    if report is None or not how:
        return None
    reason = f"rank {rank.rank}: {how}"
    return Death(
        reason=f"{reason}, after step {report.step:,}" if report.step >= 0 else reason,
        step=report.step,
        killed=is_killed(rank),
        at_s=now_s - ended_s_of(rank),
    )


def _how_it_died(said: common_pb2.RankState) -> str:
    """How a rank's trainer ended without having detached; empty while it lives."""
    if said.phase not in _DIED:
        return ""
    return (said.phase_reason or _PHASES[said.phase][1]).partition(";")[0]


_DIED = (common_pb2.PHASE_ORPHANED, common_pb2.PHASE_TORN)
_WITHOUT_TRAINER = (common_pb2.PHASE_WAITING, *_DIED)


def _rank_view(
    rank: int, report: Report | None, now_s: float, silent_after_s: float, awaited: Awaited
) -> RankView:
    age_s = max(now_s - report.changed_s, 0.0) if report is not None else 0.0
    if report is not None and awaited.holds(report.state):
        report = replace(report, state=with_waits(report.state, awaited))
    membership, state, reason = _standing(report, age_s, silent_after_s)
    return RankView(rank, membership, state, reason, report, age_s)


def _standing(
    report: Report | None, age_s: float, silent_after_s: float
) -> tuple[Membership, State, str]:
    if report is None:
        return Membership.MISSING, State.STARTING, "its sidecar has not joined"
    if report.leaving:
        return Membership.LEFT, State.ENDED, "its trainer has detached"
    if not report.connected:
        lost = f"its sidecar was lost {age_s:.0f} s ago"
        # Why its trainer ended stays the reason: a sidecar leaves some time after that.
        died = _how_it_died(report.state)
        return Membership.GONE, State.DOWN, f"{died}; {lost}" if died else lost
    if age_s > silent_after_s:
        reason = f"its sidecar has not reported for {age_s:.0f} s"
        return Membership.SILENT, State.DEGRADED, reason
    if report.no_way:
        return Membership.JOINED, State.DOWN, report.no_way
    return Membership.JOINED, *_wellness(report.state)


def _wellness(said: common_pb2.RankState) -> tuple[State, str]:
    if said.phase in _PHASES:
        state, reason = _PHASES[said.phase]
        if ended_well(said):
            state = State.FINISHED
        return state, said.phase_reason or reason
    if said.unserved_reason:
        return State.DEGRADED, f"its parameters are not served: {said.unserved_reason}"
    if not said.agreement_works:
        return State.DEGRADED, said.agreement_reason or "the trainers no longer agree"
    # No trouble yet, such as memory that is short for readers.
    return State.OK, said.phase_reason


def _mesh_state(ranks: Sequence[RankView], digest_count: int) -> tuple[State, str]:
    states = {rank.state for rank in ranks}
    if states == {State.OK} and digest_count <= 1:
        return State.OK, ""
    reason = _mesh_reason(ranks, digest_count)
    if len(states) == 1 and State.OK not in states:
        return ranks[0].state, reason
    if states == {State.FINISHED, State.ENDED}:
        # Some ranks have detached, the others' last step is served.
        return State.FINISHED, reason
    if reason:
        # Ranks that have not joined yet, while others have: nothing is lost.
        is_starting = State.STARTING in states and states <= {State.OK, State.STARTING}
        return State.STARTING if is_starting else State.DEGRADED, reason
    return State.OK, ""


def _by_cause(rank: RankView) -> tuple[bool, bool, float]:
    """Sorts ranks in trouble by what comes first: killed by a signal, then ended first."""
    return rank.state is State.OK, not is_killed(rank), -ended_s_of(rank)


def _mesh_reason(ranks: Sequence[RankView], digest_count: int) -> str:
    if all(rank.ended_well for rank in ranks):
        who = f"all {len(ranks)} ranks" if len(ranks) > 1 else "the training"
        step = max(rank.report.step for rank in ranks if rank.report is not None)
        return f"{who} exited with code 0, after step {step:,}"
    absent = [rank.rank for rank in ranks if not rank.connected]
    if absent:
        count = (
            f"{len(ranks) - len(absent)} of {len(ranks)} ranks are joined; not: {listed(absent)}"
        )
        lost = next((rank for rank in ranks if rank.membership is Membership.GONE), None)
        return count if lost is None else f"rank {lost.rank}: {lost.reason} ({count})"
    if digest_count > 1:
        return "the ranks report different layouts"
    # The rank whose trainer ended first, or was killed: others end because of it, and may be heard
    # of before it. A rank that is well may have a reason, too, such as the rank that it waits for.
    troubled = sorted(
        (rank for rank in ranks if rank.reason),
        key=_by_cause,
    )
    if troubled:
        also = f" (and {len(troubled) - 1} more)" if len(troubled) > 1 else ""
        return f"rank {troubled[0].rank}: {troubled[0].reason}{also}"
    return ""


@dataclass(frozen=True, slots=True)
class Member:
    """One stream's claim to a rank, valid until another stream takes the rank over."""

    rank: int
    serial: int
    origin: Origin


class Registry:
    """The mesh of one incarnation. Event loop only; nothing blocks."""

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
        self._stalled: set[int] = set()
        """Ranks whose own sidecars call them stalled; some may only wait for others."""
        self._next_serial = 0
        self.is_past = False
        """The incarnation ended before this process began: nobody has joined, or will."""
        self.empty_since_s: float | None = clock()
        """When the mesh last became empty (at first: when it was made); None while it is not."""

    @property
    def layout_digest(self) -> str:
        """As `MeshView.layout_digest`, without visiting every rank."""
        return next(iter(self._digests)) if len(self._digests) == 1 else ""

    @property
    def last_step(self) -> int:
        """Lowest step among all ranks' latest reports, whether still joined or not; else -1."""
        return min((report.step for report in self._reports.values()), default=-1)

    def view(self) -> MeshView:
        if self.is_past:
            ranks = self.rank_views(range(self._bootstrap.world_size))
            return MeshView(ranks=ranks, layout_digest="", state=State.ENDED, reason="")
        return mesh_view(
            self._reports,
            world_size=self._bootstrap.world_size,
            now_s=self._clock(),
            silent_after_s=self._silent_after_s,
        )

    def rank_views(self, ranks: range) -> tuple[RankView, ...]:
        """A range of ranks now, without building a view of all of them."""
        if self.is_past:
            past = Membership.LEFT, State.ENDED, "the job has ended", None, 0.0
            return tuple([RankView(rank, *past) for rank in ranks])
        return rank_views(
            self._reports,
            ranks,
            now_s=self._clock(),
            silent_after_s=self._silent_after_s,
            # Of all ranks, in each chunk of a large mesh: only when it matters.
            awaited=awaited_now(self._reports.values()) if self._stalled else NOBODY,
        )

    def peers(self) -> list[PeerAddress]:
        """Peers of the joined sidecars, ordered by rank."""
        reports = (self._reports[rank] for rank in sorted(self._reports))
        peers = (one.peer for one in reports if _present(one) and one.host)
        return [PeerAddress(one.rank, one.address, one.socket_path, one.host_id) for one in peers]

    def join(self, request: control_pb2.JoinRequest, origin: Origin) -> Member:
        """Store a stream's first report. The newest stream of a rank takes it over.

        Raises:
            UsageError: Rank, world size or a text out of range.
            ConflictError: Another job or run.
        """
        self._check(request)
        # Newest wins: a respawned sidecar may join before the old one's stream breaks.
        self._next_serial += 1
        member = Member(request.header.rank, self._next_serial, origin)
        self._serials[member.rank] = member.serial
        self._store(request, origin)
        return member

    def update(self, member: Member, request: control_pb2.JoinRequest) -> None:
        """Store a stream's later report. Raises as `join`; ConflictError: another took over."""
        self._check(request)
        if request.header.rank != member.rank:
            raise UsageError(f"rank {request.header.rank} on the stream of rank {member.rank}")
        if self._serials.get(member.rank) != member.serial:
            raise ConflictError(f"another sidecar has joined as rank {member.rank}")
        if request.peer.address != self._reports[member.rank].peer.address:
            raise UsageError(f"rank {member.rank} changed its address; join again with the new one")
        self._store(request, member.origin)

    def lose(self, member: Member) -> None:
        """Mark the stream's rank as disconnected. No-op if another stream took the rank over."""
        # A replaced stream may end long after the new one joined.
        if self._serials.get(member.rank) != member.serial:
            return
        del self._serials[member.rank]
        report = self._reports[member.rank]
        self._put(replace(report, connected=False, changed_s=self._clock()))

    def _store(self, request: control_pb2.JoinRequest, origin: Origin) -> None:
        header, peer = request.header, request.peer
        report = Report(
            rank=header.rank,
            step=header.step,
            layout_digest=header.layout_digest,
            peer=peer,
            state=request.state,
            version=request.version,
            leaving=request.leaving,
            connected=True,
            changed_s=self._clock(),
            no_way=no_way(peer.rank, peer.address, peer.host_id, self._here) or origin.barred,
            host=origin.host,
        )
        self._put(report)

    def _put(self, report: Report) -> None:
        self._count(self._reports.get(report.rank), -1)
        self._reports[report.rank] = report
        self._count(report, +1)
        if report.state.phase == common_pb2.PHASE_STALLED:
            self._stalled.add(report.rank)
        else:
            self._stalled.discard(report.rank)
        # When a rank leaves, all are examined: O(ranks) once per rank, not once per report.
        ranks = map(self._reports.__getitem__, self._serials)
        if self._serials and (_present(report) or any(map(_present, ranks))):
            self.empty_since_s = None
        elif self.empty_since_s is None:
            self.empty_since_s = self._clock()

    def _count(self, report: Report | None, by: int) -> None:
        if report is None or not _present(report) or not report.layout_digest:
            return
        self._digests[report.layout_digest] += by
        if self._digests[report.layout_digest] == 0:
            del self._digests[report.layout_digest]

    def _check(self, request: control_pb2.JoinRequest) -> None:
        header, mine = request.header, self._bootstrap
        if header.job != mine.job or header.incarnation != mine.incarnation:
            raise ConflictError(
                f"the report is for job {header.job[:64]!r}, run {header.incarnation}; "
                f"expected job {mine.job!r}, run {mine.incarnation}"
            )
        if request.world_size != mine.world_size:
            raise UsageError(f"world_size: {request.world_size}; this mesh has {mine.world_size}")
        if not 0 <= header.rank < mine.world_size:
            raise UsageError(f"rank: {header.rank}; expected 0 to {mine.world_size - 1}")
        if not header.rank == request.peer.rank == request.state.rank:
            raise UsageError(
                f"header, peer and state name different ranks: {header.rank}, "
                f"{request.peer.rank}, {request.state.rank}"
            )
        _check_texts(request)


def _present(report: Report) -> bool:
    return report.connected and not report.leaving


def _check_devices(host: common_pb2.HostFacts) -> None:
    words = [word for one in host.devices for word in (one.name, *one.throttled)]
    most = MAX_DEVICES * (1 + MAX_THROTTLES)
    if (
        len(host.devices) > MAX_DEVICES
        or len(words) > most
        or any(len(word) > MAX_DEVICE_CHARS for word in words)
    ):
        raise UsageError(
            f"devices: expected at most {MAX_DEVICES}, with at most {MAX_THROTTLES} words of at "
            f"most {MAX_DEVICE_CHARS} characters each"
        )


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
        "unserved_reason": request.state.unserved_reason,
    }
    for name, text in texts.items():
        if len(text) > MAX_TEXT_CHARS:
            raise UsageError(f"{name}: {len(text)} characters; expected at most {MAX_TEXT_CHARS}")
    _check_devices(request.state.host)
    alerts = [*request.state.alerts, *(one.cause for one in request.state.stands)]
    if len(alerts) > MAX_ALERTS or any(len(alert) > MAX_ALERT_CHARS for alert in alerts):
        raise UsageError(
            f"alerts: expected at most {MAX_ALERTS} of at most {MAX_ALERT_CHARS} characters"
        )
    check_address(request.peer.address)
