"""Calls of exports to the sidecars of one incarnation, and leases of their snapshots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.message import Message

from paramd import bounds
from paramd.answers import parsed_json
from paramd.errors import DataLossError, NotFoundError, ParamdError, UnreachableError
from paramd.layout.types import Layout
from paramd.mesh.peers.grpc import RankUnreachableError
from paramd.v1 import export_pb2, sidecar_pb2
from paramd.wire import checksum_of
from paramd_service.admission import covers
from paramd_service.aio import stopped
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.sidecars import SidecarCalls, address_of, on_all
from paramd_service.destinations.destinations import MANIFEST, Destination, locate, not_seen

if TYPE_CHECKING:
    from paramd.layout.exports.plan import ExportPlan
    from paramd.mesh.exports.pins import PinnedExport
    from paramd.mesh.peers.sidecars import Sidecars

UNARY_TIMEOUT_S: Final = 60.0
READ_BYTES: Final = 8 << 20
STORE_PART_BYTES: Final = 512 << 10
EXPORT_LEASE_S: Final = 60.0
"""Lease of an export's snapshots; a control plane restarted within it resumes the export."""
JOIN_S: Final = 30.0
"""How long to wait for ranks that have not joined."""
NO_EXPORT: Final = "0" * 32
"""Id of no export, for reading: with it nothing can be overwritten or removed."""

_POLL_S: Final = 0.1
_AGAIN_S: Final = 0.5

Answer = TypeVar("Answer")


async def made(
    calls: SidecarCalls,
    rank: int,
    address: str,
    request: export_pb2.WriteExportFileRequest | export_pb2.VerifyExportFileRequest,
    *,
    timeout_s: float,
    sources: Sequence[tuple[int, str]] = (),
    moved: Callable[[int], None] = lambda size_bytes: None,
) -> export_pb2.ExportedFile:
    """Have a rank write one file, which it reads from `sources` (rank, address), or read one back;
    return its actual size and checksum. `moved` is called with the bytes written so far.

    Raises:
        RankUnreachableError: The rank or one of its sources does not answer.
        UnreachableError: The call broke although all of them answer.
    """
    last = "done" if isinstance(request, export_pb2.WriteExportFileRequest) else "found"
    asking = calls.stream(rank, address, request, timeout_s=timeout_s, sources=sources)
    async with asking as messages:
        async for message in messages:
            if last == "done":
                moved(message.written_bytes)
            if message.HasField(last):
                file: export_pb2.ExportedFile = getattr(message, last)
                return file
    raise UnreachableError(f"rank {rank}: its answer ended before the file did")


async def stored(
    calls: SidecarCalls,
    rank: int,
    address: str,
    target: export_pb2.ExportTarget,
    name: str,
    data: bytes,
) -> export_pb2.ExportedFile:
    """Have a rank store a small file next to the others. Raises as `SidecarCalls.ask_long`."""
    parts = [export_pb2.StoreExportFileRequest(target=target, name=name)]
    parts += (
        export_pb2.StoreExportFileRequest(data=data[begin : begin + STORE_PART_BYTES])
        for begin in range(0, len(data), STORE_PART_BYTES)
    )
    answer = await calls.ask_long(
        rank, address, parts, timeout_s=UNARY_TIMEOUT_S, method="StoreExportFile"
    )
    file: export_pb2.ExportedFile = answer.done
    return file


async def part_of(
    calls: SidecarCalls,
    rank: int,
    address: str,
    target: export_pb2.ExportTarget,
    name: str,
    offset_bytes: int,
) -> tuple[int, bytes]:
    """Part of a finished export's file: (its size, up to READ_BYTES from the offset).

    Raises:
        DataLossError: If bytes do not match their checksum.
    """
    request = export_pb2.ReadExportFileRequest(
        target=target, name=name, finished=True, offset_bytes=offset_bytes
    )
    whole_bytes, data = 0, bytearray()
    async with calls.stream(rank, address, request, timeout_s=UNARY_TIMEOUT_S) as messages:
        async for message in messages:
            if message.HasField("header"):
                whole_bytes = message.size_bytes
            if message.data and checksum_of(message.data, message.offset_bytes) != message.xxh3:
                raise DataLossError(
                    f"rank {rank}: {name} was corrupted in transfer (checksum mismatch); retry"
                )
            data += message.data
            if len(data) >= READ_BYTES:
                break
    return whole_bytes, bytes(data)


