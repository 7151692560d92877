"""Changes between two views of a mesh: state changes are published, refused calls recorded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paramd.v1 import common_pb2
from paramd_service.control.mesh.registry import MeshView, RankView, State

EVERY_S = 60.0
"""Least time between two records of one rank's refusals."""

log = logging.getLogger("paramd.control")

MOST_RANKS = 32
"""Most ranks reported one by one; when more change at once, only the mesh's reason is."""

_TOLD_PHASES = frozenset(
    {
        common_pb2.PHASE_WAITING,
        common_pb2.PHASE_ORPHANED,
        common_pb2.PHASE_TORN,
        common_pb2.PHASE_STALLED,
        common_pb2.PHASE_HELD,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Calls that one rank's sidecar has refused since the last record."""

    rank: int
    count: int
    total: int
    """Since the sidecar process started."""
    last: str
    """Method and reason of the latest one."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    pid: int
    total: int
    at_s: float


class RefusalBook:
    """Refusals recorded for each rank of one incarnation. No I/O, no clock."""

    def __init__(self) -> None:
        self._recorded: dict[int, _Recorded] = {}

    def tick(self, view: MeshView, now_s: float) -> Iterator[Refused]:
        """Refusals due for a record now; yielding one counts as recording it.

        All refusals of a sidecar that is new to this control plane, or was replaced, count as new.
        A restart of the control plane may record some twice; `total` shows it.
        """
        for rank in view.ranks:
            report = rank.report
            if report is None or report.state.refused_call_count <= 0:
                continue
            state = report.state
            before = self._recorded.get(rank.rank)
            if before is not None and now_s - before.at_s < EVERY_S:
                continue
            same = before is not None and before.pid == state.sidecar_pid
            counted = before.total if before is not None and same else 0
            if state.refused_call_count <= counted:
                continue
            self._recorded[rank.rank] = _Recorded(
                state.sidecar_pid, state.refused_call_count, now_s
            )
            yield Refused(
                rank=rank.rank,
                count=state.refused_call_count - counted,
                total=state.refused_call_count,
                last=state.last_refusal,
            )


class Publish(Protocol):
    """Publishes an event to viewers; implemented by `EventBus.publish`."""

    def __call__(self, kind: str, data: Mapping[str, Any], *, job: str) -> object:
        """`kind` is "rank", "step" or "incarnation"; `data` says what happened to `job`."""


def standing(rank: RankView) -> tuple[str, str, int]:
    """The part of a rank's view whose changes are reported; phases within a step are left out."""
    phase = rank.report.state.phase if rank.report is not None else 0
    return rank.membership.value, rank.state.value, phase if phase in _TOLD_PHASES else 0


class StateWatch:
    """Compares each view of one incarnation with the previous one."""

    def __init__(self, *, job: str, incarnation: int, publish: Publish) -> None:
        self._job = job
        self._incarnation = incarnation
        self._publish = publish
        self._ranks: dict[int, tuple[str, str, int]] = {}
        self._state: State | None = None
        self._step = -1

    def tick(self, view: MeshView) -> None:
        """Log and publish what changed since the last call."""
        changed = []
        for rank in view.ranks:
            now = standing(rank)
            if self._ranks.get(rank.rank) != now:
                changed.append(rank)
                self._ranks[rank.rank] = now
        self._tell_mesh(view, len(changed))
        if len(changed) <= MOST_RANKS:
            for rank in changed:
                self._tell_rank(rank)
        step = min((report.step for report in view.joined), default=-1)
        if step != self._step:
            self._step = step
            self._publish("step", {"incarnation": self._incarnation, "step": step}, job=self._job)

    def _tell_mesh(self, view: MeshView, changed_count: int) -> None:
        many = changed_count > MOST_RANKS
        if view.state is self._state and not many:
            return
        self._state = view.state
        where = {"job": self._job, "incarnation": self._incarnation, "step": self._step}
        level = logging.WARNING if view.state in (State.DEGRADED, State.DOWN) else logging.INFO
        said = view.state.value, view.reason or "no problems"
        log.log(level, "job %s, run %d is %s: %s", self._job, self._incarnation, *said, extra=where)
        data = {
            "incarnation": self._incarnation,
            "rank": -1,
            "state": view.state.value,
            "reason": view.reason,
            "changed_count": changed_count,
        }
        self._publish("rank", data, job=self._job)

    def _tell_rank(self, rank: RankView) -> None:
        membership, state, _ = standing(rank)
        if rank.reason:
            step = rank.report.step if rank.report is not None else -1
            where = {"job": self._job, "incarnation": self._incarnation, "rank": rank.rank}
            log.info(
                "job %s, rank %d: %s",
                self._job,
                rank.rank,
                rank.reason,
                extra={**where, "step": step},
            )
        data = {
            "incarnation": self._incarnation,
            "rank": rank.rank,
            "membership": membership,
            "state": state,
            "reason": rank.reason,
        }
        self._publish("rank", data, job=self._job)
