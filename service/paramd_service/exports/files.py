"""Files that a rank writes to a destination, and reads back.

Plans are derived from the layout here, and the last one is kept. Blocking work runs on threads. A
cancelled call waits for its thread, and the file it was writing is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from paramd.errors import UsageError
from paramd.layout.codec import decode_layout
from paramd.layout.exports.plan import ExportPlan
from paramd.mesh.exports.pins import decode_plan
from paramd.v1 import common_pb2, export_pb2, layout_pb2
from paramd.wire import CHUNK_BYTES, data_chunk
from paramd_service.aio import uncancelled
from paramd_service.destinations.destinations import MANIFEST, FileSource, Place
from paramd_service.destinations.open import open_place
from paramd_service.exports.write import Digesting, Job, Memories, write_file
from paramd_service.formats.dcp import dcp_files
from paramd_service.formats.filling import manifest
from paramd_service.sidecar.calls import check_range
from paramd_service.sidecar.parts import SidecarHost
from paramd_service.sidecar.rpc import messages

MAX_STORED_BYTES = 256 << 20
"""Largest file that may be stored besides the planned ones."""
KEPT_S = 60.0
"""How long a plan is kept after its last use."""

_READ_BYTES = 8 << 20

Result = TypeVar("Result")


class RankExports:
    """The methods. One file is made at a time, so that memory stays bounded."""

    def __init__(self, rank: SidecarHost) -> None:
        self._rank = rank
        self._plans = Plans(rank)
        self._turn = asyncio.Lock()
        self._writing: dict[str, set[asyncio.Event]] = {}
        """By export id: an event per write in progress, set when it ends."""

    async def begin(self, request: export_pb2.BeginExportRequest, _timeout_s: float) -> Message:
        self._rank.follow_control(request.generation)
        place = open_place(request.target)
        async with self._writes(request.target.export_id):
            await in_thread(partial(place.begin, request.size_bytes))
        self._rank.faults.at("export-begun")
        return export_pb2.BeginExportResponse(header=messages.header(self._rank))

    async def write(
        self, request: export_pb2.WriteExportFileRequest, _timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        place = open_place(request.target)
        async with (
            self._job(request.plan, request.file) as job,
            self._writes(request.target.export_id),
        ):
            header = self._header(request.plan)
            async with aclosing(write_file(self._rank, job, place)) as progress:
                async for found in progress:
                    answer = export_pb2.WriteExportFileResponse(header=header)
                    if isinstance(found, int):
                        answer.written_bytes = found
                    else:
                        answer.written_bytes = found.size_bytes
                        answer.done.CopyFrom(found)
                    yield answer.SerializeToString()

    async def store(
        self, requests: AsyncIterator[export_pb2.StoreExportFileRequest], _timeout_s: float
    ) -> Message:
        first = await anext(requests, None)
        if first is None or not first.HasField("target"):
            raise UsageError(
                "target: missing; the first message of a file must have target and name"
            )
        place = open_place(first.target)
        data = bytearray(first.data)
        async for part in requests:
            data += part.data
            if len(data) > MAX_STORED_BYTES:
                raise UsageError(f"{first.name[:80]!r}: more than {MAX_STORED_BYTES:,} bytes")
        async with self._writes(first.target.export_id):
            done = await in_thread(partial(_store, place, first.name, memoryview(data)))
        self._rank.faults.at("export-stored")
        return export_pb2.StoreExportFileResponse(header=messages.header(self._rank), done=done)

    async def verify(
        self, request: export_pb2.VerifyExportFileRequest, _timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        place = open_place(request.target)
        header = messages.header(self._rank)
        digesting = Digesting()
        async with _opened(place, request.name, request.finished) as source:
            while await in_thread(partial(_read_on, source, digesting)):
                self._rank.faults.at("export-verify")
                read_bytes = digesting.size_bytes
                answer = export_pb2.VerifyExportFileResponse(header=header, read_bytes=read_bytes)
                yield answer.SerializeToString()
        found = digesting.file(request.name)
        answer = export_pb2.VerifyExportFileResponse(
            header=header, read_bytes=found.size_bytes, found=found
        )
        yield answer.SerializeToString()

    async def read(
        self, request: export_pb2.ReadExportFileRequest, _timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        place = open_place(request.target)
        async with _opened(place, request.name, request.finished) as source:
            begin, end = check_range(request.offset_bytes, request.size_bytes, source.size_bytes)
            yield export_pb2.ReadExportFileResponse(
                header=messages.header(self._rank), size_bytes=source.size_bytes
            ).SerializeToString()
            for offset in range(begin, end, CHUNK_BYTES):
                size_bytes = min(CHUNK_BYTES, end - offset)
                data = await in_thread(partial(source.read, offset, size_bytes))
                yield data_chunk(memoryview(data), offset)

    async def finish(self, request: export_pb2.FinishExportRequest, _timeout_s: float) -> Message:
        rank = self._rank
        rank.follow_control(request.generation)
        target = request.target
        place = open_place(target)
        plan = await self._plans.plan(request.plan)
        _check_complete(plan, request)
        rank.faults.at("export-finish")

        def work() -> list[export_pb2.ExportedFile]:
            small = plan.finish(dcp_files)
            files = [*request.files, *(digest_of(n, memoryview(c)) for n, c in small.items())]
            small[MANIFEST] = manifest(
                plan, request.plan, target, files, job=rank.config.job, created_s=request.created_s
            )
            sizes = {file.name: file.size_bytes for file in request.files}
            place.commit(small, sizes, rank.faults.at)
            return [*files, digest_of(MANIFEST, memoryview(small[MANIFEST]))]

        header = self._header(request.plan)
        async with self._writes(target.export_id):
            return export_pb2.FinishExportResponse(header=header, files=await in_thread(work))

    async def drop(self, request: export_pb2.DropExportRequest, _timeout_s: float) -> Message:
        self._rank.follow_control(request.generation)
        # An abandoned upload may still succeed, and its object appear after the removal.
        for written in list(self._writing.get(request.target.export_id, ())):
            await written.wait()
        if request.wait_only:
            return export_pb2.DropExportResponse(header=messages.header(self._rank))
        place = open_place(request.target)
        work = partial(place.drop, list(request.names), finished=request.finished)
        await in_thread(work)
        self._rank.faults.at("export-dropped")
        return export_pb2.DropExportResponse(header=messages.header(self._rank))

    @asynccontextmanager
    async def _writes(self, export_id: str) -> AsyncIterator[None]:
        ended = asyncio.Event()
        writing = self._writing.setdefault(export_id, set())
        writing.add(ended)
        try:
            yield
        finally:
            ended.set()
            writing.discard(ended)
            if not writing:
                self._writing.pop(export_id, None)

    @asynccontextmanager
    async def _job(self, message: export_pb2.ExportPlan, number: int) -> AsyncIterator[Job]:
        async with self._turn:
            plan = await self._plans.plan(message)
            if not 0 <= number < len(plan.files):
                raise UsageError(f"file: {number}; the plan has {len(plan.files)} files")
            async with Memories(self._rank, plan, message) as memories:
                yield Job(plan, plan.files[number], memories)

    def _header(self, message: export_pb2.ExportPlan) -> common_pb2.Header:
        header = messages.header(self._rank, message.step)
        header.edits = message.edits
        return header


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work; cancellation waits for it, since a thread cannot be stopped."""
    return await uncancelled(asyncio.to_thread(work))


