"""What an export needs of one epoch of a job: the layout, a pinned step, sidecars that are well."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from paramd.errors import NotFoundError, ParamdError, UnreachableError
from paramd.layout.types import Layout
from paramd.mesh.reading.pin import Pinner
from paramd.v1 import export_pb2
from paramd_service.control.exports.calls import ExportCalls, RankLostError
from paramd_service.control.mesh.incarnation import Incarnation
from paramd_service.destinations.destinations import Destination, DestinationKind, locate
from paramd_service.destinations.place import MANIFEST

if TYPE_CHECKING:
    from paramd.layout.exports.plan import ExportPlan
    from paramd.mesh.exports.pins import PinnedExport
    from paramd.mesh.peers.sidecars import Sidecars

LEASE_S: Final = 60.0
"""Lease of an export's snapshots: a control plane that is back within it goes on."""
JOIN_S: Final = 30.0
"""How long ranks are waited for that have not joined (yet)."""

_LOOK_S: Final = 0.1
_AGAIN_S: Final = 0.5

Answer = TypeVar("Answer")

NOBODYS = "0" * 32
"""Id of no export: with it nothing can be written over or removed."""


class SidecarGroup:
    """Used on the event loop. Nothing is opened before an export asks for it."""

    def __init__(self, incarnation: Incarnation) -> None:
        """No I/O."""
        self.incarnation = incarnation
        self.calls = ExportCalls(incarnation.bootstrap, generation=incarnation.terms.generation)

    @property
    def epoch(self) -> int:
        return self.incarnation.epoch

    def ranks(self) -> dict[int, str]:
        """Addresses of the sidecars that are joined now, by rank."""
        joined = self.incarnation.registry.view().joined
        return {report.rank: report.address for report in joined}

    async def wait_for(self, ranks: Iterable[int] | None = None) -> None:
        """Waits until ranks (None: all of the mesh) have joined.

        Raises:
            UnreachableError: one has not, in time. ParamdError: the epoch is over.
        """
        wanted = set(range(self.incarnation.bootstrap.world_size) if ranks is None else ranks)
        deadline_s = time.monotonic() + JOIN_S
        while missing := wanted - set(self.ranks()):
            self.incarnation.check()
            if time.monotonic() > deadline_s:
                raise UnreachableError(
                    f"rank {min(missing)} ({len(missing)} in all) has no sidecar that has joined; "
                    "see: paramd status"
                )
            await asyncio.sleep(_LOOK_S)

    async def layout(self) -> tuple[str, Layout]:
        """Digest and layout in force. Raises UnreachableError."""
        digest, index = await self.incarnation.layouts.get(self.incarnation.registry.view())
        return digest, index.layout

    async def pin(
        self, plan: ExportPlan, *, timeout_s: float, optimizer: bool = False
    ) -> PinnedExport:
        """Pins all that a plan reads, at one step; the leases are the caller's.

        With `optimizer` its state too; the plan that is answered then has its files.

        Raises: as `AsyncMesh.summon`; ConflictError when a rank cannot give the state.
        """
        from paramd.mesh.exports.pins import pin_parameters, pin_with_optimizer

        reach = await self.incarnation.reaching()
        deadline_s = time.monotonic() + timeout_s

        async def attempt(sidecars: Sidecars) -> PinnedExport:
            if optimizer:
                return await pin_with_optimizer(sidecars, plan, deadline_s=deadline_s)
            return await pin_parameters(
                Pinner(sidecars, backoff=reach.backoff), plan, deadline_s=deadline_s
            )

        return await reach.attempts(attempt, deadline_s)

    async def any(
        self,
        work: Callable[[int, str], Awaitable[Answer]],
        *,
        first: int | None = None,
        wait: bool = True,
        lost: Callable[[int, str], None] = lambda rank, why: None,
    ) -> tuple[int, Answer]:
        """Has one rank that is well do `work`; (rank, what it answers).

        Args:
            first: Is asked before the others.
            wait: Whether to wait for a rank to join when there is none, or none that answers:
                a sidecar that was killed comes back.
            lost: Is told of a rank that does not answer, and why.

        Raises:
            UnreachableError: nobody answers. ParamdError: what the first that does says.
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
                except RankLostError as found_lost:
                    error = found_lost
                    lost(rank, str(found_lost))
            if not wait or time.monotonic() > deadline_s:
                raise error
            self.incarnation.check()
            await asyncio.sleep(_AGAIN_S)

    async def all(self, work: Callable[[int, str], Awaitable[object]]) -> None:
        """Every rank that is well does `work`; one that is lost meanwhile does nothing any more.

        Raises: ParamdError: what one of them says.
        """

        async def asked(rank: int, address: str) -> None:
            with suppress(RankLostError):
                await work(rank, address)

        asking = [asked(rank, address) for rank, address in self.ranks().items()]
        said = await asyncio.gather(*asking, return_exceptions=True)
        for error in filter(None, said):
            raise error

    async def close(self) -> None:
        """Closes what was opened."""
        await self.calls.close()


class Leases:
    """The snapshots of one export: renewed until they are released, or lost."""

    def __init__(
        self,
        group: SidecarGroup,
        pins: Iterable[export_pb2.ExportPin],
        lost: Callable[[int, str], None],
    ) -> None:
        """`lost` is told of a rank whose snapshot is no more, and why."""
        self._crew = group
        self._pins = list(pins)
        self._lost = lost
        self._heard_s = dict.fromkeys((pin.rank for pin in self._pins), time.monotonic())
        self._keeping: asyncio.Task[None] | None = None

    async def renew(self) -> None:
        """Renews all. Raises the first ParamdError."""
        await asyncio.gather(*(self._renew(pin) for pin in self._pins))

    def keep(self) -> None:
        """Renews them from now on."""
        self._keeping = asyncio.create_task(self._keep(), name="paramd-export-leases")

    async def close(self, *, release: bool) -> None:
        """Renews no more. Idempotent.

        Args:
            release: False leaves the snapshots to whoever goes on with the export.
        """
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        if release:
            pins, self._pins = self._pins, []
            await asyncio.gather(*(self._release(pin) for pin in pins), return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 4)
            for pin, found in zip(
                self._pins,
                await asyncio.gather(*map(self._renew, self._pins), return_exceptions=True),
                strict=True,
            ):
                if isinstance(found, NotFoundError):
                    self._lost(pin.rank, f"its lease has ended: {found}")
                elif (
                    isinstance(found, ParamdError)
                    and time.monotonic() - self._heard_s[pin.rank] > LEASE_S
                ):
                    self._lost(pin.rank, f"its lease could not be renewed: {found}")

    async def _renew(self, pin: export_pb2.ExportPin) -> None:
        address = self._address(pin.rank)
        await self._crew.calls.renew(pin.rank, address, pin.snapshot_id, LEASE_S)
        self._heard_s[pin.rank] = time.monotonic()

    async def _release(self, pin: export_pb2.ExportPin) -> None:
        await self._crew.calls.release(pin.rank, self._address(pin.rank), pin.snapshot_id)

    def _address(self, rank: int) -> str:
        ranks: Mapping[int, str] = self._crew.ranks()
        if rank not in ranks:
            raise UnreachableError(f"rank {rank} has no sidecar that is joined")
        return ranks[rank]


def target_of(
    destinations: Mapping[str, Destination],
    text: str,
    *,
    export_id: str = NOBODYS,
    overwrite: bool = False,
) -> export_pb2.ExportTarget:
    """What sidecars are told of "name/key". Raises UsageError, NotFoundError."""
    found, key = locate(destinations, text)
    return export_pb2.ExportTarget(
        destination=found.name,
        root=found.root,
        options=found.options,
        key=key,
        export_id=export_id,
        overwrite=overwrite,
    )


async def read_file(
    group: SidecarGroup, target: export_pb2.ExportTarget, name: str, offset_bytes: int
) -> tuple[int, bytes]:
    """(size of a file, up to 8 MiB of it) of what stands at a key; the manifest or a file of it.

    Raises:
        NotFoundError: no export stands there, or it has no such file.
    """
    read = partial(group.calls.read, target=target)
    if name != MANIFEST:
        _, (_, text) = await group.any(partial(read, name=MANIFEST, offset_bytes=0))
        # What lies there beside an export is nobody's business.
        if name not in {str(file["name"]) for file in json.loads(text)["files"]}:
            raise NotFoundError(
                f"{target.destination}/{target.key}: its manifest has no file {name[:80]!r}"
            )
    _, answer = await group.any(partial(read, name=name, offset_bytes=offset_bytes))
    return answer


def kind_of(destination: Destination) -> str:
    """What stands behind a name, in a word."""
    return "s3" if destination.kind is DestinationKind.S3 else "directory"
