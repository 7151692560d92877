"""Statistics, heatmaps, values and gradients for REST, read from sidecars as clients read them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from paramd.errors import ConflictError, DeadlineError, UsageError, asked_by
from paramd_service.admission import CALLER, Shares
from paramd_service.control.mesh.held import HeldSnapshots, LeasedSnapshot

if TYPE_CHECKING:
    from paramd.layout.plan import ReadPlan
    from paramd.mesh.frames.frames import GradFrame, Kind
    from paramd.mesh.insight.spectrum import Spectrum
    from paramd.mesh.insight.updates import Updates
    from paramd.mesh.peers.discovery import SidecarFinder
    from paramd.mesh.peers.sidecars import Pinned
    from paramd.mesh.reading.reductions import TensorHeatmap
    from paramd.mesh.reading.stream import Reading
    from paramd.mesh.results import StatsTable

Result = TypeVar("Result")
FindSidecars = Callable[[], Awaitable["SidecarFinder"]]
"""Returns the connections to the sidecars, opened on first use."""
Work = Callable[["Reading", "ReadPlan"], Awaitable[Result]]
"""A read of what is pinned."""

TIMEOUT_S = 30.0
MAX_CONCURRENT = 8
"""Most concurrent queries; each takes a thread and some memory on every rank."""

MAX_STREAMS = 32
"""Most concurrent gradient streams."""


class StatsSource:
    """Queries that the sidecars reduce. Single event loop; connects on first use."""

    def __init__(self, reaching: FindSidecars) -> None:
        """No I/O."""
        self._reaching = reaching
        self._queries = Shares(MAX_CONCURRENT, "concurrent queries")
        self._spectra = asyncio.Lock()
        self._streams = Shares(MAX_STREAMS, "gradient streams")
        self.held = HeldSnapshots()
        """Snapshots leased by REST callers."""

    async def get(
        self, patterns: str | Sequence[str], *, with_buffers: bool, with_histogram: bool = False
    ) -> StatsTable:
        """Statistics of all matching tensors, at one step.

        Raises:
            ExhaustedError: too many concurrent queries.
            ParamdError: as `AsyncMesh.stats`.
        """
        from paramd.mesh.reading.reductions import compute_stats

        work = partial(compute_stats, with_exponents=with_histogram)
        wanted = [patterns] if isinstance(patterns, str) else patterns
        return await self._reading(wanted or ["*"], work, buffers=with_buffers)

    async def histogram(
        self, pattern: str, *, bins: int, low: float | None, high: float | None
    ) -> tuple[StatsTable, list[float]]:
        """Histogram of one tensor with `bins` equal bins: (table with the counts, bin edges).

        A bound left out is the smallest or largest finite element at that step; the last bin then
        includes the largest one.

        Raises: as `get`.
        """
        from paramd.mesh.reading.reductions import compute_stats

        async def work(reading: Reading, plan: ReadPlan) -> tuple[StatsTable, list[float]]:
            least, most = low, high
            if low is None or high is None:
                table = await compute_stats(reading, plan)
                found = table.total.summary
                least = low if low is not None else found.min
                most = high if high is not None else math.nextafter(found.max, math.inf)
            assert least is not None
            assert most is not None
            edges = bin_edges(least, most, bins)
            return await compute_stats(reading, plan, edges=edges), edges

        return await self._reading([pattern], work)

    async def heatmap(
        self, pattern: str, *, mode: str, rows: int, columns: int, row_dims: int | None
    ) -> tuple[int, int, TensorHeatmap]:
        """(incarnation, step, heatmap) of the one matching tensor.

        Raises: as `get`, and as `compute_heatmap`.
        """
        from paramd.mesh.reading.reductions import compute_heatmap

        return await self._stated(
            pattern,
            partial(
                compute_heatmap, mode=mode, max_rows=rows, max_columns=columns, row_dims=row_dims
            ),
        )

    async def values(self, pattern: str) -> tuple[int, int, list[str]]:
        """(incarnation, step, elements as exact text) of the one matching tensor.

        Raises: as `get`, and as `read_texts`.
        """
        from paramd.mesh.reading.reductions import read_texts

        return await self._stated(pattern, read_texts)

    async def updates(self, patterns: Sequence[str], steps: int) -> Updates:
        """What the next updates do to each matching parameter.

        Raises:
            ConflictError: they do not come within `TIMEOUT_S`.
            ParamdError: as `get`.
        """
        from paramd.mesh.insight.updates import compute_updates

        with self._queries.one(CALLER.get()):
            reach = await self._reaching()
            asked_by.set(CALLER.get() or "")
            deadline_s = time.monotonic() + TIMEOUT_S
            try:
                return await compute_updates(reach, patterns, deadline_s, steps)
            except DeadlineError as error:
                raise ConflictError(
                    f"steps: {steps:,} updates did not come within {TIMEOUT_S:.0f} s: training is "
                    "slow, paused or over; ask for fewer, or use mesh.updates with a longer timeout"
                ) from error

    async def spectrum(self, pattern: str, k: int) -> Spectrum:
        """The spectrum of the one matching parameter.

        Raises: as `get`, and as `spectrum_of`.
        """
        from paramd.mesh.insight.spectrum import spectrum_of

        # Its matrices lie in this process; one at a time bounds them.
        async with self._spectra:
            return await self._reading([pattern], partial(spectrum_of, k=k), buffers=False)

    async def pin(
        self, patterns: Sequence[str], *, with_buffers: bool, filter_text: str, lease_s: float
    ) -> LeasedSnapshot:
        """Pin a snapshot of all matching tensors and hold it under a lease; see `HeldSnapshots`.

        Raises: as `get`.
        """
        from paramd.mesh.reading.pin import while_pinned

        reach = await self._reaching()
        asked_by.set(CALLER.get() or "")

        async def pin(hold: Callable[[Pinned], Awaitable[None]]) -> None:
            began = False

            async def work(reading: Reading, _plan: ReadPlan) -> None:
                # `while_pinned` may retry `work`; the snapshot must not be held twice.
                nonlocal began
                if not began:
                    began = True
                    await hold(reading.pinned)

            deadline_s = time.monotonic() + TIMEOUT_S
            await while_pinned(reach, patterns, work, deadline_s, buffers=with_buffers)

        return await self.held.pin(pin, filter_text=filter_text, lease_s=lease_s)

    async def gradients(
        self, patterns: Sequence[str], *, every: int, kind: Kind
    ) -> AsyncGenerator[GradFrame[Any], None]:
        """Stream gradient statistics.

        Raises:
            ExhaustedError: too many concurrent streams.
            ParamdError: as `AsyncMesh.grads`.
        """
        from paramd.mesh.frames.grads import GradRequest, open_stream
        from paramd.mesh.reading.transfer import Transfer

        with self._streams.one(CALLER.get()):
            reach = await self._reaching()
            asked_by.set(CALLER.get() or "")
            wanted = GradRequest(patterns=tuple(patterns), every=every, kind=kind, transport="auto")
            with closing(Transfer()) as transfer:
                stream = await open_stream(reach, transfer, wanted)
                async with aclosing(stream.frames()) as frames:
                    async for frame in frames:
                        yield frame

    async def close(self) -> None:
        """Release all held snapshots."""
        await self.held.close()

    async def _stated(self, pattern: str, work: Work[Result]) -> tuple[int, int, Result]:
        """(incarnation, step, result) of `work` on the one matching tensor."""

        async def stated(reading: Reading, plan: ReadPlan) -> tuple[int, int, Result]:
            result = await work(reading, plan)
            return reading.pinned.incarnation, reading.pinned.step, result

        return await self._reading([pattern], stated)

    async def _reading(
        self,
        patterns: Sequence[str],
        work: Work[Result],
        *,
        buffers: bool = True,
    ) -> Result:
        """Run `work` on a pinned read of the matching tensors; `buffers` includes buffers."""
        from paramd.mesh.reading.pin import while_pinned

        with self._queries.one(CALLER.get()):
            reach = await self._reaching()
            # Sidecars divide their capacity among callers, so name the user, not this process.
            asked_by.set(CALLER.get() or "")
            deadline_s = time.monotonic() + TIMEOUT_S
            return await while_pinned(reach, patterns, work, deadline_s, buffers=buffers)


def bin_edges(low: float, high: float, bins: int) -> list[float]:
    """`bins + 1` increasing edges from `low` to `high`; fewer if the range has too few floats.

    Raises:
        UsageError: a bound is not finite, or `low` is not below `high`.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UsageError("low, high: there is no finite element to take the range from; set both")
    if not low < high or not math.isfinite(high - low):
        raise UsageError(f"low, high: {low} and {high}; expected low below high")
    edges = [low + (high - low) * i / bins for i in range(bins)] + [high]
    # Where bins are narrower than the spacing of floats, edges coincide: drop the duplicates.
    return list(dict.fromkeys(edges))
