"""Uploads an edit's operands to all sidecars concurrently.

Clients on the sidecar's host lend it memory, from which it copies and verifies: tensors that were
summoned for writing where they lie, others by way of a ring. The client never maps the memory
that the trainer reads, so verified bytes cannot change afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final

import grpc.aio

from paramd import streams
from paramd.errors import (
    DataLossError,
    DeadlineError,
    NotFoundError,
    ParamdError,
    UnreachableError,
)
from paramd.layout.edits.ops import encode_op
from paramd.layout.edits.plan import RankEdit
from paramd.mesh.edits.lending import Lender, send
from paramd.mesh.peers.bulk import BulkStream, NoStreamError, on_thread
from paramd.mesh.peers.grpc import RankUnreachableError, call_timeout_s, error_of, watched
from paramd.mesh.reading.transfer import all_ended, is_same_host
from paramd.v1 import sidecar_pb2
from paramd.wire import checksum_of, data_chunk

if TYPE_CHECKING:
    from paramd.mesh.edits.calls import EditTerms
    from paramd.mesh.edits.operands import Operands
    from paramd.mesh.peers.sidecars import Sidecars
    from paramd.mesh.reading.stream import Transport
from paramd.mesh.reading.transfer import Transfer

Progress = Callable[[int, int], None]
"""Called with bytes sent and total bytes."""

LENT_FROM_BYTES: Final = 4 << 20
"""Smaller uploads are faster over gRPC than with the extra call that lends memory."""

_ASK_S: Final = 5.0


class Uploads:
    """The upload of one edit to all ranks; `run` may be called once."""

    def __init__(
        self,
        sidecars: Sidecars,
        manifest: sidecar_pb2.EditManifest,
        operands: Operands,
        *,
        transfer: Transfer,
        lender: Lender,
        transport: Transport,
        deadline_s: float,
        progress: Progress | None,
    ) -> None:
        self._sidecars = sidecars
        self._transfer = transfer
        self._lender = lender
        self._transport = transport
        self._manifest = manifest
        self._operands = operands
        self._deadline_s = deadline_s
        self._progress = progress
        self._sent_bytes = 0
        self._total_bytes = sum(rank.data_bytes for rank in operands.plan.ranks)

    async def run(self) -> None:
        """Stage the edit on all ranks; bytes that are already staged are not sent again.

        Raises:
            RankUnreachableError: a sidecar does not respond; a new upload resumes there.
            UsageError, ConflictError, ExhaustedError: a sidecar refused it.
        """
        await all_ended([self._stage(rank) for rank in self._operands.plan.ranks])

    async def _stage(self, rank: RankEdit) -> None:
        lane = self._lane(rank) if rank.data_bytes else "grpc"
        begin = 0
        if rank.data_bytes and lane == "grpc":
            begin = await self._staged_bytes(rank.rank)
        requests = self._requests(rank, begin, with_data=lane == "grpc")
        try:
            await self._sidecars.stage(
                rank.rank,
                requests,
                timeout_s=call_timeout_s(self._deadline_s - time.monotonic()),
            )
        except grpc.aio.AioRpcError as error:
            found = error_of(error, self._sidecars.who(rank.rank))
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise RankUnreachableError(rank.rank, str(found)) from error
            raise found from error
        if lane == "same-host":
            await self._lend(rank)
        elif lane == "stream":
            try:
                await self._stream(rank)
            except NoStreamError as error:
                if self._transport == "stream":
                    raise RankUnreachableError(rank.rank, str(error)) from error
                self._sidecars.keep_to_grpc(rank.rank)
                await self._stage(rank)

    def _lane(self, rank: RankEdit) -> Transport:
        """How a rank's data goes there."""
        if self._transport in ("stream", "grpc"):
            return self._transport
        if self._transport == "auto" and rank.data_bytes < LENT_FROM_BYTES:
            return "grpc"
        if is_same_host(self._sidecars.document.peer(rank.rank)):
            return "same-host"
        return "stream" if self._sidecars.has_streams(rank.rank) else "grpc"

    async def _lend(self, rank: RankEdit) -> None:
        document = self._sidecars.document
        peer = document.peer(rank.rank)

        def work() -> None:
            from paramd.mesh.edits.operands import lent_memories, parts

            with self._lender.loan(peer, document.ticket, lent_memories(self._operands)) as loan:
                staged_bytes = loan.stage(document.ticket, self._manifest.edit_id)
                self._told(staged_bytes)
                data = parts(self._operands, rank, staged_bytes)
                send(loan, data, staged_bytes, self._told)

        try:
            await self._transfer.run(work)
        except UnreachableError as error:
            raise RankUnreachableError(rank.rank, str(error)) from error

    async def _stream(self, rank: RankEdit) -> None:
        """Send a rank's data over a bulk stream.

        Raises:
            NoStreamError: the port for streams cannot be used.
        """
        number, sidecars = rank.rank, self._sidecars
        offer = await sidecars.offer_upload(number, self._manifest.edit_id)
        stream = BulkStream(offer, offer.staged_bytes, rank.data_bytes)
        sending = on_thread(partial(self._send, stream, rank), stream.stop)
        try:
            async with asyncio.timeout(max(self._deadline_s - time.monotonic(), 0.0)):
                await watched(sending, lambda: sidecars.probe(number))
        except TimeoutError as error:
            raise DeadlineError(
                f"{sidecars.who(number)}: the data was not sent in time; allow more (timeout=)"
            ) from error
        except NoStreamError:
            raise
        except UnreachableError as error:
            raise RankUnreachableError(number, str(error)) from error
        except ParamdError as error:
            raise type(error)(f"{sidecars.who(number)}: {error}") from error
        except (OSError, EOFError) as error:
            raise RankUnreachableError(
                number, f"{sidecars.who(number)}: the stream of an edit's data broke off"
            ) from error

    def _send(self, stream: BulkStream, rank: RankEdit) -> None:
        """Send everything, and wait until it has been taken. Blocks."""
        from paramd.mesh.edits.operands import parts

        with closing(stream):
            stream.open()
            at = stream.begin
            self._told(at)
            for part in parts(self._operands, rank, at):
                if stream.has_word():
                    break  # a refusal: what would follow is not wanted
                xxh3 = checksum_of(part, at) if stream.checksums else 0
                stream.send(streams.Window(streams.DATA, at, len(part), xxh3), part)
                at += len(part)
                self._told(len(part))
            last = stream.window()
            if last.kind != streams.LAST or last.offset != stream.end:
                raise DataLossError(f"the sidecar took {last.offset:,} of {stream.end:,} bytes")

    async def _staged_bytes(self, rank: int) -> int:
        try:
            found = await self._sidecars.get_edit(rank, self._manifest.edit_id, _ASK_S)
        except NotFoundError:
            return 0
        return int(found.progress.staged_bytes)

    async def _requests(
        self, rank: RankEdit, begin: int, *, with_data: bool
    ) -> AsyncIterator[bytes]:
        from paramd.mesh.edits.operands import parts

        yield sidecar_pb2.StageEditRequest(manifest=self._manifest).SerializeToString()
        if not with_data:
            return
        self._told(begin)
        for part in parts(self._operands, rank, begin):
            yield data_chunk(part, begin)
            begin += len(part)
            self._told(len(part))

    def _told(self, size_bytes: int) -> None:
        self._sent_bytes += size_bytes
        if self._progress is not None and self._total_bytes:
            self._progress(min(self._sent_bytes, self._total_bytes), self._total_bytes)


def manifest_of(
    edit_id: str, sidecars: Sidecars, operands: Operands, terms: EditTerms
) -> sidecar_pb2.EditManifest:
    """The manifest for all ranks; it must equal the control plane's own."""
    return sidecar_pb2.EditManifest(
        edit_id=edit_id,
        incarnation=sidecars.document.incarnation,
        layout_digest=sidecars.document.layout_digest,
        ops=map(encode_op, operands.ops),
        undoable=True,
        if_step=terms.if_step,
        reset_moments=terms.reset_moments,
        allow_nonfinite=terms.allow_nonfinite,
    )
