"""Statistics of parameters for the REST side, over the same mesh client that users have."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from paramd.errors import ExhaustedError
from paramd_service.control.config import Bootstrap

if TYPE_CHECKING:
    from paramd.mesh.amesh import AsyncMesh
    from paramd.mesh.results import StatsTable

TIMEOUT_S = 30.0
MAX_CONCURRENT = 4


class StatsSource:
    """Asks the sidecars to reduce; keeps its mesh client from the first question on."""

    def __init__(self, bootstrap: Bootstrap, url: str) -> None:
        """No I/O. `url` is this control plane's own: a mesh is found through it."""
        self._bootstrap = bootstrap
        self._url = url
        self._stack = AsyncExitStack()
        self._mesh: AsyncMesh | None = None
        self._opening = asyncio.Lock()
        self._free = MAX_CONCURRENT

    async def get(self, pattern: str, *, with_buffers: bool, with_histogram: bool) -> StatsTable:
        """Statistics of all tensors that match, at one step.

        Raises:
            ExhaustedError: too many questions at once.
            ParamdError: as `AsyncMesh.stats`.
        """
        if self._free == 0:
            raise ExhaustedError(f"{MAX_CONCURRENT} statistics are under way; try again later")
        self._free -= 1
        try:
            mesh = await self._opened()
            return await mesh.stats(
                pattern, buffers=with_buffers, histogram=with_histogram, timeout=TIMEOUT_S
            )
        finally:
            self._free += 1

    async def close(self) -> None:
        """Closes the mesh client."""
        await self._stack.aclose()

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
