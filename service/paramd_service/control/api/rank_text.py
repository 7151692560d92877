"""The `RankList` document as hand-written JSON: 4,096 pydantic models would block the event loop.

Nothing is cached between responses: for 4,096 ranks a cache took some 8 MB as soon as two
clients watched the mesh, and saved a third of the CPU of some responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from paramd.v1 import common_pb2
from paramd_service.control.mesh.registry import RankView, Registry

_PHASE_NAMES: dict[int, str] = {
    int(number): name.removeprefix("PHASE_").lower() for name, number in common_pb2.Phase.items()
}

_SAID = (
    '"phase":"%s","step":%d,"trainer_pid":%d,"sidecar_pid":%d,"step_time_ns":%d,'
    '"boundary_age_ns":%d,"stall_count":%d,"stall_total_ns":%d,"stall_max_ns":%d,'
    '"abandoned_copy_count":%d,"arena_bytes":%d,"snapshot_bytes":%d,"snapshot_count":%d,'
    '"sidecar_rss_bytes":%d,"trainer_rss_bytes":%d,"agreement_works":%s,"agreement_reason":%s,'
    '"hold_left_ms":%d,"hold_steps_left":%d,"edits":%d,"edit_bytes":%d,'
    '"alerts":%s,"version":%s'
)


def phase_name(phase: int) -> str:
    """A phase as documents spell it, e.g. "forward_backward"."""
    return _PHASE_NAMES.get(phase, "unspecified")  # a newer sidecar may send unknown phases


RANKS_OF_A_CHUNK = 128
"""Some 80 KB of text; a response of 4,096 ranks in one piece would take four copies of 3 MB."""


def chunks(
    registry: Registry, *, world_size: int, incarnation: int, stall_budget_s: float
) -> Iterator[str]:
    """The `RankList` of one incarnation, in chunks; each chunk is current when it is yielded.

    A test compares it with the pydantic model.
    """
    yield f'{{"incarnation":{incarnation},"stall_budget_s":{stall_budget_s!r},"ranks":['
    for begin in range(0, world_size, RANKS_OF_A_CHUNK):
        views = registry.rank_views(range(begin, min(begin + RANKS_OF_A_CHUNK, world_size)))
        yield ("," if begin else "") + ",".join([_rank(view) for view in views])
    yield "]}"


def _rank(rank: RankView) -> str:
    report, said = rank.report, _SILENCE
    if report is not None:
        said = _said(report.state, report.step, report.version)
    return (
        f'{{"rank":{rank.rank},"membership":"{rank.membership.value}",'
        f'"state":"{rank.state.value}","reason":{_quoted(rank.reason)},'
        f'"age_s":{rank.age_s:.3f},{said}}}'
    )


def _said(state: common_pb2.RankState, step: int, version: str) -> str:
    return _SAID % (
        phase_name(state.phase),
        step,
        state.trainer_pid,
        state.sidecar_pid,
        state.step_time_ns,
        state.boundary_age_ns,
        state.stall_count,
        state.stall_total_ns,
        state.stall_max_ns,
        state.abandoned_copy_count,
        state.arena_bytes,
        state.snapshot_bytes,
        state.snapshot_count,
        state.sidecar_rss_bytes,
        state.trainer_rss_bytes,
        "true" if state.agreement_works else "false",
        _quoted(state.agreement_reason),
        state.hold_left_ms,
        state.hold_steps_left,
        state.edits,
        state.edit_bytes,
        json.dumps(list(state.alerts)) if state.alerts else "[]",
        _quoted(version),
    )


def _quoted(text: str) -> str:
    return json.dumps(text) if text else '""'


_SILENCE = _said(common_pb2.RankState(boundary_age_ns=-1), -1, "")
