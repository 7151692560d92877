"""One edit from its operations to its end (`make_edit`), and the changes of a writeback block.

Operands are uploaded to all sidecars concurrently. Clients on the sidecar's host lend it memory,
from which it copies and verifies: tensors that were summoned for writing where they are, others
through a ring. The client never maps the memory that the trainer reads, so verified bytes cannot
change afterwards.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, get_args

import grpc.aio
from xxhash import xxh3_128_digest

from paramd import streams
from paramd.errors import (
    DataLossError,
    DeadlineError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd.layout.edits.ops import EditTerms, OpSpec, manifest_of
from paramd.layout.edits.plan import RankEdit
from paramd.layout.select import Pattern, Selection, select
from paramd.mesh.edits.calls import Edit, EditCalls, check_applied, new_edit_id
from paramd.mesh.edits.lending import Lender, Sender
from paramd.mesh.peers.bulk import BulkStream, NoStreamError, on_thread
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.grpc import (
    RankUnreachableError,
    all_ended,
    call_timeout_s,
    error_of,
    watched,
)
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.ops import is_same_host
from paramd.mesh.reading.transfer import MAX_COPY_THREADS, Transfer, check_transport
from paramd.mesh.results import Summoned
from paramd.v1 import sidecar_pb2
from paramd.wire import LEASE_S, checksum_of, data_chunk

if TYPE_CHECKING:
    from torch import Tensor

    from paramd.mesh.edits.operands import Operands
    from paramd.mesh.reading.stream import Transport

Progress = Callable[[int, int], None]
"""Called with bytes sent and total bytes."""

LENT_FROM_BYTES: Final = 4 << 20
"""Smaller uploads are faster over gRPC than with the extra call that lends memory."""

_ASK_S: Final = 5.0

Mode = Literal["replace", "delta"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sending:
    """Options of the upload of operands."""

    lender: Lender
    transport: Transport = "auto"
    progress: Progress | None = None
    deadline_s: float
    """Deadline of the whole edit, on the monotonic clock."""


@dataclass(eq=False)
class Uploads:
    """The upload of one edit to all ranks; `run` may be called once."""

    sidecars: Sidecars
    transfer: Transfer
    manifest: sidecar_pb2.EditManifest
    operands: Operands
    how: Sending

    def __post_init__(self) -> None:
        self._sent_bytes = 0
        self._total_bytes = sum(rank.data_bytes for rank in self.operands.plan.ranks)

    async def run(self) -> None:
        """Stage the edit on all ranks; bytes that are already staged are not sent again.

        Raises:
            RankUnreachableError: If a sidecar does not respond (a new upload resumes there).
            UsageError, ConflictError, ExhaustedError: If a sidecar refused it.
        """
        await all_ended([self._stage(rank) for rank in self.operands.plan.ranks])

    async def _stage(self, rank: RankEdit) -> None:
        lane = self._lane(rank) if rank.data_bytes else "grpc"
        begin = 0
        if rank.data_bytes and lane == "grpc":
            begin = await self._staged_bytes(rank.rank)
        requests = self._requests(rank, begin, with_data=lane == "grpc")
        left_s = self.how.deadline_s - time.monotonic()
        try:
            await self.sidecars.stage(rank.rank, requests, timeout_s=call_timeout_s(left_s))
        except grpc.aio.AioRpcError as error:
            found = error_of(error, self.sidecars.who(rank.rank))
            if isinstance(found, DeadlineError) and call_timeout_s(left_s) < left_s:
                return await self._stage(rank)  # the limit of one call: on from where it ended
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise RankUnreachableError(rank.rank, str(found)) from error
            raise found from error
        if lane == "same-host":
            await self._lend(rank)
        elif lane == "stream":
            try:
                await self._stream(rank)
            except NoStreamError as error:
                if self.how.transport == "stream":
                    raise RankUnreachableError(rank.rank, str(error)) from error
                self.sidecars.keep_to_grpc(rank.rank)
                await self._stage(rank)

    def _lane(self, rank: RankEdit) -> Transport:
        if self.how.transport in ("stream", "grpc"):
            return self.how.transport
        if self.how.transport == "auto" and rank.data_bytes < LENT_FROM_BYTES:
            return "grpc"
        if is_same_host(self.sidecars.document.peer(rank.rank)):
            return "same-host"
        return "stream" if self.sidecars.has_streams(rank.rank) else "grpc"

    async def _lend(self, rank: RankEdit) -> None:
        document = self.sidecars.document
        peer = document.peer(rank.rank)

        def work() -> None:
            from paramd.mesh.edits.operands import lent_memories, parts

            ticket = document.shown(rank.rank)
            with self.how.lender.loan(peer, ticket, lent_memories(self.operands)) as loan:
                staged_bytes = loan.stage(ticket, self.manifest.edit_id)
                self._told(staged_bytes)
                data = parts(self.operands, rank, staged_bytes)
                Sender(loan, staged_bytes, self._told).send(data)

        try:
            await self.transfer.run(work)
        except UnreachableError as error:
            raise RankUnreachableError(rank.rank, str(error)) from error

    async def _stream(self, rank: RankEdit) -> None:
        """Send a rank's data over a bulk stream; NoStreamError if its port cannot be used."""
        number, sidecars = rank.rank, self.sidecars
        request = sidecar_pb2.GrantStreamRequest(edit_id=self.manifest.edit_id)
        offer = await sidecars.offer(number, request)
        stream = BulkStream(offer, offer.staged_bytes, rank.data_bytes)
        sending = on_thread(partial(self._send, stream, rank), stream.stop)
        try:
            async with asyncio.timeout(max(self.how.deadline_s - time.monotonic(), 0.0)):
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
            for part in parts(self.operands, rank, at):
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
            request = sidecar_pb2.GetEditRequest(edit_id=self.manifest.edit_id)
            found = await self.sidecars.ask(rank, request, sidecar_pb2.GetEditResponse, _ASK_S)
        except NotFoundError:
            return 0
        return int(found.progress.staged_bytes)

    async def _requests(
        self, rank: RankEdit, begin: int, *, with_data: bool
    ) -> AsyncIterator[bytes]:
        from paramd.mesh.edits.operands import parts

        yield sidecar_pb2.StageEditRequest(manifest=self.manifest).SerializeToString()
        if not with_data:
            return
        self._told(begin)
        for part in parts(self.operands, rank, begin):
            yield data_chunk(part, begin)
            begin += len(part)
            self._told(len(part))

    def _told(self, size_bytes: int) -> None:
        self._sent_bytes += size_bytes
        if self.how.progress is not None and self._total_bytes:
            self.how.progress(min(self._sent_bytes, self._total_bytes), self._total_bytes)


