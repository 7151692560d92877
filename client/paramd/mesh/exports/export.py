"""An export under way, as its caller holds it."""

# `timeout=` is what users of every other client write; it bounds retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from paramd.mesh.exports.calls import ExportCalls
from paramd.mesh.exports.results import ExportInfo, Progress, check_done


class AsyncExport:
    """An export of a running job, for asyncio programs. Has the attributes of `ExportInfo`."""

    def __init__(self, calls: ExportCalls, info: ExportInfo) -> None:
        self._calls = calls
        self._hear(info)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "info":
            raise AttributeError(name)
        return getattr(self.info, name)

    def __repr__(self) -> str:
        info = self.info
        reason = f", {info.reason}" if info.reason else ""
        return (
            f"<paramd export {info.id[:8]} to {info.destination!r}: {info.state}{reason}, "
            f"step {info.step}, {info.written_bytes:,} of {info.size_bytes:,} bytes>"
        )

    async def refresh(self) -> ExportInfo:
        """Asks how it stands now. Raises as `AsyncMesh.exports`."""
        return self._hear(await self._calls.get(self.info.id))

    async def wait(
        self, timeout: float | None = None, progress: Progress | None = None
    ) -> ExportInfo:
        """Waits for its end. The export itself goes on whatever becomes of the waiting.

        Args:
            timeout: Seconds; None waits for as long as it takes.
            progress: Called with what is known, about twice a second and at the end.

        Raises:
            ConflictError: it failed or was cancelled; the text says why.
            DeadlineError: it has not ended in time, and goes on.
            UnreachableError: the control plane has been away for a minute.
        """
        self._hear(await self._calls.ended(self.info, timeout, progress))
        check_done(self.info)
        return self.info

    async def cancel(self) -> ExportInfo:
        """Has it ended; what it wrote is removed. Idempotent.

        Raises:
            ConflictError: it has ended in another way already.
        """
        return self._hear(await self._calls.cancel(self.info.id))

    def _hear(self, info: ExportInfo) -> ExportInfo:
        self.info, self.heard_s = info, time.monotonic()
        return info


class Export:
    """An export of a running job. Has the attributes of `ExportInfo`."""

    def __init__(
        self, run: Callable[[Coroutine[Any, Any, ExportInfo]], ExportInfo], begun: AsyncExport
    ) -> None:
        self._run = run
        self._begun = begun

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._begun, name)

    def __repr__(self) -> str:
        return repr(self._begun)

    def refresh(self) -> ExportInfo:
        """Asks how it stands now. Raises as `Mesh.exports`."""
        return self._run(self._begun.refresh())

    def wait(self, timeout: float | None = None, progress: Progress | None = None) -> ExportInfo:
        """Waits for its end. Args, Raises: as `AsyncExport.wait`."""
        return self._run(self._begun.wait(timeout, progress))

    def cancel(self) -> ExportInfo:
        """Has it ended; what it wrote is removed. Raises as `AsyncExport.cancel`."""
        return self._run(self._begun.cancel())
