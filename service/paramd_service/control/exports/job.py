"""What is known of one export while it runs here, and how that is kept and told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from paramd.v1 import export_pb2
from paramd_service.control.exports import machine
from paramd_service.control.exports.documents import ExportSpec, read_spec
from paramd_service.control.exports.machine import Export, File, FileState, State
from paramd_service.control.exports.sidecars import Leases, SidecarGroup
from paramd_service.control.store.errors import StoreError
from paramd_service.control.store.exports import ExportFileRow, ExportRow, ExportStore

if TYPE_CHECKING:
    from paramd.layout.exports.plan import ExportPlan

SAVE_EVERY_S: Final = 1.0

log = logging.getLogger("paramd.control.exports")

Told = Callable[["ExportJob", bool], None]
"""Is told of a change; True: not only of bytes."""


Place = Callable[[ExportRow], export_pb2.ExportTarget]
"""Where an export goes; raises UsageError or NotFoundError."""


class ExportJob:
    """One export. Used on the event loop only."""

    def __init__(
        self,
        row: ExportRow,
        files: Sequence[ExportFileRow],
        *,
        group: SidecarGroup,
        place: Place,
        assets: Mapping[str, bytes],
        store: ExportStore,
        told: Told = lambda job, whole: None,
    ) -> None:
        """No I/O.

        Args:
            files: What the store has of its files; empty when nothing has begun.
            place: Where an export goes.
            assets: Small files that are copied beside, by name.
        """
        self.row = row
        self.spec: ExportSpec = read_spec(row.request)
        self.export = _restored(row, files)
        self.group = group
        self._place = place
        self.assets = assets
        self.message = export_pb2.ExportPlan.FromString(row.plan)
        """The plan with its pins; empty while nothing is pinned."""
        self.plan: ExportPlan | None = None
        self.leases: Leases | None = None
        self._store = store
        self._told = told
        self._saved_s = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether something is pinned, and may be written."""
        return bool(self.row.plan)

    @property
    def target(self) -> export_pb2.ExportTarget:
        """Where it goes. Raises UsageError or NotFoundError when the destination is no more."""
        return self._place(self.row)

    @property
    def files(self) -> list[ExportFileRow]:
        """Its files as they stand now."""
        return [_row(file) for file in self.export.files.values()]

    def change(self, export: Export) -> None:
        """Takes in a new state; whoever follows is told."""
        whole = export.state is not self.export.state
        self.export = export
        self.row = replace(
            self.row,
            state=export.state,
            reason=export.reason,
            epoch=export.epoch,
            step=export.step,
        )
        self._told(self, whole)

    def rank_lost(self, rank: int, why: str) -> None:
        """A rank does not answer, so what it had pinned is gone."""
        log.warning("export %s: rank %d is lost: %s", self.row.id, rank, why)
        self.change(machine.lost(self.export, rank, keeps_snapshot=False, why=why))

    def hold(self, pins: Sequence[export_pb2.ExportPin]) -> Leases:
        """Takes the leases of these pins over: they are released at the end."""
        self.leases = Leases(self.group, pins, self.rank_lost)
        return self.leases

    async def save(self) -> None:
        """Makes all of it durable.

        Raises:
            StoreError: the store is away. TakenOverError: another control plane goes on.
        """
        self._saved_s = time.monotonic()
        await self._store.save(self.row, self.files)

    async def save_progress(self) -> None:
        """Makes it durable now and then; a store that is away costs only that.

        Raises:
            TakenOverError: another control plane goes on with it.
        """
        if time.monotonic() - self._saved_s < SAVE_EVERY_S:
            return
        try:
            await self.save()
        except StoreError as error:
            log.warning("progress of export %s is not kept: %s", self.row.id, error)


def _restored(row: ExportRow, files: Sequence[ExportFileRow]) -> Export:
    return Export(
        state=State(row.state),
        reason=row.reason,
        epoch=row.epoch,
        step=row.step,
        files={
            file.name: File(
                name=file.name,
                size_bytes=file.size_bytes,
                rank=file.rank,
                state=FileState(file.state),
                written_bytes=file.written_bytes,
                checksum=file.checksum,
            )
            for file in files
        },
    )


def _row(file: File) -> ExportFileRow:
    return ExportFileRow(
        name=file.name,
        size_bytes=file.size_bytes,
        written_bytes=file.written_bytes,
        rank=file.rank,
        checksum=file.checksum,
        state=file.state,
    )