def check_mode(mode: str | None, *, pause: bool) -> Mode:
    """`mode`, or its default: "replace" with a pause, "delta" without; UsageError if unknown."""
    if mode is None:
        return "replace" if pause else "delta"
    if mode == "replace":
        return "replace"
    if mode == "delta":
        return "delta"
    raise UsageError(f"mode: {mode!r}; expected one of {', '.join(get_args(Mode))}")


@dataclass(frozen=True, slots=True)
class _Known:
    """One tensor as it was summoned."""

    names: tuple[str, ...]
    pattern: str
    tensor: Tensor
    digest: bytes
    copy: Tensor | None


class Changes:
    """Finds what a writeback block changed in the tensors it was given."""

    def __init__(
        self, found: Summoned, selection: Selection, *, mode: Mode, room: Mapping[str, Tensor]
    ) -> None:
        """Record the contents: digests, and in delta mode copies, in `room` if it has the name."""
        self._found = found
        self._names = set(found)
        self._known: dict[str, _Known] = {}
        tensors = [found[item.name] for item in selection]
        for item, tensor, known_digest in zip(selection, tensors, _digests(tensors), strict=True):
            by_delta = mode == "delta" and item.tensor.dtype != "bool"
            self._known[item.name] = _Known(
                names=item.names,
                pattern=item.pattern,
                tensor=tensor,
                digest=known_digest,
                copy=_copied(tensor, room.get(item.name)) if by_delta else None,
            )

    def ops(self) -> list[OpSpec]:
        """The operations that write the changes; call once. UsageError: changed names or shapes."""
        if strange := sorted(self._names.symmetric_difference(self._found)):
            raise UsageError(
                f"{strange[0]!r} was added to or removed from the summoned tensors; change tensors "
                "in place, or assign others of the same shape to their names. Nothing was written"
            )
        ops: list[OpSpec] = []
        now = {name: self._now(known) for name, known in self._known.items()}
        for name, known in self._known.items():
            tensor = now[name]
            if (tensor.shape, tensor.dtype) != (known.tensor.shape, known.tensor.dtype):
                raise UsageError(
                    f"{name!r} now has shape {list(tensor.shape)}, {tensor.dtype}; expected "
                    f"{list(known.tensor.shape)}, {known.tensor.dtype}; nothing was written"
                )
        for (name, known), new_digest in zip(
            self._known.items(), _digests(now.values()), strict=True
        ):
            tensor = now[name]
            if new_digest == known.digest:
                continue
            if known.copy is None:
                ops.append(OpSpec(pattern=known.pattern, op="set", data=True, operand=tensor))
            else:
                # In place, as the model may be large; the copy is not needed again.
                change = known.copy.neg_().add_(tensor)
                ops.append(OpSpec(pattern=known.pattern, op="add", data=True, operand=change))
        return ops

    def _now(self, known: _Known) -> Tensor:
        """The current tensor: the same object, or one assigned to any of its names."""
        others = (self._found[name] for name in known.names)
        found = next((o for o in others if o is not known.tensor), known.tensor)
        return found.detach().resolve_conj()


