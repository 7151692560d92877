"""What the control plane asks of sidecars for an export. A rank that stops is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import grpc.aio

from paramd.errors import DataLossError, DeadlineError, ParamdError, UnreachableError
from paramd.mesh.asked import Asked
from paramd.mesh.peers.grpc import Channels, cancelled, error_of, watched
from paramd.v1 import export_pb2, sidecar_pb2
from paramd.wire import checksum_of
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.sidecars import ControlTicket

UNARY_TIMEOUT_S: Final = 60.0
PROBE_TIMEOUT_S: Final = 3.0
QUIET_S: Final = 1.5
"""After so long without progress the ranks of a file are asked whether they live."""
READ_BYTES: Final = 8 << 20
STORE_PART_BYTES: Final = 512 << 10

Moved = Callable[[int], None]
"""Is told bytes that are done."""


class RankLostError(UnreachableError):
    """A rank does not answer: killed, stopped, or cut off."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


class ExportCalls:
    """The sidecars of one epoch, over channels of its own."""

    def __init__(self, bootstrap: Bootstrap, *, generation: int) -> None:
        """No I/O."""
        self._generation = generation
        self._bootstrap = bootstrap
        self._channels = Channels(ControlTicket(bootstrap))

    async def close(self) -> None:
        """Closes all channels."""
        await self._channels.close()

    async def begin(
        self, rank: int, address: str, target: export_pb2.ExportTarget, size_bytes: int
    ) -> None:
        """Makes the place ready. Raises ParamdErrors, RankLostError when nobody answers."""
        request = export_pb2.BeginExportRequest(
            target=target, size_bytes=size_bytes, generation=self._generation
        )
        await self._unary(rank, address, "BeginExport", request)

    async def write(
        self,
        rank: int,
        address: str,
        request: export_pb2.WriteExportFileRequest,
        *,
        sources: Sequence[tuple[int, str]],
        moved: Moved,
        timeout_s: float,
    ) -> export_pb2.ExportedFile:
        """Has a rank write one file.

        Args:
            sources: Ranks (and their addresses) that it reads from.
            moved: Told the bytes written so far.

        Raises:
            RankLostError: the rank, or one of its sources, does not answer.
            UnreachableError: the call broke though all of them answer.
            ParamdError: what the writer says.
        """
        asked = self._bootstrap.asked(rank, address)
        call = self._channels.open(asked, "WriteExportFile", request, timeout_s=timeout_s)
        probe = self._probes([(rank, address), *sources])
        async with _answers(call, asked, probe) as messages:
            async for message in messages:
                moved(message.written_bytes)
                if message.HasField("done"):
                    return _file(message.done)
        raise UnreachableError(f"rank {rank}: its answer ended before the file did")

    async def verify(
        self,
        rank: int,
        address: str,
        request: export_pb2.VerifyExportFileRequest,
        *,
        timeout_s: float,
    ) -> export_pb2.ExportedFile:
        """Has a rank read a file back. Raises as `write`."""
        asked = self._bootstrap.asked(rank, address)
        call = self._channels.open(asked, "VerifyExportFile", request, timeout_s=timeout_s)
        probe = self._probes([(rank, address)])
        async with _answers(call, asked, probe) as messages:
            async for message in messages:
                if message.HasField("found"):
                    return _file(message.found)
        raise UnreachableError(f"rank {rank}: its answer ended before the file did")

    async def store(
        self, rank: int, address: str, target: export_pb2.ExportTarget, name: str, data: bytes
    ) -> export_pb2.ExportedFile:
        """Stores a small file beside the others. Raises as `begin`."""

        async def parts() -> AsyncIterator[export_pb2.StoreExportFileRequest]:
            yield export_pb2.StoreExportFileRequest(target=target, name=name)
            for begin in range(0, len(data), STORE_PART_BYTES):
                yield export_pb2.StoreExportFileRequest(data=data[begin : begin + STORE_PART_BYTES])

        answer = await self._unary(rank, address, "StoreExportFile", parts())
        return _file(answer.done)

    async def finish(
        self,
        rank: int,
        address: str,
        target: export_pb2.ExportTarget,
        plan: export_pb2.ExportPlan,
        files: Iterable[export_pb2.ExportedFile],
        created_s: float,
    ) -> list[export_pb2.ExportedFile]:
        """Makes the export visible; all its files. Raises as `begin`."""
        request = export_pb2.FinishExportRequest(
            target=target,
            plan=plan,
            files=files,
            generation=self._generation,
            created_s=created_s,
        )
        answer = await self._unary(rank, address, "FinishExport", request)
        return list(answer.files)

    async def drop(
        self,
        rank: int,
        address: str,
        target: export_pb2.ExportTarget,
        names: Iterable[str],
        *,
        finished: bool = False,
        wait_only: bool = False,
    ) -> None:
        """Removes what an export left, or a finished one, once the rank writes no more of it.

        `wait_only` removes nothing. Raises as `begin`.
        """
        request = export_pb2.DropExportRequest(
            target=target,
            names=names,
            finished=finished,
            generation=self._generation,
            wait_only=wait_only,
        )
        await self._unary(rank, address, "DropExport", request)

    async def read(
        self,
        rank: int,
        address: str,
        target: export_pb2.ExportTarget,
        name: str,
        offset_bytes: int,
    ) -> tuple[int, bytes]:
        """(size of a finished export's file, up to READ_BYTES of it from an offset on).

        Raises: as `write`; DataLossError: bytes do not match their checksum.
        """
        request = export_pb2.ReadExportFileRequest(
            target=target,
            name=name,
            finished=True,
            offset_bytes=offset_bytes,
        )
        asked = self._bootstrap.asked(rank, address)
        call = self._channels.open(asked, "ReadExportFile", request, timeout_s=UNARY_TIMEOUT_S)
        whole_bytes, data = 0, bytearray()
        probe = self._probes([(rank, address)])
        async with _answers(call, asked, probe) as messages:
            async for message in messages:
                if message.HasField("header"):
                    whole_bytes = message.size_bytes
                if message.data and checksum_of(message.data, message.offset_bytes) != message.xxh3:
                    raise DataLossError(f"rank {rank}: bytes of {name} came damaged; try again")
                data += message.data
                if len(data) >= READ_BYTES:
                    break
        return whole_bytes, bytes(data)

    async def renew(self, rank: int, address: str, snapshot_id: str, lease_s: float) -> float:
        """Prolongs a lease; the seconds granted. Raises NotFoundError when it has ended."""
        request = sidecar_pb2.RenewSnapshotRequest(
            snapshot_id=snapshot_id, lease_ms=int(1000 * lease_s)
        )
        answer = await self._unary(rank, address, "RenewSnapshot", request, timeout_s=5.0)
        return float(answer.lease_ms / 1000)

    async def release(self, rank: int, address: str, snapshot_id: str) -> None:
        """Ends a lease. Raises as `begin`."""
        request = sidecar_pb2.ReleaseSnapshotRequest(snapshot_id=snapshot_id)
        await self._unary(rank, address, "ReleaseSnapshot", request, timeout_s=2.0)

    async def _unary(
        self,
        rank: int,
        address: str,
        name: str,
        request: Any,
        *,
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> Any:
        asked = self._bootstrap.asked(rank, address)
        call = self._channels.ask(asked, name, request, timeout_s=timeout_s)
        try:
            return await watched(call, lambda: self._probe(rank, address))
        except RankLostError:
            raise
        except (UnreachableError, DeadlineError):
            await self._probe(rank, address)
            raise

    def _probes(self, ranks: Sequence[tuple[int, str]]) -> Callable[[], Awaitable[None]]:
        async def probe() -> None:
            asked = [self._probe(rank, address) for rank, address in dict(ranks).items()]
            for found in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(found, BaseException):
                    raise found

        return probe

    async def _probe(self, rank: int, address: str) -> None:
        asked, request = self._bootstrap.asked(rank, address), sidecar_pb2.GetStateRequest()
        try:
            await self._channels.ask(asked, "GetState", request, timeout_s=PROBE_TIMEOUT_S)
        except (DeadlineError, UnreachableError) as error:
            raise RankLostError(
                rank, f"rank {rank} does not answer: its sidecar is stopped, dead or cut off"
            ) from error
        except ParamdError:
            pass  # it answered, and that was the question


@asynccontextmanager
async def _answers(
    call: Any, asked: Asked, probe: Callable[[], Awaitable[None]]
) -> AsyncIterator[AsyncIterator[Any]]:
    """Messages of a streaming call, with somebody asking whether its ranks live."""
    async with aclosing(_messages(call, asked, probe)) as messages:
        try:
            yield messages
        finally:
            call.cancel()


async def _messages(
    call: Any, asked: Asked, probe: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Any, None]:
    first = True
    try:
        while (message := await _next(call, probe)) is not grpc.aio.EOF:
            if first or message.HasField("header"):
                asked.check(message.header)
            first = False
            yield message
        if await call.code() is not grpc.StatusCode.OK:
            await call
    except grpc.aio.AioRpcError as error:
        found = error_of(error, asked.who)
        if isinstance(found, UnreachableError | DeadlineError):
            await probe()
        raise found from error


async def _next(call: Any, probe: Callable[[], Awaitable[None]]) -> Any:
    reading = asyncio.ensure_future(call.read())
    try:
        while not (await asyncio.wait({reading}, timeout=QUIET_S))[0]:
            await probe()
        return reading.result()
    finally:
        await cancelled(reading)


def _file(message: export_pb2.ExportedFile) -> export_pb2.ExportedFile:
    found = export_pb2.ExportedFile()
    found.CopyFrom(message)
    return found
