"""The mesh view: every rank's standing and its reason follow from reports and time alone."""

from dataclasses import replace

import pytest

from paramd.v1 import common_pb2
from paramd_service.alerts.config import AlertConfig
from paramd_service.alerts.rules import rank_inputs, stale_ranks
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.origin import Origin
from paramd_service.control.mesh.registry import (
    Membership,
    Registry,
    Report,
    State,
    may_train,
    waited_for,
    why_end,
)
from tests.unit.control.reports import join_request, report, view

S = 1_000_000_000
STALLED = {
    "phase": common_pb2.PHASE_STALLED,
    "phase_reason": "no boundary for 70 s",
    "boundary_age_ns": 70 * S,
}
WAITS = STALLED | {"waits_for_others": True}
WORKS = {"phase": common_pb2.PHASE_IDLE, "works": True, "boundary_age_ns": 69 * S}

LEFT = {"leaving": True, "connected": False}


@pytest.mark.parametrize(
    ("reports", "empty_since_s", "now_s", "expected"),
    [
        ([report(0, **LEFT), report(1, **LEFT)], 100.0, 100.0, "all 2 ranks have detached"),
        ([report(0, **LEFT), report(1)], None, 9e9, None),
        ([report(0, **LEFT)], 100.0, 159.9, None),
        ([report(0, **LEFT)], 100.0, 160.0, "no sidecar has been joined for 60 s"),
        # Attaching takes long with very many tensors.
        ([], 100.0, 699.9, None),
        ([], 100.0, 700.0, "no sidecar has been joined for 600 s"),
    ],
)
def test_it_ends_when_nothing_is_left_to_do(
    reports: list[Report], empty_since_s: float | None, now_s: float, expected: str | None
) -> None:
    found = why_end(view(*reports), empty_since_s=empty_since_s, now_s=now_s, empty_end_s=60.0)
    assert found == expected


def test_ranks_that_only_wait_for_one_that_works_are_well_and_say_for_whom() -> None:
    """A checkpoint, an evaluation or a compilation of one rank."""
    found = view(report(0, **WAITS), report(1, **WORKS))
    assert found.state is State.OK
    waiting, working = found.ranks
    assert waiting.state is State.OK
    assert waiting.report is not None
    assert waiting.report.state.phase == common_pb2.PHASE_IDLE
    assert waiting.reason == "waits for rank 1, in its step for 69 s"
    assert working.reason == ""
    assert waited_for(found).startswith("rank 1 (idle, step 7): no boundary for 70 s")


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param([report(0, **WAITS), report(1, **WAITS)], id="all wait: the network"),
        pytest.param([report(0, **WAITS), report(1, **STALLED)], id="the other hangs"),
        pytest.param([report(0, **STALLED), report(1, **WORKS)], id="it hangs by itself"),
        pytest.param(
            [report(0, **WAITS), report(1, **WORKS | STALLED)], id="work is no proof for ever"
        ),
        pytest.param(
            [report(0, **WAITS), report(1, **WORKS, connected=False)], id="the other is lost"
        ),
    ],
)
def test_a_rank_that_waits_in_vain_is_stalled(reports: list[Report]) -> None:
    stalled = view(*reports).ranks[0]
    assert (stalled.state, stalled.reason) == (State.DEGRADED, "no boundary for 70 s")
    assert stalled.report is not None
    assert stalled.report.state.phase == common_pb2.PHASE_STALLED


def test_a_rank_waits_for_none_that_is_ahead_of_it() -> None:
    ahead = report(1, **WORKS)
    ahead.state.step = 1
    assert view(report(0, **WAITS), ahead).ranks[0].state is State.DEGRADED


def test_each_part_of_a_large_mesh_knows_whom_all_wait_for() -> None:
    """REST lists ranks in chunks, each of the moment."""
    job = Bootstrap(job="run", incarnation=3, world_size=3, private_key=bytes(32), token="t" * 32)
    registry = Registry(job, silent_after_s=10.0)
    here = Origin("127.0.0.1")
    members = [
        registry.join(join_request(rank, world_size=3, **state), here)
        for rank, state in enumerate((WAITS, WAITS, WORKS))
    ]
    for begin in range(2):
        (one,) = registry.rank_views(range(begin, begin + 1))
        assert one.reason.startswith("waits for rank 2, in its step")
    # The long step is over: nothing is left of it.
    for rank, member in enumerate(members):
        registry.update(member, join_request(rank, world_size=3))
    assert [one.reason for one in registry.rank_views(range(3))] == [""] * 3


