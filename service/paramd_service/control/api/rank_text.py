"""The `RankList` document as hand-written JSON: 4,096 pydantic models would block the event loop.

Nothing is cached between responses: for 4,096 ranks a cache took 8 MB as soon as two clients
watched the mesh, and saved a third of the CPU of some responses.
"""

import json
from collections.abc import Iterator
from operator import attrgetter

from paramd.mesh.peers.grpc import PHASE_NAMES
from paramd.v1 import common_pb2
from paramd_service.control.mesh.host import host_document
from paramd_service.control.mesh.registry import RankView, Registry

_NUMBERS = (
    *("trainer_pid", "sidecar_pid", "step_time_ns", "boundary_age_ns", "stall_count"),
    *("stall_total_ns", "stall_max_ns", "abandoned_copy_count", "arena_bytes", "snapshot_bytes"),
    *("snapshot_count", "sidecar_rss_bytes", "trainer_rss_bytes", "hold_left_ms"),
    *("hold_steps_left", "edits", "edit_bytes"),
)
"""Members that are whole numbers, named as in `RankState`, which calls a pause a hold."""
_numbers = attrgetter(*_NUMBERS)
_SAID = (
    '"phase":"%s","step":%d,'
    + "".join(f'"{name.replace("hold_", "pause_")}":%d,' for name in _NUMBERS)
    + '"agreement_works":%s,"agreement_reason":%s,"alerts":%s,"version":%s,"host":%s'
)


RANKS_OF_A_CHUNK = 128
"""Some 80 KB of text; a response of 4,096 ranks in one piece would take four copies of 3 MB."""


def chunks(
    registry: Registry, *, world_size: int, incarnation: int, stall_budget_s: float
) -> Iterator[str]:
    """The `RankList` of one run, in chunks; each chunk is current when it is yielded."""
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
    # A newer sidecar may send unknown phases.
    return _SAID % (
        PHASE_NAMES.get(state.phase, "unspecified"),
        step,
        *_numbers(state),
        "true" if state.agreement_works else "false",
        _quoted(state.agreement_reason),
        json.dumps(list(state.alerts)) if state.alerts else "[]",
        _quoted(version),
        json.dumps(host_document(state)),
    )


def _quoted(text: str) -> str:
    return json.dumps(text) if text else '""'


_SILENCE = _said(common_pb2.RankState(boundary_age_ns=-1), -1, "")
