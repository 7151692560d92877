"""Numbers, pictures and values for the REST side, read as users' clients read."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, TypeVar

from paramd.errors import UsageError, asked_by
from paramd_service.admission import CALLER, Shares
from paramd_service.control.mesh.held import HeldSnapshots, LeasedSnapshot

if TYPE_CHECKING:
    from paramd.layout.plan import ReadPlan
    from paramd.mesh.frames.frames import GradFrame, Kind
    from paramd.mesh.peers.discovery import SidecarFinder
    from paramd.mesh.peers.sidecars import Pinned, Sidecars
    from paramd.mesh.reading.pooled import Shown
    from paramd.mesh.results import StatsTable

Result = TypeVar("Result")
FindSidecars = Callable[[], Awaitable["SidecarFinder"]]
"""Opens the way to the sidecars, or gives the one that is open."""

TIMEOUT_S = 30.0
MAX_CONCURRENT = 8
"""Questions at once; each takes a thread and some memory of every rank."""

MAX_STREAMS = 32
"""Readers of gradients at once."""


class StatsSource:
    """Asks the sidecars to reduce; keeps its channels to them from the first question on."""

    def __init__(self, reaching: FindSidecars) -> None:
        """No I/O."""
        self._reaching = reaching
        self._questions = Shares(MAX_CONCURRENT, "questions under way")
        self._streams = Shares(MAX_STREAMS, "streams of gradients")
        self.held = HeldSnapshots()
        """Snapshots under lease of REST's callers."""

    async def get(
        self, patterns: str | Sequence[str], *, with_buffers: bool, with_histogram: bool = False
    ) -> StatsTable:
        """Statistics of all tensors that match, at one step.

        Raises:
            ExhaustedError: too many questions at once.
            ParamdError: as `AsyncMesh.stats`.
        """
        from paramd.mesh.reading.summary import compute_stats

        def work(
            sidecars: Sidecars, plan: ReadPlan, pinned: Pinned, deadline_s: float
        ) -> Awaitable[StatsTable]:
            return compute_stats(sidecars, plan, pinned, deadline_s, with_exponents=with_histogram)

        wanted = [patterns] if isinstance(patterns, str) else patterns
        return await self._reading(wanted or ["*"], work, buffers=with_buffers)

    async def histogram(
        self, pattern: str, *, bins: int, low: float | None, high: float | None
    ) -> tuple[StatsTable, list[float]]:
        """Counts between `bins` equal bins of one tensor, and their edges.

        Where no bound is given, it is the smallest (or largest) element at that very step; the
        last bin then holds the largest one, too.

        Raises: as `get`.
        """
        from paramd.mesh.reading.summary import compute_stats

        async def work(
            sidecars: Sidecars, plan: ReadPlan, pinned: Pinned, deadline_s: float
        ) -> tuple[StatsTable, list[float]]:
            least, most = low, high
            if low is None or high is None:
                table = await compute_stats(
                    sidecars, plan, pinned, deadline_s, with_exponents=False
                )
                found = table.total.summary
                least = low if low is not None else found.min
                most = high if high is not None else math.nextafter(found.max, math.inf)
            assert least is not None
            assert most is not None
            edges = bin_edges(least, most, bins)
            table = await compute_stats(
                sidecars, plan, pinned, deadline_s, with_exponents=False, edges=edges
            )
            return table, edges

        return await self._reading([pattern], work)

    async def picture(
        self, pattern: str, *, mode: str, rows: int, columns: int, row_dims: int | None
    ) -> tuple[int, int, Shown]:
        """(incarnation, step, picture) of the one tensor that matches.

        Raises: as `get`, and as `compute_picture`.
        """
        from paramd.mesh.reading.pooled import compute_picture

        async def work(
            sidecars: Sidecars, plan: ReadPlan, pinned: Pinned, deadline_s: float
        ) -> tuple[int, int, Shown]:
            shown = await compute_picture(
                sidecars,
                plan,
                pinned,
                deadline_s,
                mode=mode,
                max_rows=rows,
                max_columns=columns,
                row_dims=row_dims,
            )
            return pinned.incarnation, pinned.step, shown

        return await self._reading([pattern], work)

    async def values(self, pattern: str) -> tuple[int, int, list[str]]:
        """(incarnation, step, elements as exact text) of the one tensor that matches.

        Raises: as `get`, and as `read_texts`.
        """
        from paramd.mesh.reading.pooled import read_texts

        async def work(
            sidecars: Sidecars, plan: ReadPlan, pinned: Pinned, deadline_s: float
        ) -> tuple[int, int, list[str]]:
            texts = await read_texts(sidecars, plan, pinned, deadline_s)
            return pinned.incarnation, pinned.step, texts

        return await self._reading([pattern], work)

    async def pin(
        self, patterns: Sequence[str], *, with_buffers: bool, filter_text: str, lease_s: float
    ) -> LeasedSnapshot:
        """Holds a snapshot of all tensors that match; see `held`.

        Raises: as `get`.
        """
        from paramd.mesh.reading.pin import while_pinned

        reach = await self._reaching()
        asked_by.set(CALLER.get() or "")

        async def pin(hold: Callable[[Pinned], Awaitable[None]]) -> None:
            began = False

            async def work(
                _sidecars: Sidecars, _plan: ReadPlan, pinned: Pinned, _deadline_s: float
            ) -> None:
                nonlocal began
                if not began:
                    began = True
                    await hold(pinned)

            deadline_s = time.monotonic() + TIMEOUT_S
            await while_pinned(reach, patterns, work, deadline_s, buffers=with_buffers)

        return await self.held.pin(pin, filter_text=filter_text, lease_s=lease_s)

    async def gradients(
        self, patterns: Sequence[str], *, every: int, kind: Kind
    ) -> AsyncGenerator[GradFrame[Any], None]:
        """Statistics of gradients, frame by frame.

        Raises:
            ExhaustedError: too many follow already. ParamdError: as `AsyncMesh.grads`.
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
        """Releases what is held."""
        await self.held.close()

    async def _reading(
        self,
        patterns: Sequence[str],
        work: Callable[[Sidecars, ReadPlan, Pinned, float], Awaitable[Result]],
        *,
        buffers: bool = True,
    ) -> Result:
        """One tensor that is named may be a buffer: that was the caller's choice."""
        from paramd.mesh.reading.pin import while_pinned

        with self._questions.one(CALLER.get()):
            reach = await self._reaching()
            # The sidecars share what they have among those who ask, not among their messengers.
            asked_by.set(CALLER.get() or "")
            deadline_s = time.monotonic() + TIMEOUT_S
            return await while_pinned(reach, patterns, work, deadline_s, buffers=buffers)


def bin_edges(low: float, high: float, bins: int) -> list[float]:
    """`bins + 1` rising edges from `low` to `high`; a range of one number gets one bin.

    Raises:
        UsageError: a bound is no number, or they are in the wrong order.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UsageError("low, high: no finite element sets the range; give both bounds")
    if not low < high or not math.isfinite(high - low):
        raise UsageError(f"low, high: {low} and {high}; expected the first below the second")
    edges = [low + (high - low) * i / bins for i in range(bins)] + [high]
    # Bins narrower than the numbers there are would have equal edges.
    return list(dict.fromkeys(edges))
