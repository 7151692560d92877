"""Exports of a control plane's jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily as Counted
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric

from paramd.layout.exports.files import EXPORT_ENDS
from paramd.mesh.exports.calls import OWN
from paramd_service.control.base.families import family
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.parts import ControlHost, ControlPart, Exported, Failure
from paramd_service.destinations.destinations import Destination
from paramd_service.exports.documents import ADDED, load_added, load_destinations
from paramd_service.exports.rest import router
from paramd_service.exports.service import ExportService


class Exports(ControlPart):
    """Runs exports and their schedules; after a restart it takes up those that were under way."""

    name = "exports"

    def __init__(self, host: ControlHost) -> None:
        super().__init__(host)
        directory = host.records.directory
        # Of a job that has ended, too, where there is one: its record says where checkpoints are.
        has_own = not host.jobs.is_site
        if host.shows_records:
            has_own = has_own and (directory / OWN).is_dir()
        none: dict[str, Destination] | None = {}
        destinations = host.loaded(
            partial(load_destinations, own=directory / OWN if has_own else None),
            otherwise=none,
            told="exports are disabled, the destinations are invalid",
        )
        added = host.loaded(
            lambda *given: load_added(directory / ADDED),
            otherwise=dict[str, Destination](),
            told="without the destinations that admins added",
        )
        publish = host.events.publish
        self._exports = ExportService(host.records, destinations, added, publish=publish)

    def routes(self) -> Sequence[APIRouter]:
        return [router(self.host, self._exports)]

    def metrics(self) -> Iterator[Metric]:
        exports, jobs = self._exports, [mesh.job for mesh in self.host.jobs.all()]
        counts = Counter(job.row.job for job in exports.running())
        running = [((job,), counts[job]) for job in jobs]
        yield family(Gauge, "paramd_exports_running", "Exports running or queued", "job", running)
        keys = [(job, state.value) for job in jobs for state in EXPORT_ENDS]
        ended = [(key, exports.ended_counts[key]) for key in keys]
        yield family(Counted, "paramd_exports", "Exports by outcome", "job state", ended)
        written = [((job,), exports.written_bytes[job]) for job in jobs]
        yield family(Counted, "paramd_export_bytes", "Bytes exported", "job", written)

    def began(self, mesh: Incarnation) -> None:
        self._exports.began(mesh)

    def seen(self, mesh: Incarnation, view: MeshView) -> None:
        self._exports.seen(mesh, view)

    def ended(self, mesh: Incarnation) -> None:
        self._exports.is_over(mesh)

    def evicted(self, job: str) -> None:
        self._exports.evicted(job)

    async def closed(self) -> None:
        await self._exports.close()

    def failed(self, job: str) -> Failure | None:
        row = self._exports.failed(job)
        if row is None or row.ended_s is None:
            return None
        what = f"the export to {row.destination}"
        return Failure(what, reason=row.reason, ended_s=row.ended_s, step=row.step)

    async def exported(self, job: str, export: str) -> Exported:
        return Exported(*await self._exports.directory(job, export))

    async def checkpoints(self, job: str) -> Sequence[Mapping[str, Any]]:
        return await self._exports.whole(job)
