"""The edits and pauses of a control plane's jobs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily as Counted
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from pydantic import TypeAdapter
from sqlalchemy import Connection

from paramd.layout.edits.ops import OpSpec
from paramd.mesh.edits.calls import Edit
from paramd_service.control.access.authority import Principal
from paramd_service.control.base.families import by_job, family
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.parts import (
    ControlHost,
    ControlPart,
    EditOfData,
    LostMark,
    ReadStored,
    StoredRequest,
)
from paramd_service.control.store.edits import EditRow, chosen_edits, edit_of
from paramd_service.edits import rest, training
from paramd_service.edits.service import EditRegistry
from paramd_service.edits.spec import EditConfig, EditSpec, load_edits

log = logging.getLogger("paramd.control.edits")


NO_UNDO: Final = "the job has ended"

_EDIT: Final = TypeAdapter(Edit)


class Edits(ControlPart):
    """All edits and pauses: an `EditService` for each incarnation."""

    name = "edits"

    def __init__(self, host: ControlHost) -> None:
        super().__init__(host)
        config = host.loaded(
            load_edits,
            otherwise=EditConfig(),
            told="invalid [edits] configuration, using the default limits",
        )
        self._edits = EditRegistry(
            host.records,
            config,
            publish=host.events.publish,
            applied=self._applied,
        )

    @classmethod
    def stored(cls) -> Mapping[str, ReadStored]:
        return {"edits": _stored}

    def routes(self) -> Sequence[APIRouter]:
        jobs = self.host.jobs
        return [
            rest.router(jobs, self._edits),
            training.pauses_router(jobs, self._edits),
            training.marks_router(jobs, self._edits),
        ]

    def metrics(self) -> Iterator[Metric]:
        edits = self._edits
        counts, ended = sorted(edits.open_counts().items()), sorted(edits.ended.items())
        yield family(Gauge, "paramd_edits_open", "Edits in progress", "job state", counts)
        yield family(Counted, "paramd_edits", "Edits that ended here", "job state", ended)
        seconds = by_job(edits.seconds)
        yield family(
            Counted, "paramd_edit_seconds", "Total time from creation to APPLIED", "job", seconds
        )
        pauses = by_job(edits.pause_counts())
        yield family(Counted, "paramd_pauses", "Pauses begun here", "job", pauses)

    def began(self, mesh: Incarnation) -> None:
        self._edits.began(mesh)

    def recalled(self, mesh: Incarnation) -> None:
        self._edits.began(mesh)

    def seen(self, mesh: Incarnation, view: MeshView) -> None:
        self._edits.tick(mesh, view)

    def ended(self, mesh: Incarnation) -> None:
        self._edits.is_over(mesh)

    def evicted(self, job: str) -> None:
        self._edits.evicted(job)

    async def closed(self) -> None:
        await self._edits.close()

    def _applied(self, row: EditRow) -> None:
        self.host.parts.edit_applied(row)

    async def pause(self, job: str, reason: str) -> bool:
        await self._edits.pause_for(job, reason)
        return True

    async def lost_marks(self, job: str) -> list[LostMark]:
        lost = await self._edits.service(job).marks.lost()
        return [LostMark(name=one.name, step=one.step, reason=one.reason) for one in lost]

    async def edit_of_data(
        self,
        mesh: Incarnation,
        by: Principal,
        ops: Sequence[OpSpec],
        edit_id: str | None,
        terms: Mapping[str, Any],
    ) -> EditOfData:
        spec = EditSpec(ops=tuple(ops), **terms)
        row = await self._edits.service(mesh.job).create(by, spec, edit_id)
        return _OfData(self._edits, by, row)


def _stored(connection: Connection, given: StoredRequest) -> dict[str, Any]:
    chosen = chosen_edits(given.job, state=given.state, id_prefix=given.id).limit(given.limit)
    documents = (rest.document_of(edit_of(row), NO_UNDO) for row in connection.execute(chosen))
    return {"edits": [_EDIT.dump_python(one, mode="json") for one in documents]}


class _OfData(EditOfData):
    """An edit of one caller, which another part uploads to."""

    def __init__(self, edits: EditRegistry, by: Principal, row: EditRow) -> None:
        super().__init__(row.id)
        self._edits = edits
        self._by = by
        self._row = row
        self._service = edits.service(row.job)

    @property
    def takes_data(self) -> bool:
        return self._service.takes_data(self._row)

    async def preview(self) -> Edit:
        return rest.stored_document(self._edits, await self._service.preview(self._row))

    async def commit(self) -> None:
        await self._service.commit(self._by, self._row)

    async def abort(self) -> None:
        await self._service.abort(self._by, self._row)

    async def ended(self, wait_s: float) -> Edit:
        return rest.stored_document(self._edits, await self._edits.wait(self._row, wait_s))
