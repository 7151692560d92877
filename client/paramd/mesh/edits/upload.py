"""Uploads an edit's operands to all sidecars concurrently, once per host.

Clients on the sidecar's host lend it memory, from which it copies and verifies: tensors that were
summoned for writing where they lie, others by way of a ring. The client never maps the memory
that the trainer reads, so verified bytes cannot change afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import grpc.aio

from paramd.errors import NotFoundError, UnreachableError
from paramd.layout.edits.ops import encode_op
from paramd.layout.edits.plan import RankEdit
from paramd.mesh.edits.lending import Lender, send
from paramd.mesh.peers.grpc import RankUnreachableError, call_timeout_s, error_of
from paramd.mesh.reading.transfer import all_ended, is_same_host
from paramd.state_files import kernel_of
from paramd.v1 import sidecar_pb2
from paramd.wire import data_chunk

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
        self._groups = _groups(sidecars, operands.plan.ranks)
        self._total_bytes = sum(group[0].data_bytes for group in self._groups)

    async def run(self) -> None:
        """Stage the edit on all ranks; bytes that are already staged are not sent again.

        Raises:
            RankUnreachableError: a sidecar does not respond; a new upload resumes there.
            UsageError, ConflictError, ExhaustedError: a sidecar refused it.
        """
        await all_ended([self._group(group) for group in self._groups])

    async def _group(self, group: Sequence[RankEdit]) -> None:
        """Stage ranks of one host that need the same data: upload to one, the others copy."""
        first, *others = group
        await self._stage(first, copy_from=None)
        await asyncio.gather(*(self._stage(rank, copy_from=first.rank) for rank in others))

    async def _stage(self, rank: RankEdit, copy_from: int | None) -> None:
        shared = copy_from is None and rank.data_bytes and self._is_here(rank)
        begin = 0
        if rank.data_bytes and copy_from is None and not shared:
            begin = await self._staged_bytes(rank.rank)
        requests = self._requests(rank, begin, copy_from, with_data=not shared)
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
        if shared:
            await self._lend(rank)

    def _is_here(self, rank: RankEdit) -> bool:
        peer = self._sidecars.document.peer(rank.rank)
        small = self._transport == "auto" and rank.data_bytes < LENT_FROM_BYTES
        return self._transport != "grpc" and not small and is_same_host(peer)

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

    async def _staged_bytes(self, rank: int) -> int:
        try:
            found = await self._sidecars.get_edit(rank, self._manifest.edit_id, _ASK_S)
        except NotFoundError:
            return 0
        return int(found.progress.staged_bytes)

    async def _requests(
        self, rank: RankEdit, begin: int, copy_from: int | None, *, with_data: bool
    ) -> AsyncIterator[bytes]:
        from paramd.mesh.edits.operands import parts

        first = sidecar_pb2.StageEditRequest(manifest=self._manifest)
        if copy_from is not None:
            first.copy_from_rank = copy_from
        yield first.SerializeToString()
        if copy_from is not None or not with_data:
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


def _groups(sidecars: Sidecars, ranks: Iterable[RankEdit]) -> list[list[RankEdit]]:
    """Groups of ranks that share an upload: same data, same host, with a Unix socket."""
    groups: dict[object, list[RankEdit]] = {}
    for rank in ranks:
        peer = sidecars.document.peer(rank.rank)
        alone = not rank.data_bytes or not peer.socket_path
        key = rank.rank if alone else (kernel_of(peer.host_id), rank.data_key())
        groups.setdefault(key, []).append(rank)
    return list(groups.values())