def test_the_mesh_names_the_rank_that_the_others_end_because_of() -> None:
    ended = common_pb2.PHASE_ORPHANED
    other = report(
        0, phase=ended, phase_reason="exited with code 1: the trainer has ended",
        trainer_ended_ms=3000,
    )  # fmt: skip
    killed = report(
        1, phase=ended, phase_reason="killed by SIGKILL: the trainer has ended",
        trainer_ended_ms=2500, trainer_signal=9,
    )  # fmt: skip
    assert view(other, killed).reason.startswith("rank 1: killed by SIGKILL")
    # Its sidecar leaves some time after it: how it died stays the reason.
    left = replace(killed, connected=False)
    assert view(other, left).ranks[1].reason == (
        "killed by SIGKILL: the trainer has ended; its sidecar was lost 1 s ago"
    )
    assert view(other, left).reason.startswith("rank 1: killed by SIGKILL")
    lost = report(1, connected=False)
    assert view(other, lost).reason == (
        "rank 1: its sidecar was lost 1 s ago (1 of 2 ranks are joined; not: 1)"
    )


def test_scripts_that_run_to_their_ends_are_an_end_and_no_trouble() -> None:
    well = {
        "phase": common_pb2.PHASE_ORPHANED,
        "phase_reason": "exited with code 0: the trainer has ended; its last step is still served",
        "trainer_ended_well": True,
    }
    found = view(report(0, **well), report(1, **well))
    assert found.state is State.FINISHED, "whose verdict is ended"
    assert {rank.state for rank in found.ranks} == {State.FINISHED}
    assert why_end(found, empty_since_s=None, now_s=0.0, empty_end_s=1.0) is None, "it is served"
    left = view(report(0, **well), report(1, connected=False, leaving=True))
    assert left.state is State.FINISHED
    assert found.reason.startswith("all 2 ranks exited with code 0, after step ")
    one = view(report(0, **well), report(1))
    assert one.is_late, "the other one has a little to do"
    assert one.state is State.DEGRADED
    torn = well | {"phase": common_pb2.PHASE_TORN}
    for other in (report(1, **torn), report(1, connected=False)):
        assert view(report(0, **well), other).state is State.DEGRADED
        assert not view(report(0, **well), other).is_late
    for fine in (found, one):
        assert not list(stale_ranks(rank_inputs(fine, watched_s=60.0), AlertConfig()))
    failed = well | {"trainer_ended_well": False}
    trouble = rank_inputs(view(report(0, **well), report(1, **failed)), watched_s=60.0)
    assert len(list(stale_ranks(trouble, AlertConfig()))) == 2


def test_a_mesh_is_late_only_where_nothing_else_is_wrong() -> None:
    silent = report(0, changed_s=90.0)
    assert view(silent, report(1)).is_late
    assert view(silent, report(1, changed_s=90.0)).is_late
    assert not view(report(0), report(1)).is_late
    assert not view(silent, report(1, connected=False)).is_late
    assert not view(silent, report(1, phase=common_pb2.PHASE_ORPHANED)).is_late
    assert view(silent).is_late, "rank 1 has not joined yet"
    assert view(report(0, **STALLED), report(1, **STALLED)).is_late
    assert not view(report(0, **STALLED), report(1, agreement_works=False)).is_late


def test_ports_are_left_to_the_next_run_only_once_no_trainer_may_be_alive() -> None:
    dead = report(0, phase=common_pb2.PHASE_ORPHANED)
    torn = report(1, phase=common_pb2.PHASE_TORN)
    assert not may_train(view(dead, torn))
    assert not may_train(view(dead, report(1, leaving=True)))
    assert not may_train(view(dead, report(1, connected=False)))
    assert may_train(view(dead, report(1)))
    # A sidecar that is silent may have a trainer that is only slow.
    silent = view(dead, report(1), now_s=150.0)
    assert silent.ranks[1].membership is Membership.SILENT
    assert may_train(silent)
