"""Refusals that sidecars report, gathered for the audit: at most one record a minute and rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paramd_service.control.view import MeshView

EVERY_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """What one rank's sidecar has refused since the last record of it."""

    rank: int
    count: int
    total: int
    """Since the sidecar's process began."""
    last: str
    """Method and reason of the last one."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    pid: int
    total: int
    at_s: float


class RefusalBook:
    """The ranks of one epoch. No I/O, no clock."""

    def __init__(self) -> None:
        self._recorded: dict[int, _Recorded] = {}

    def look(self, view: MeshView, now_s: float) -> Iterator[Refused]:
        """What is due for a record now, which counts as recorded once it was yielded.

        A sidecar that this control plane has not met before, or that was replaced, is taken at
        its word: all that it refused is new. After a restart of the control plane a number may
        so be recorded twice; `total` shows it.
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
