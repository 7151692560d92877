"""The last part of an export: read back, then made visible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from paramd.errors import DataLossError
from paramd.v1 import export_pb2
from paramd_service.control.exports import machine
from paramd_service.control.exports.job import ExportJob
from paramd_service.control.exports.machine import File, FileState


async def finish(job: ExportJob, *, committing: Callable[[], None]) -> None:
    """Stores what is copied beside, reads all back, makes the export visible. Idempotent.

    Args:
        committing: Called right before it becomes visible: from then on it cannot be undone.

    Raises:
        DataLossError: a file is not what was written. ParamdError: as the destination says.
    """
    files = [_exported(file) for file in job.export.files.values()]
    for name, data in job.assets.items():
        store = partial(job.crew.calls.store, target=job.target, name=name, data=data)
        _, stored = await job.crew.any(store)
        files.append(stored)
    if job.wish.verify:
        await _verify(job, files)
    committing()
    rank, found = await job.crew.any(
        partial(
            job.crew.calls.finish,
            target=job.target,
            plan=job.message,
            files=files,
            created_s=job.row.created_s,
        )
    )
    beside = [_beside(one, rank) for one in found if one.name not in job.export.files]
    job.change(machine.committed(job.export, beside))


async def _verify(job: ExportJob, files: Sequence[export_pb2.ExportedFile]) -> None:
    shares: dict[int, list[export_pb2.ExportedFile]] = {}
    for file in files:
        known = job.export.files.get(file.name)
        shares.setdefault(known.rank if known is not None else 0, []).append(file)
    async with asyncio.TaskGroup() as group:
        for rank, share in shares.items():
            group.create_task(_verify_share(job, rank, share))


async def _verify_share(
    job: ExportJob, rank: int, files: Sequence[export_pb2.ExportedFile]
) -> None:
    for file in files:
        request = export_pb2.VerifyExportFileRequest(target=job.target, name=file.name)
        verify = partial(job.crew.calls.verify, request=request, timeout_s=job.wish.timeout_s)
        _, found = await job.crew.any(verify, first=rank)
        if (found.size_bytes, found.xxh3) != (file.size_bytes, file.xxh3):
            raise DataLossError(
                f"{file.name} was read back as {found.size_bytes:,} bytes with checksum "
                f"{found.xxh3.hex()}; written were {file.size_bytes:,} with {file.xxh3.hex()}: "
                "the destination does not keep what it is given"
            )
        if file.name in job.export.files:
            job.change(machine.verified(job.export, file.name))
            await job.save_progress()


def _exported(file: File) -> export_pb2.ExportedFile:
    return export_pb2.ExportedFile(
        name=file.name, size_bytes=file.size_bytes, xxh3=bytes.fromhex(file.checksum)
    )


def _beside(file: export_pb2.ExportedFile, rank: int) -> File:
    return File(
        name=file.name,
        size_bytes=file.size_bytes,
        written_bytes=file.size_bytes,
        rank=rank,
        state=FileState.VERIFIED,
        checksum=file.xxh3.hex(),
    )
