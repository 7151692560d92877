"""The mesh view: every rank's standing and its reason follow from reports and time alone."""

import pytest

from paramd_service.control.mesh.registry import Report, why_end
from tests.unit.control.reports import report, view

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
