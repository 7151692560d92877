"""One epoch of one job at this control plane: its members and the services built on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from paramd.errors import ConflictError, ParamdError
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.base.site import EpochRecord
from paramd_service.control.mesh.coordinator import Coordinator
from paramd_service.control.mesh.registry import Registry, rhythm
from paramd_service.control.mesh.sidecars import LayoutSource, OwnDirectory, OwnFinder, SidecarCalls
from paramd_service.control.mesh.statistics import StatsSource
from paramd_service.control.mesh.watch import Publish, RefusalBook, StateWatch


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlIdentity:
    """Settings shared by every job of a control plane."""

    generation: int
    """Of two control planes, the one with the higher generation wins."""
    control_address: Callable[[], str] = str
    """Our own gRPC target, once it is known."""
    report_s: float = 2.0
    """Seconds between two reports of a sidecar."""
    silent_after_s: float = 4.5
    """Seconds without a report after which a joined sidecar is silent."""


class Incarnation:
    """Event loop only. Connections are opened on first use."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        terms: ControlIdentity,
        *,
        publish: Publish = lambda kind, data, *, job: None,
    ) -> None:
        self.bootstrap = bootstrap
        self.terms = terms
        self.rhythm = rhythm(
            bootstrap.world_size, report_s=terms.report_s, silent_after_s=terms.silent_after_s
        )
        self.registry = Registry(bootstrap, silent_after_s=self.rhythm.silent_after_s)
        self.calls = SidecarCalls(bootstrap, generation=terms.generation)
        self.layouts = LayoutSource(self.calls)
        self.coordinator = Coordinator(
            self.calls,
            self.registry.view,
            epoch=bootstrap.epoch,
            generation=terms.generation,
        )
        self.reaching = OwnFinder(OwnDirectory(bootstrap, self.registry, terms.control_address))
        self.statistics = StatsSource(self.reaching)
        self.refusals = RefusalBook()
        self.watch = StateWatch(job=bootstrap.job, epoch=bootstrap.epoch, publish=publish)
        self.began_s = time.time()
        self.ended_s: float | None = None
        self.last_step = -1
        """Lowest step the ranks last reported when the epoch ended; -1 when none reported."""
        self._why_over: ParamdError | None = None
        self._streams: set[asyncio.Task[None]] = set()

    @property
    def job(self) -> str:
        return self.bootstrap.job

    @property
    def epoch(self) -> int:
        return self.bootstrap.epoch

    @property
    def over(self) -> ParamdError | None:
        """Why joins and boundary requests are refused; None while they are accepted."""
        return self._why_over

    def check(self) -> None:
        """Raise the reason if this incarnation is over."""
        if self._why_over is not None:
            raise self._why_over

    def saw_generation(self, generation: int) -> None:
        """Yield the job if a sidecar has met a control plane of a higher generation than ours.

        Raises:
            ConflictError: it is higher.
        """
        if generation > self.terms.generation:
            self.send_away(
                ConflictError(
                    f"a newer control plane (generation {generation}) serves job {self.job!r}; "
                    f"this one is of generation {self.terms.generation}"
                )
            )
            self.check()

    def end(self, reason: ParamdError) -> None:
        """End the epoch and all streams with `reason`; the first reason wins. Idempotent."""
        if self._why_over is None:
            self._why_over = reason
        if self.ended_s is None:
            self.ended_s = time.time()
            self.last_step = self.registry.last_step
        for stream in self._streams:
            stream.cancel()

    def send_away(self, reason: ParamdError) -> None:
        """End the streams and refuse new ones without ending the epoch: it goes on elsewhere."""
        self._why_over = self._why_over if self._why_over is not None else reason
        for stream in self._streams:
            stream.cancel()

    async def follow(self, stream: Coroutine[Any, Any, None]) -> None:
        """Run the reader of one Join stream until it ends or this incarnation does.

        Raises:
            ParamdError: what the stream raised, or why this incarnation is over.
        """
        if self._why_over is not None:
            stream.close()
            raise self._why_over
        task = asyncio.create_task(stream)
        self._streams.add(task)
        try:
            # `wait`, not `await task`: `end` cancels the reader, and the caller must see the
            # reason, not a cancellation of its own.
            await asyncio.wait({task})
        finally:
            self._streams.discard(task)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if not task.cancelled():
            task.result()
        self.check()

    def record(self) -> EpochRecord:
        """This epoch's entry in the list of epochs."""
        return EpochRecord(
            epoch=self.epoch,
            world_size=self.bootstrap.world_size,
            began_s=self.began_s,
            ended_s=self.ended_s,
            reason=str(self._why_over) if self._why_over is not None else "",
            step=self.last_step if self.ended_s is not None else -1,
        )

    async def close(self) -> None:
        """Release everything that was opened. Call after `end`."""
        # The coordinator first: its rounds still call sidecars.
        await self.coordinator.close()
        await self.statistics.close()
        await self.reaching.close()
        await self.calls.close()
        self.layouts.close()
