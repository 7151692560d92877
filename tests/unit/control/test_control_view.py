"""The mesh view: every rank's standing and its reason follow from reports and time alone."""

from __future__ import annotations

from typing import Any

import pytest

from paramd.v1 import common_pb2
from paramd_service.control.mesh.registry import Membership, MeshView, Report, mesh_view, why_end

STATE_FIELDS = ("phase", "agreement_works", "agreement_reason", "ready_boundary")


def report(rank: int, **changed: Any) -> Report:
    state: dict[str, Any] = {"phase": common_pb2.PHASE_CONSTANT, "agreement_works": True}
    state |= {k: changed.pop(k) for k in STATE_FIELDS if k in changed}
    fields: dict[str, Any] = {
        "rank": rank,
        "step": 7,
        "layout_digest": "d",
        "peer": common_pb2.Peer(rank=rank, address=f"127.0.0.1:{9000 + rank}"),
        "state": common_pb2.RankState(rank=rank, **state),
        "version": "0",
        "leaving": False,
        "connected": True,
        "changed_s": 100.0,
    }
    return Report(**(fields | changed))


def view(*reports: Report, world_size: int = 2, now_s: float = 101.0) -> MeshView:
    return mesh_view(
        {r.rank: r for r in reports}, world_size=world_size, now_s=now_s, silent_after_s=10.0
    )


@pytest.mark.parametrize("now_s", [100.0, 99.0, -1e9])
def test_a_report_from_the_future_is_as_fresh_as_one_can_be(now_s: float) -> None:
    found = view(report(0), report(1), now_s=now_s)
    assert [(rank.age_s, rank.membership) for rank in found.ranks] == [(0.0, Membership.JOINED)] * 2
    assert found.reason == ""


def test_a_clock_that_jumps_ahead_makes_ranks_silent_until_they_report_again() -> None:
    late = view(report(0), report(1), now_s=1e9)
    assert {rank.membership for rank in late.ranks} == {Membership.SILENT}
    again = (report(0, changed_s=1e9), report(1, changed_s=1e9))
    assert view(*again, now_s=1e9).reason == ""


def test_a_whole_mesh_has_no_reason() -> None:
    found = view(report(0), report(1))
    assert (found.reason, found.layout_digest) == ("", "d")
    assert [rank.membership for rank in found.ranks] == [Membership.JOINED] * 2
    assert [rank.reason for rank in found.ranks] == ["", ""]


@pytest.mark.parametrize(
    ("changed", "now_s", "membership", "reason"),
    [
        ({"connected": False}, 104.0, Membership.GONE, "was lost 4 s ago"),
        ({}, 110.5, Membership.SILENT, "has not reported for 10 s"),
        ({"leaving": True, "connected": False}, 101.0, Membership.LEFT, "has detached"),
        ({"phase": common_pb2.PHASE_TORN}, 101.0, Membership.JOINED, "inside an update"),
        ({"phase": common_pb2.PHASE_ORPHANED}, 101.0, Membership.JOINED, "still served"),
        ({"phase": common_pb2.PHASE_WAITING}, 101.0, Membership.JOINED, "no trainer"),
        (
            {"agreement_works": False, "agreement_reason": "rank 3 was slow"},
            101.0,
            Membership.JOINED,
            "rank 3 was slow",
        ),
    ],
)
def test_each_trouble_of_a_rank_has_its_reason(
    changed: dict[str, Any], now_s: float, membership: Membership, reason: str
) -> None:
    (rank,) = view(report(0, **changed), world_size=1, now_s=now_s).ranks
    assert rank.membership is membership
    assert reason in rank.reason


def test_missing_ranks_are_named() -> None:
    found = view(report(1), world_size=3)
    assert found.reason == "1 of 3 ranks are joined; not: 0, 2"
    assert [rank.rank for rank in found.absent] == [0, 2]
    assert [r.rank for r in found.joined] == [1]


def test_a_silent_rank_may_still_be_called() -> None:
    found = view(report(0), world_size=1, now_s=200.0)
    assert not found.absent
    assert "rank 0: its sidecar has not reported" in found.reason


def test_different_layouts_are_no_layout() -> None:
    found = view(report(0), report(1, layout_digest="other"))
    assert found.layout_digest == ""
    assert found.reason == "the ranks report different layouts"


def test_a_lost_ranks_layout_does_not_count() -> None:
    assert view(report(0), report(1, layout_digest="o", connected=False)).layout_digest == "d"


def test_the_highest_boundary_is_that_of_any_joined_rank() -> None:
    found = view(report(0, ready_boundary=4), report(1, ready_boundary=9))
    assert found.highest_boundary == 9
    assert view().highest_boundary == 0


LEFT = {"leaving": True, "connected": False}


@pytest.mark.parametrize(
    ("reports", "empty_since_s", "now_s", "expected"),
    [
        ([report(0, **LEFT), report(1, **LEFT)], 100.0, 100.0, "all 2 ranks have detached"),
        ([report(0, **LEFT), report(1)], None, 9e9, None),
        ([report(0, **LEFT)], 100.0, 159.9, None),
        ([report(0, **LEFT)], 100.0, 160.0, "no sidecar has been joined for 60 s"),
        ([], 100.0, 160.0, "no sidecar has been joined for 60 s"),
    ],
)
def test_it_ends_when_nothing_is_left_to_do(
    reports: list[Report], empty_since_s: float | None, now_s: float, expected: str | None
) -> None:
    found = why_end(view(*reports), empty_since_s=empty_since_s, now_s=now_s, empty_end_s=60.0)
    assert found == expected