class SidecarGroup:
    """The sidecars of one incarnation as a group. Connects on first use; one event loop."""

    def __init__(self, mesh: Incarnation) -> None:
        self.mesh = mesh
        # Separate channels, which outlive the incarnation until its exports have ended.
        self.calls = SidecarCalls(mesh.bootstrap, generation=mesh.terms.generation, reads=True)

    def asking(self, request: Message) -> Callable[[int, str], Awaitable[Any]]:
        return partial(self.calls.ask_long, request=request, timeout_s=UNARY_TIMEOUT_S)

    def ranks(self) -> dict[int, str]:
        joined = self.mesh.registry.view().joined
        return {report.rank: report.address for report in joined}

    async def wait_for(self, ranks: Iterable[int] | None = None) -> None:
        """Wait up to JOIN_S until the ranks (None: all of the mesh) have joined.

        Raises:
            UnreachableError: A rank has not joined in time.
            ParamdError: The incarnation has ended.
        """
        wanted = set(range(self.mesh.bootstrap.world_size) if ranks is None else ranks)
        deadline_s = time.monotonic() + JOIN_S
        while missing := wanted - set(self.ranks()):
            self.mesh.check()
            if time.monotonic() > deadline_s:
                raise UnreachableError(
                    f"{len(missing)} ranks have no joined sidecar, the first is rank "
                    f"{min(missing)}; see: paramd status"
                )
            await asyncio.sleep(_POLL_S)

    async def layout(self) -> tuple[str, Layout]:
        """(digest, layout) currently in force. Raises UnreachableError."""
        digest, index = await self.mesh.layouts.get(self.mesh.registry.view())
        return digest, index.layout

    async def pin(
        self, plan: ExportPlan, *, timeout_s: float, optimizer: bool = False
    ) -> PinnedExport:
        """Pin everything the plan reads, at one step; the caller owns the leases.

        With `optimizer` also the optimizer state, whose files the returned plan then includes.

        Raises:
            ConflictError: A rank cannot provide the optimizer state.
            ParamdError: As `AsyncMesh.summon`.
        """
        from paramd.mesh.exports.pins import pin_parameters, pin_with_optimizer

        reach = await self.mesh.reaching()
        deadline_s = time.monotonic() + timeout_s

        async def attempt(sidecars: Sidecars) -> PinnedExport:
            pin = pin_with_optimizer if optimizer else pin_parameters
            return await pin(reach, sidecars, plan, deadline_s=deadline_s)

        return await reach.attempts(attempt, deadline_s)

    async def any(
        self,
        work: Callable[[int, str], Awaitable[Answer]],
        *,
        first: int | None = None,
        wait: bool = True,
        lost: Callable[[int, str], None] = lambda rank, why: None,
    ) -> tuple[int, Answer]:
        """Run `work` on the first healthy rank, beginning with `first`; return (rank, result).

        `wait`: up to JOIN_S while no rank is joined or answers: killed sidecars respawn. `lost` is
        called with each rank that does not answer, and the reason.

        Raises:
            UnreachableError: No rank answers.
            ParamdError: `work` failed on the first rank that answers.
        """
        deadline_s = time.monotonic() + JOIN_S
        while True:
            if wait and not self.ranks():
                await self.wait_for([first if first is not None else 0])
            found = self.ranks()
            error: ParamdError = UnreachableError("no sidecar of the job is joined")
            for rank in sorted(found, key=lambda rank: (rank != first, rank)):
                try:
                    return rank, await work(rank, found[rank])
                except RankUnreachableError as found_lost:
                    error = found_lost
                    lost(rank, str(found_lost))
            if not wait or time.monotonic() > deadline_s:
                raise error
            self.mesh.check()
            await asyncio.sleep(_AGAIN_S)

    async def all(self, work: Callable[[int, str], Awaitable[object]]) -> None:
        """Run `work` on every joined rank concurrently, ignoring ranks that are lost. Raises the
        worst of the other ranks' errors."""

        async def asked(rank: int, address: str) -> None:
            with suppress(RankUnreachableError):
                await work(rank, address)

        await on_all(self.mesh.registry.view(), asked)

    async def close(self) -> None:
        await self.calls.close()


