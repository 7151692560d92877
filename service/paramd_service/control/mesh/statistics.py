"""Numbers, pictures and values for the REST side, over the same mesh client that users have."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from paramd.errors import UsageError, asked_by
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.held import Held, HeldSnapshots
from paramd_service.shares import CALLER, Shares

if TYPE_CHECKING:
    from paramd.layout.plan import ReadPlan
    from paramd.mesh.amesh import AsyncMesh
    from paramd.mesh.frames.frames import GradFrame, Kind
    from paramd.mesh.peers.pins import Pinned
    from paramd.mesh.peers.sidecars import Sidecars
    from paramd.mesh.reading.pooled import Shown
    from paramd.mesh.results import StatsTable

Result = TypeVar("Result")

TIMEOUT_S = 30.0
MAX_CONCURRENT = 8
"""Questions at once; each takes a thread and some memory of every rank."""

MAX_STREAMS = 32
"""Readers of gradients at once."""


class StatsSource:
    """Asks the sidecars to reduce; keeps its mesh client from the first question on."""

    def __init__(self, bootstrap: Bootstrap, url: str) -> None:
        """No I/O. `url` is this control plane's own: a mesh is found through it."""
        self._bootstrap = bootstrap
        self._url = url
        self._stack = AsyncExitStack()
        self._mesh: AsyncMesh | None = None
        self._opening = asyncio.Lock()
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
        wanted = [patterns] if isinstance(patterns, str) else patterns
        async with self._asking() as mesh:
            return await mesh.stats(
                *wanted, buffers=with_buffers, histogram=with_histogram, timeout=TIMEOUT_S
            )

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
        """(epoch, step, picture) of the one tensor that matches.

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
            return pinned.epoch, pinned.step, shown

        return await self._reading([pattern], work)

    async def values(self, pattern: str) -> tuple[int, int, list[str]]:
        """(epoch, step, elements as exact text) of the one tensor that matches.

        Raises: as `get`, and as `read_texts`.
        """
        from paramd.mesh.reading.pooled import read_texts

        async def work(
            sidecars: Sidecars, plan: ReadPlan, pinned: Pinned, deadline_s: float
        ) -> tuple[int, int, list[str]]:
            texts = await read_texts(sidecars, plan, pinned, deadline_s)
            return pinned.epoch, pinned.step, texts

        return await self._reading([pattern], work)

    async def pin(
        self, patterns: Sequence[str], *, with_buffers: bool, filter_text: str, lease_s: float
    ) -> Held:
        """Holds a snapshot of all tensors that match; see `held`.

        Raises: as `get`.
        """
        mesh = await self._opened()
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

            await mesh.reading(patterns, work, buffers=with_buffers, timeout=TIMEOUT_S)

        return await self.held.pin(pin, filter_text=filter_text, lease_s=lease_s)

    async def gradients(
        self, patterns: Sequence[str], *, every: int, kind: Kind
    ) -> AsyncGenerator[GradFrame[Any], None]:
        """Statistics of gradients, frame by frame.

        Raises:
            ExhaustedError: too many follow already. ParamdError: as `AsyncMesh.grads`.
        """
        with self._streams.one(CALLER.get()):
            mesh = await self._opened()
            asked_by.set(CALLER.get() or "")
            async with aclosing(mesh.grads(*patterns, every=every, kind=kind)) as frames:  # type: ignore[type-var]
                async for frame in frames:
                    yield frame

    async def close(self) -> None:
        """Releases what is held, and closes the mesh client."""
        await self.held.close()
        await self._stack.aclose()

    async def _reading(
        self,
        patterns: Sequence[str],
        work: Callable[[Sidecars, ReadPlan, Pinned, float], Awaitable[Result]],
    ) -> Result:
        async with self._asking() as mesh:
            # One tensor was named: whether it is a buffer was the caller's choice.
            return await mesh.reading(patterns, work, buffers=True, timeout=TIMEOUT_S)

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[AsyncMesh]:
        with self._questions.one(CALLER.get()):
            mesh = await self._opened()
            # The sidecars share what they have among those who ask, not among their messengers.
            asked_by.set(CALLER.get() or "")
            yield mesh

    async def _opened(self) -> AsyncMesh:
        async with self._opening:
            if self._mesh is None:
                # Loaded when first asked for: it is most of what this process would import.
                from paramd.mesh.amesh import AsyncMesh

                mine = self._bootstrap
                self._mesh = await self._stack.enter_async_context(
                    AsyncMesh(self._url, mine.token, job=mine.job)
                )
            return self._mesh


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
