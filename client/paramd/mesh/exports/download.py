"""Full tensors of one step into a local safetensors file, in an order that can be resumed.

Tensors are read batch by batch, written where they belong, and noted with a checksum. After a
break the same call goes on with the same snapshot while its lease lives; else it begins anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paramd.errors import (
    ConflictError,
    DeadlineError,
    NotFoundError,
    UnreachableError,
)
from paramd.layout.exports.settings import NameMap
from paramd.layout.plan import ReadPlan
from paramd.mesh.exports.file_plan import (
    LEASE_S,
    FileLayout,
    Wanted,
    batches,
    covered,
    file_layout,
    file_sizes,
    pinned_of,
    request_key,
    told_of,
)
from paramd.mesh.exports.journal import PartialFile, Ranges
from paramd.mesh.exports.reading import in_file, read_batch
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.grpc import LeaseEndedError
from paramd.mesh.peers.pins import Pinned
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.pin import Pinner
from paramd.mesh.reading.select import choose

if TYPE_CHECKING:
    import torch

PATIENCE_S: Final = 60.0
"""How long a break may last without ending the call."""
MAX_BEGINNINGS: Final = 3

_AGAIN_S: Final = 0.5

Moved = Callable[[int, int], object]
"""Is told bytes that are there, and bytes in all."""
Said = Callable[[str], object]
"""Is told in words when something goes on, or begins anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Downloaded:
    """A file that is there."""

    path: Path
    job: str
    epoch: int
    step: int
    name_count: int
    """Names, those of tied tensors too."""
    size_bytes: int
    resumed_bytes: int
    """Bytes that an earlier try had brought."""
    seconds: float
    unsettled: bool = False
    """As in `Summoned`: training has not gone on since that step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a download is asked to hold; see `AsyncMesh.download`."""

    patterns: Sequence[str]
    dtype: torch.dtype | None
    buffers: bool
    name_map: NameMap

    async def wanted(self, reach: SidecarFinder, sidecars: Sidecars) -> Wanted:
        """What that is in the layout of now. Raises as `choose`."""
        chosen = await choose(reach, sidecars, self.patterns, buffers=self.buffers)
        names = self.name_map.apply(item[0] for item in chosen.names)
        aliases = {alias: names[item[0]] for item in chosen.names for alias in item[1:]}
        job, digest = sidecars.document.job, sidecars.document.layout_digest
        return Wanted(
            chosen=chosen,
            dtype=self.dtype,
            names=names,
            metadata={**aliases, "format": "pt", "paramd_job": job},
            key=request_key(job, digest, chosen.plan, self.dtype, names),
        )


