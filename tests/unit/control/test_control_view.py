"""The mesh view: every rank's standing and its reason follow from reports and time alone."""

from __future__ import annotations

from typing import Any

import pytest

from paramd.v1 import common_pb2
from paramd_service.control.mesh.registry import Membership, Report, why_end
from tests.unit.control.reports import report, view


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