@dataclass(eq=False)
class Leases:
    """Leases of one export's snapshots, renewed until released or lost."""

    group: SidecarGroup
    pins: Sequence[export_pb2.ExportPin]
    lost: Callable[[int, str], None]
    """Called with a rank whose snapshot is gone, and the reason."""

    def __post_init__(self) -> None:
        self._heard_s = dict.fromkeys((pin.rank for pin in self.pins), time.monotonic())
        self._keeping: asyncio.Task[None] | None = None

    async def renew(self) -> None:
        """Renew all once. Raises the first ParamdError."""
        await asyncio.gather(*(self._renew(pin) for pin in self.pins))

    def keep(self) -> None:
        """Keep renewing in the background until `close`."""
        self._keeping = asyncio.create_task(self._keep(), name="paramd-export-leases")

    async def close(self, *, release: bool) -> None:
        """Stop renewing; release the snapshots, or leave them to the next process. Idempotent."""
        await stopped(self._keeping)
        if release:
            pins, self.pins = self.pins, ()
            await asyncio.gather(*(self._release(pin) for pin in pins), return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(EXPORT_LEASE_S / 4)
            for pin, found in zip(
                self.pins,
                await asyncio.gather(*map(self._renew, self.pins), return_exceptions=True),
                strict=True,
            ):
                if isinstance(found, NotFoundError):
                    self.lost(pin.rank, f"its lease has ended: {found}")
                # Other errors may be transient; the snapshot is lost once its lease runs out.
                elif (
                    isinstance(found, ParamdError)
                    and time.monotonic() - self._heard_s[pin.rank] > EXPORT_LEASE_S
                ):
                    self.lost(pin.rank, f"its lease could not be renewed: {found}")

    async def _renew(self, pin: export_pb2.ExportPin) -> None:
        request = sidecar_pb2.RenewSnapshotRequest(
            snapshot_id=pin.snapshot_id, lease_ms=int(1000 * EXPORT_LEASE_S)
        )
        await self._ask(pin.rank, request, timeout_s=5.0)
        self._heard_s[pin.rank] = time.monotonic()

    async def _release(self, pin: export_pb2.ExportPin) -> None:
        request = sidecar_pb2.ReleaseSnapshotRequest(snapshot_id=pin.snapshot_id)
        await self._ask(pin.rank, request, timeout_s=2.0)

    async def _ask(self, rank: int, request: Message, *, timeout_s: float) -> None:
        address = address_of(self.group.mesh.registry.view(), rank)
        await self.group.calls.ask_long(rank, address, request, timeout_s=timeout_s)


def target_of(
    destinations: Mapping[str, Destination],
    text: str,
    *,
    export_id: str = NO_EXPORT,
    overwrite: bool = False,
    job: str = "",
    jobs: str | None = None,
) -> export_pb2.ExportTarget:
    """Resolve "name/key" into the target sent to sidecars. `job` is the export's, `jobs` as in
    `ExportRow`. Raises UsageError, NotFoundError."""
    found, key = locate(destinations, text)
    return export_pb2.ExportTarget(
        destination=found.name,
        root=found.root,
        options=found.options,
        key=key,
        export_id=export_id,
        overwrite=overwrite,
        job=job,
        jobs=jobs or "",
    )


async def read_file(
    group: SidecarGroup,
    target: export_pb2.ExportTarget,
    name: str,
    offset_bytes: int,
) -> tuple[int, bytes]:
    """As `ExportService.read_file`."""
    read = partial(part_of, group.calls, target=target)
    text, more, size_bytes = b"", b" ", 1
    while more and len(text) < min(size_bytes, bounds.MANIFEST.most_bytes):
        part = partial(read, name=MANIFEST, offset_bytes=len(text))
        _, (size_bytes, more) = await group.any(part)
        text += more
    where = f"{target.destination}/{target.key}"
    try:
        found = parsed_json(text, bounds.MANIFEST)
        # Only files listed in the manifest: the directory may hold others.
        names, whose = {MANIFEST, *(file["name"] for file in found["files"])}, found["job"]
    except (ValueError, LookupError, TypeError) as error:
        raise DataLossError(f"{where}: its {MANIFEST} cannot be read") from error
    if name not in names or not covers(target.jobs, str(whose)):
        raise not_seen(where)
    # The sidecar checks the manifest again: another export may have taken the place meanwhile.
    _, answer = await group.any(partial(read, name=name, offset_bytes=offset_bytes))
    return answer