class Download:
    """One download; `run` may be called once."""

    def __init__(
        self, reach: SidecarFinder, file: PartialFile, *, replace: bool, moved: Moved, said: Said
    ) -> None:
        self._reach = reach
        self._file = file
        self._replace = replace
        self._moved = moved
        self._said = said
        self._resumed_bytes = 0

    async def run(self, content: Content, deadline_s: float) -> Downloaded:
        """Downloads `content` of one step.

        Raises:
            UnreachableError: a sidecar was away for too long; the same call goes on later.
            ExhaustedError: no room on the disk. ConflictError: the name is taken.
            ParamdError: as `AsyncMesh.summon`.
        """
        began_s = time.monotonic()
        with self._file.opened():
            for beginning in range(MAX_BEGINNINGS):
                try:
                    wanted, pinned, layout = await self._whole(content, deadline_s)
                except LeaseEndedError:
                    if beginning + 1 == MAX_BEGINNINGS:
                        raise
                    self._said("the snapshot is no more; begins anew")
                    continue
                await asyncio.to_thread(self._file.publish, replace=self._replace)
                return Downloaded(
                    path=self._file.path,
                    job=self._reach.document.job,
                    epoch=pinned.epoch,
                    step=pinned.step,
                    name_count=sum(len(names) for names in wanted.chosen.names),
                    size_bytes=layout.size_bytes,
                    resumed_bytes=self._resumed_bytes,
                    seconds=time.monotonic() - began_s,
                    unsettled=pinned.unsettled,
                )
        raise AssertionError("the last beginning returns or raises")

    async def _whole(
        self, content: Content, deadline_s: float
    ) -> tuple[Wanted, Pinned, FileLayout]:
        async def attempt(sidecars: Sidecars) -> tuple[Wanted, Pinned, Ranges]:
            wanted = await content.wanted(self._reach, sidecars)
            pinned, ranges = await self._resumed(sidecars, wanted)
            if pinned is None:
                pinned = await self._pin(sidecars, wanted, deadline_s)
            return wanted, pinned, ranges

        wanted, pinned, ranges = await self._reach.attempts(attempt, deadline_s)
        layout = file_layout(wanted, pinned)
        keeping = asyncio.create_task(self._keep(pinned), name="paramd-download-leases")
        try:
            await self._read(wanted, pinned, layout, ranges, deadline_s)
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
        # Only now: after a break the leases are what the next try goes on with.
        sidecars = await self._reach.sidecars()
        for pin in pinned.pins.values():
            sidecars.release(pin)
        return wanted, pinned, layout

    async def _resumed(self, sidecars: Sidecars, wanted: Wanted) -> tuple[Pinned | None, Ranges]:
        found = await asyncio.to_thread(self._file.found)
        if found is None:
            return None, {}
        about, ranges = found
        pinned = pinned_of(about)
        if pinned is None or about.get("key") != wanted.key:
            self._said("what an earlier download left is of something else; begins anew")
            return None, {}
        try:
            await asyncio.gather(*(sidecars.renew(pin, LEASE_S) for pin in pinned.pins.values()))
        except (NotFoundError, ConflictError, UnreachableError):
            self._said(f"the snapshot of step {pinned.step} is no more; begins anew")
            return None, {}
        layout = file_layout(wanted, pinned)
        good = await asyncio.to_thread(self._file.checked, ranges, layout.size_bytes)
        await asyncio.to_thread(self._file.go_on, about, good)
        self._resumed_bytes = sum(end - begin for begin, end in good)
        self._said(
            f"goes on with step {pinned.step}: {self._resumed_bytes:,} of "
            f"{layout.size_bytes:,} bytes are here already"
        )
        return pinned, good

    async def _pin(self, sidecars: Sidecars, wanted: Wanted, deadline_s: float) -> Pinned:
        chosen = wanted.chosen
        spans: dict[int, Sequence[tuple[int, int]]] = {
            read.rank: read.spans for read in chosen.plan.ranks
        }
        pinned = await Pinner(sidecars, backoff=self._reach.backoff).pin(
            spans if spans else {min(sidecars.document.peers, default=0): ()},
            deadline_s=deadline_s,
            with_buffers=chosen.at_boundary,
        )
        await asyncio.gather(*(sidecars.renew(pin, LEASE_S) for pin in pinned.pins.values()))
        about = {"key": wanted.key, **told_of(pinned)}
        layout = file_layout(wanted, pinned)
        await asyncio.to_thread(self._file.begin, about, layout.size_bytes)
        self._resumed_bytes = 0
        return pinned

    async def _keep(self, pinned: Pinned) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 5)
            with suppress(UnreachableError):
                sidecars = await self._reach.sidecars()
                await asyncio.gather(
                    *(sidecars.renew(pin, LEASE_S) for pin in pinned.pins.values()),
                    return_exceptions=True,
                )

    async def _read(
        self,
        wanted: Wanted,
        pinned: Pinned,
        layout: FileLayout,
        ranges: Ranges,
        deadline_s: float,
    ) -> None:
        done_bytes = sum(end - begin for begin, end in ranges)
        self._moved(done_bytes, layout.size_bytes)
        if not covered(ranges, 0, len(layout.header)):
            await asyncio.to_thread(self._file.write, 0, memoryview(layout.header))
            done_bytes += len(layout.header)
        plan = wanted.chosen.plan
        sizes = file_sizes(wanted)
        missing = [
            index
            for index in layout.order
            if not covered(ranges, layout.begins[index], layout.begins[index] + sizes[index])
        ]
        for batch in batches(plan, missing):
            parts = await self._patiently(plan, batch, pinned, deadline_s)
            for index in batch:
                data = await asyncio.to_thread(
                    in_file, plan.tensors[index], parts[index], wanted.dtype
                )
                begin = layout.begins[index]
                await asyncio.to_thread(self._file.write, begin, memoryview(data))
                done_bytes += len(data)
            self._moved(min(done_bytes, layout.size_bytes), layout.size_bytes)

    async def _patiently(
        self, plan: ReadPlan, batch: Sequence[int], pinned: Pinned, deadline_s: float
    ) -> dict[int, bytearray]:
        began_s = time.monotonic()
        while True:
            try:
                return await read_batch(
                    await self._reach.sidecars(), plan, batch, pinned, deadline_s
                )
            except LeaseEndedError:
                raise
            except UnreachableError as error:
                now_s = time.monotonic()
                if now_s > min(deadline_s, began_s + PATIENCE_S):
                    raise UnreachableError(
                        f"{error}; what has come is kept: the same command goes on with it for "
                        f"{LEASE_S:.0f} s"
                    ) from error
                self._said(f"{error}; tries again")
                await asyncio.sleep(_AGAIN_S)
                try:
                    await self._reach.refresh()
                except (UnreachableError, DeadlineError):
                    continue