def digest_of(name: str, data: memoryview) -> export_pb2.ExportedFile:
    """Size and checksum of a small file."""
    digesting = Digesting()
    digesting.update(data)
    return digesting.file(name)


@asynccontextmanager
async def _opened(place: Place, name: str, finished: bool) -> AsyncIterator[FileSource]:
    source = await in_thread(partial(place.open, name, finished=finished))
    try:
        yield source
    finally:
        source.close()


def _store(place: Place, name: str, data: memoryview) -> export_pb2.ExportedFile:
    sink = place.create(name, len(data))
    try:
        sink.write(data)
        sink.finish()
    finally:
        sink.abort()
    return digest_of(name, data)


def _read_on(source: FileSource, digesting: Digesting) -> int:
    data = source.read(digesting.size_bytes, _READ_BYTES)
    digesting.update(memoryview(data))
    return len(data)


def _check_complete(plan: ExportPlan, request: export_pb2.FinishExportRequest) -> None:
    written = {file.name: file.size_bytes for file in request.files}
    for file in plan.files:
        if written.get(file.name) != file.size_bytes:
            raise UsageError(
                f"files: {file.name} was planned with {file.size_bytes:,} bytes; "
                f"{written.get(file.name)} were reported written"
            )


class Plans:
    """Plans derived from messages; keeps the latest."""

    def __init__(self, rank: SidecarHost) -> None:
        self._rank = rank
        self._key: tuple[int, str, bytes] | None = None
        self._kept: ExportPlan | None = None
        self._making = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def plan(self, message: export_pb2.ExportPlan) -> ExportPlan:
        """Derive the plan of a message, or return the kept one.

        Raises:
            ConflictError: For another incarnation or layout, or a plan of another version.
            UsageError: If the message names something that does not exist.
        """
        self._rank.check_plan(message.incarnation, message.layout_digest)
        key = (message.incarnation, message.layout_digest, message.digest)
        async with self._making:
            if self._kept is None or key != self._key:
                layout = self._rank.ready_mesh().layout
                self._kept = await asyncio.to_thread(_made, layout, message)
                self._key = key
            self._forget_later()
            return self._kept

    def _forget_later(self) -> None:
        """Drop the plan after a while: it takes memory, and can be derived again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(KEPT_S, self._forget)

    def _forget(self) -> None:
        self._kept = self._key = None


def _made(layout: bytes, message: export_pb2.ExportPlan) -> ExportPlan:
    return decode_plan(message, decode_layout(layout_pb2.Layout.FromString(layout)))
