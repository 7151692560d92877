"""From the mesh view to what rules and history work with. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from paramd.v1 import common_pb2
from paramd_service.control.alerts.rules import RankInput, Ranks
from paramd_service.control.alerts.store import Point
from paramd_service.control.view import MeshView, RankView

_NS = 1e9
MAX_RANKS_KEPT = 64
"""Meshes with more ranks than this have no history of single ranks."""

_MEASURED: tuple[tuple[str, Callable[[RankInput], float]], ...] = (
    ("step", lambda rank: float(rank.step)),
    ("step_time_s", lambda rank: rank.step_time_s),
    ("stall_total_s", lambda rank: rank.stall_total_s),
)
_ENDED = (common_pb2.PHASE_ORPHANED, common_pb2.PHASE_TORN)


def rank_inputs(view: MeshView) -> dict[int, RankInput]:
    """Every rank of the mesh, by its number."""
    return {rank.rank: _input(rank) for rank in view.ranks}


def _input(rank: RankView) -> RankInput:
    report = rank.report
    state = report.state if report is not None else common_pb2.RankState(boundary_age_ns=-1)
    boundary_age_s = state.boundary_age_ns / _NS + rank.age_s if state.boundary_age_ns >= 0 else -1
    return RankInput(
        rank=rank.rank,
        membership=rank.membership.value,
        reason=rank.reason,
        age_s=rank.age_s,
        step=report.step if report is not None else -1,
        step_time_s=state.step_time_ns / _NS,
        boundary_age_s=boundary_age_s,
        stall_count=state.stall_count,
        stall_total_s=state.stall_total_ns / _NS,
        stall_max_s=state.stall_max_ns / _NS,
        layout_digest=report.layout_digest if report is not None else "",
        trainer_lives=state.phase not in _ENDED,
    )


def points_of(ranks: Ranks, *, job: str, epoch: int, time_s: float) -> list[Point]:
    """What the history keeps of a look: step, step time and stalls of the joined ranks.

    Of each rank where they are few, else the least, the median and the most of all.
    """
    joined = [rank for rank in ranks.values() if rank.membership == "joined"]
    points: list[Point] = []
    for name, read in _MEASURED:
        for subject, value in _subjects({str(rank.rank): read(rank) for rank in joined}):
            points.append(
                Point(
                    job=job,
                    epoch=epoch,
                    name=name,
                    subject=subject,
                    step=min(rank.step for rank in joined),
                    time_s=time_s,
                    value=value,
                )
            )
    return points


def _subjects(values: Mapping[str, float]) -> list[tuple[str, float]]:
    if len(values) <= MAX_RANKS_KEPT:
        return list(values.items())
    ordered = sorted(values.values())
    return [("min", ordered[0]), ("median", median(ordered)), ("max", ordered[-1])]
