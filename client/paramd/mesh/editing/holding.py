"""Keeps a hold's lease alive for as long as somebody here wants it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from paramd.errors import ParamdError, UsageError
from paramd.mesh.editing.calls import EditCalls
from paramd.mesh.editing.results import Hold

LEASE_S: Final = 30.0
"""Lease of a hold, renewed at a third of it; it ends by itself when its holder dies."""

CAP_S: Final = 300.0
"""The trainers end a hold that lasted this long, whoever renews it."""

_RENEW_TIMEOUT_S: Final = 5.0


class Holder:
    """The hold of one mesh. Use on one event loop."""

    def __init__(self, calls: EditCalls) -> None:
        self._calls = calls
        self._lease_s = LEASE_S
        self._renewing: asyncio.Task[None] | None = None

    async def pause(self, lease_s: float, *, renew: bool, deadline_s: float) -> Hold:
        """Begins a hold; with `renew` its lease is kept alive until `resume` or `close`."""
        if not 0 < lease_s <= CAP_S:
            raise UsageError(f"lease_s: {lease_s}; expected above 0 and at most {CAP_S:g}")
        found = await self._calls.hold("POST", "", {"lease_s": lease_s}, deadline_s)
        await self.stop_renewing()
        if renew:
            self._lease_s = lease_s
            self._renewing = asyncio.create_task(self._renew(), name="paramd-hold")
        return found

    async def step(self, steps: int, *, deadline_s: float) -> Hold:
        """Lets held training finish `steps` updates and waits again."""
        if steps < 1:
            raise UsageError(f"steps: {steps}; expected at least 1")
        return await self._calls.hold("POST", "/step", {"steps": steps}, deadline_s)

    async def resume(self, *, deadline_s: float) -> Hold:
        """Ends the hold. Idempotent."""
        await self.stop_renewing()
        return await self._calls.hold("DELETE", "", None, deadline_s)

    async def stop_renewing(self) -> None:
        """The lease will run out, unless the hold is ended before. Idempotent."""
        task, self._renewing = self._renewing, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            # A lease that cannot be renewed ends, which is what leases are for.
            with suppress(ParamdError):
                await self._calls.hold(
                    "POST",
                    "/renew",
                    {"lease_s": self._lease_s},
                    time.monotonic() + _RENEW_TIMEOUT_S,
                )