async def selected(reach: SidecarFinder, patterns: Sequence[Pattern]) -> Selection:
    """The selection of `patterns` in the current layout."""

    async def attempt(sidecars: Sidecars) -> Selection:
        return select(await reach.index(sidecars), patterns)

    return await reach.attempts(attempt, time.monotonic() + LEASE_S)


def lent_room(lender: Lender, reach: SidecarFinder, selection: Selection) -> dict[str, Tensor]:
    """A tensor in lent memory for each selected one; none if no sidecar is on this host. Blocks."""
    from paramd.mesh.edits.operands import lent_tensors  # imports torch

    if not any(map(is_same_host, reach.document.peers.values())):
        return {}
    return lent_tensors(lender, selection, from_bytes=LENT_FROM_BYTES)


def _copied(tensor: Tensor, room: Tensor | None) -> Tensor:
    return room.copy_(tensor) if room is not None else tensor.clone()


def _digests(tensors: Iterable[Tensor]) -> list[bytes]:
    """As `digest`, of several at once, which memory bandwidth bounds."""
    with ThreadPoolExecutor(min(MAX_COPY_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return list(threads.map(digest, tensors))


def digest(tensor: Tensor) -> bytes:
    """XXH3 (128 bit) of a tensor's elements in row-major order."""
    tensor = tensor.detach().cpu().contiguous()
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return b""
    return xxh3_128_digest((ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr()))


async def make_edit(
    calls: EditCalls,
    reach: SidecarFinder,
    transfer: Transfer,
    ops: Sequence[OpSpec],
    terms: EditTerms,
    sending: Sending,
    *,
    wait: bool = True,
) -> Edit:
    """Create an edit, upload, commit and, with `wait`, await it. Raises as `AsyncMesh.edit`."""
    check_transport(sending.transport)
    deadline_s = sending.deadline_s
    with_data = any(op.data for op in ops)
    if with_data:
        await transfer.load_torch()
    edit = await calls.create(new_edit_id(), ops, terms, deadline_s)
    if with_data and not edit.ended:
        try:
            await upload(reach, transfer, edit.id, ops, terms, sending)
        except BaseException:
            # Free the staged operands now rather than when the edit expires.
            with suppress(ParamdError):
                await calls.abort(edit.id)
            raise
        if terms.dry_run:
            edit = await calls.preview(edit.id, deadline_s)
            await calls.abort(edit.id)
            return edit
        edit = await calls.commit(edit.id, deadline_s)
    if terms.dry_run:
        return await calls.ended(edit, deadline_s)
    return check_applied(await calls.ended(edit, deadline_s)) if wait else edit


async def upload(
    reach: SidecarFinder,
    transfer: Transfer,
    edit_id: str,
    ops: Sequence[OpSpec],
    terms: EditTerms,
    sending: Sending,
) -> None:
    """Send the operands of an edit that waits for them. Raises as `AsyncMesh.edit`."""
    from paramd.mesh.edits.operands import prepare  # imports torch

    async def attempt(sidecars: Sidecars) -> None:
        operands = prepare(await reach.index(sidecars), ops, allow_nonfinite=terms.allow_nonfinite)
        mesh = sidecars.document
        manifest = manifest_of(
            edit_id,
            operands.ops,
            terms,
            incarnation=mesh.incarnation,
            layout_digest=mesh.layout_digest,
        )
        await Uploads(sidecars, transfer, manifest, operands, sending).run()

    await reach.attempts(attempt, sending.deadline_s)
