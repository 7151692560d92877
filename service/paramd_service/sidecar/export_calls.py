"""Exports: what a rank writes to a destination."""

from __future__ import annotations

from paramd_service.sidecar.calls import CallTable
from paramd_service.sidecar.rank import RankSidecar


def calls(rank: RankSidecar) -> CallTable:
    """Methods of this subject."""
    return {}
