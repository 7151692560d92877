"""The diagnosis of runs, in the control plane."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter

from paramd_service.control.mesh.evidence import Evidence, Look
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.parts import ControlPart
from paramd_service.insight.rest import router
from paramd_service.insight.why import chosen, evidence_of, inspect


class Insight(ControlPart):
    """Asks the sidecars what their trainers are doing, and compares states."""

    name = "insight"

    def routes(self) -> Sequence[APIRouter]:
        return [router(self.host)]

    def look(self, mesh: Incarnation) -> Look:
        async def look() -> list[Evidence]:
            ranks = chosen(mesh.registry.view().ranks, ())
            return [evidence_of(one) for one in await inspect(mesh.calls, ranks, log_lines=0)]

        return look
