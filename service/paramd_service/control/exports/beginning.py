"""The first part of an export: a plan, and one step pinned; or those of another control plane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from paramd.errors import ConflictError, DeadlineError, NotFoundError, UsageError
from paramd_service.control.exports import machine
from paramd_service.control.exports.job import ExportJob
from paramd_service.control.exports.machine import File, State
from paramd_service.control.exports.wish import named_at

if TYPE_CHECKING:
    from paramd.layout.export_plan import ExportPlan
    from paramd.layout.export_sources import Source
    from paramd.mesh.export_pins import PinnedExport

PIN_S: Final = 60.0

log = logging.getLogger("paramd.control.exports")


async def begin(job: ExportJob) -> None:
    """Plans, pins one step, and makes that durable before a byte is written.

    Raises:
        ParamdError: no plan, no common step, no store.
    """
    from paramd.layout.export_plan import plan_export
    from paramd.mesh.export_messages import encode_plan

    await job.crew.wait_for()
    digest, layout = await job.crew.layout()
    plan = await asyncio.to_thread(plan_export, layout, job.wish.settings)
    clash = {file.name for file in plan.files} & set(job.assets)
    if clash:
        raise UsageError(f"assets: {min(clash)!r} is the name of a file of the export")
    pinned = await _pinned(job, plan)
    plan, pins = pinned.plan, pinned.pins
    leases = job.hold(pins)
    await leases.renew()
    leases.keep()
    job.plan = plan
    job.message = encode_plan(
        plan,
        epoch=pinned.epoch,
        layout_digest=digest,
        step=pinned.step,
        edits=pinned.edits,
        pins=pins,
    )
    job.row = replace(
        job.row,
        plan=job.message.SerializeToString(),
        destination=named_at(job.row.destination, epoch=pinned.epoch, step=pinned.step),
    )
    job.change(
        machine.planned(
            job.export,
            epoch=pinned.epoch,
            step=pinned.step,
            files=[_file(plan, index) for index in range(len(plan.files))],
        )
    )
    await job.save()


async def _pinned(job: ExportJob, plan: ExportPlan) -> PinnedExport:
    try:
        return await job.crew.pin(plan, timeout_s=PIN_S, optimizer=job.wish.optimizer)
    except DeadlineError as error:
        if plan.layout.mirrored or not (plan.with_buffers or job.wish.optimizer):
            raise
        raise DeadlineError(
            f"{error}; parameters alone (--include parameters) need no boundary while training "
            "stands still"
        ) from error


async def adopt(job: ExportJob) -> None:
    """Goes on where another control plane stopped, if the snapshot still lives.

    Raises:
        ParamdError: as `begin`.
        ConflictError: it cannot go on.
    """
    pins = list(job.message.pins)
    lives = job.message.epoch == job.crew.epoch
    if lives:
        await job.crew.wait_for(pin.rank for pin in pins)
    leases = job.hold(pins)
    if lives and job.export.state is State.RUNNING:
        try:
            await leases.renew()
            leases.keep()
        except NotFoundError:
            lives = False
    export, why = machine.after_restart(job.export, epoch=job.crew.epoch, snapshot_lives=lives)
    log.info("export %s is taken over as %s: %s", job.row.id, export.state, why)
    job.change(export)
    if export.state is State.RUNNING:
        await _replan(job)
    await job.save()


async def _replan(job: ExportJob) -> None:
    from paramd.mesh.export_messages import decode_plan

    digest, layout = await job.crew.layout()
    if digest != job.message.layout_digest:
        raise ConflictError("the job's layout has changed meanwhile; export again")
    plan = job.plan = await asyncio.to_thread(decode_plan, job.message, layout)
    planned = [_file(plan, index) for index in range(len(plan.files))]
    files = {
        file.name: replace(job.export.files[file.name], sources=file.sources) for file in planned
    }
    job.change(replace(job.export, files=files))


def _file(plan: ExportPlan, index: int) -> File:
    file = plan.files[index]
    ranks: set[int] = set()
    for entry in file.entries:
        if entry.tensor >= 0:
            ranks.update(_holders(plan.sources[entry.state_key], entry.tensor))
    return File(
        name=file.name, size_bytes=file.size_bytes, rank=file.rank, sources=frozenset(ranks)
    )


def _holders(source: Source, tensor: int) -> Iterable[int]:
    return (piece.rank for piece in source.tensors[tensor].pieces)
