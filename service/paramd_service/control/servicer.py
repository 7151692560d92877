"""ControlService over gRPC: joining sidecars, scheduled boundaries."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from paramd.errors import ConflictError, UnreachableError, UsageError
from paramd.v1 import common_pb2, control_pb2, control_pb2_grpc
from paramd_service.control.config import Bootstrap
from paramd_service.control.coordinator import Coordinator
from paramd_service.control.registry import Member, Registry
from paramd_service.control.statuses import errors_as_statuses

MAX_TIMEOUT_S = 600.0
MAX_SNAPSHOTS = 100_000
MAX_SNAPSHOT_ID_CHARS = 128

Answers: TypeAlias = AsyncIterator[control_pb2.JoinResponse]

log = logging.getLogger("paramd.control")


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Translates between messages and the registry and the coordinator."""

    def __init__(self, bootstrap: Bootstrap, registry: Registry, coordinator: Coordinator) -> None:
        self._bootstrap = bootstrap
        self._registry = registry
        self._coordinator = coordinator
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ends all Join streams, so that draining need not wait for them."""
        self._stopping.set()

    async def Join(
        self, request_iterator: AsyncIterator[control_pb2.JoinRequest], context: Any
    ) -> Answers:
        async with errors_as_statuses(context, "Join"):
            first = await anext(request_iterator, None)
            if first is None:
                raise UsageError("Join: the stream ended before its first report")
            member = self._registry.join(first)
            log.info("rank %d joined from %s", member.rank, first.peer.address)
            reading = asyncio.create_task(
                self._read(member, request_iterator), name=f"paramd-join-{member.rank}"
            )
            try:
                async for answer in self._answers(reading):
                    yield answer
            finally:
                await _cancelled(reading)
                self._registry.lose(member)
                log.info("rank %d: its stream has ended", member.rank)

    async def _answers(self, reading: asyncio.Task[None]) -> Answers:
        """Peers now and at every change, until the reports end or the server stops."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while True:
                changed = asyncio.create_task(self._registry.changed().wait())
                try:
                    yield control_pb2.JoinResponse(
                        header=self._header(), peers=self._registry.peers()
                    )
                    await asyncio.wait(
                        {changed, reading, stopping}, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    changed.cancel()
                if reading.done():
                    reading.result()
                    return
                if stopping.done():
                    raise UnreachableError("the control plane is stopping; join again")
        finally:
            stopping.cancel()

    async def _read(self, member: Member, requests: AsyncIterator[control_pb2.JoinRequest]) -> None:
        async for request in requests:
            self._registry.update(member, request)

    async def ScheduleBoundary(
        self, request: control_pb2.ScheduleBoundaryRequest, context: Any
    ) -> control_pb2.ScheduleBoundaryResponse:
        async with errors_as_statuses(context, "ScheduleBoundary"):
            snapshots = self._snapshots(request)
            timeout_s = context.time_remaining()
            if timeout_s is None or timeout_s > MAX_TIMEOUT_S:
                raise UsageError(f"deadline: expected one of at most {MAX_TIMEOUT_S:.0f} s")
            verdict = await self._coordinator.schedule(snapshots, timeout_s=timeout_s)
            return control_pb2.ScheduleBoundaryResponse(
                header=self._header(verdict.step),
                captured=verdict.captured,
                reason=verdict.reason,
            )
        raise AssertionError("errors have become statuses")

    def _snapshots(self, request: control_pb2.ScheduleBoundaryRequest) -> dict[int, list[str]]:
        mine = self._bootstrap
        if request.job != mine.job or request.epoch != mine.epoch:
            raise ConflictError(
                f"asked for job {request.job[:64]!r}, epoch {request.epoch}; this is the control "
                f"plane of job {mine.job!r}, epoch {mine.epoch}; connect again"
            )
        if len(request.snapshots) > MAX_SNAPSHOTS:
            raise UsageError(f"snapshots: more than {MAX_SNAPSHOTS}")
        found: dict[int, list[str]] = defaultdict(list)
        for reference in request.snapshots:
            if not 0 <= reference.rank < mine.world_size:
                raise UsageError(
                    f"snapshots: rank {reference.rank}; expected 0 to {mine.world_size - 1}"
                )
            if not 0 < len(reference.snapshot_id) <= MAX_SNAPSHOT_ID_CHARS:
                raise UsageError("snapshots: an id is empty or too long")
            found[reference.rank].append(reference.snapshot_id)
        return found

    def _header(self, step: int = -1) -> common_pb2.Header:
        return common_pb2.Header(
            job=self._bootstrap.job,
            epoch=self._bootstrap.epoch,
            step=step,
            rank=-1,
            layout_digest=self._registry.view().layout_digest,
        )


async def _cancelled(task: asyncio.Task[None]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
