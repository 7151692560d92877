"""ControlService over gRPC: sidecars' Join streams and scheduled boundaries."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from paramd.errors import DeadlineError, ExhaustedError, UsageError
from paramd.v1 import common_pb2, control_pb2, control_pb2_grpc
from paramd_service.control.access.join import (
    caller_rank,
    check_epoch,
    check_rank,
    errors_as_statuses,
)
from paramd_service.control.access.revocations import Revocations
from paramd_service.control.mesh.incarnation import Incarnation
from paramd_service.control.mesh.jobs import Jobs
from paramd_service.control.mesh.registry import Member
from paramd_service.revoked import Notice

MAX_TIMEOUT_S = 600.0
MAX_SNAPSHOTS = 100_000
MAX_SNAPSHOT_ID_CHARS = 128
MAX_STREAMS_OF_RANK = 4
"""Join streams per rank: its sidecar's, and those left by stopped predecessors."""

FIRST_REPORT_S = 10.0
"""Time limit for a Join stream's first report, which identifies it."""

LOGGED_RANKS = 64
"""Largest mesh whose joins and leaves are logged at INFO."""

Requests: TypeAlias = AsyncIterator[control_pb2.JoinRequest]

log = logging.getLogger("paramd.control")


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Translates between messages and `Jobs`."""

    def __init__(self, jobs: Jobs, revocations: Revocations) -> None:
        self._jobs = jobs
        self._revocations = revocations
        self._streams: Counter[tuple[str, int, int | None]] = Counter()

    # A coroutine that writes, not a generator: revocations are sent while it awaits reports.
    async def Join(  # type: ignore[override]
        self, request_iterator: Requests, context: Any
    ) -> None:
        async with errors_as_statuses(context, "Join"):
            with self._one_stream():
                await self._join(request_iterator, context)

    @contextmanager
    def _one_stream(self) -> Iterator[None]:
        caller = caller_rank()
        if self._streams[caller] >= MAX_STREAMS_OF_RANK:
            raise ExhaustedError(
                f"rank {caller[2]} has {MAX_STREAMS_OF_RANK} Join streams already; end one"
            )
        self._streams[caller] += 1
        try:
            yield
        finally:
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    async def _join(self, request_iterator: Requests, context: Any) -> None:
        try:
            async with asyncio.timeout(FIRST_REPORT_S):
                first = await anext(request_iterator, None)
        except TimeoutError:
            raise DeadlineError(f"Join: no report came within {FIRST_REPORT_S:.0f} s") from None
        if first is None:
            raise UsageError("Join: the stream ended before its first report")
        header = first.header
        check_epoch(header.job, header.epoch)
        check_rank(header.rank)
        incarnation = await self._jobs.admit(header.job, header.epoch, first.world_size)
        incarnation.saw_generation(first.control_generation)
        # Before it counts as joined: whoever waits for the rank calls it right away.
        await incarnation.calls.is_back(first.peer.address)
        member = incarnation.registry.join(first)
        _log_join(incarnation, member, f"joined from {first.peer.address}")
        try:
            async with self._revocations.telling(
                lambda notice: context.write(_welcome(incarnation, notice))
            ):
                await incarnation.follow(_read(incarnation, member, request_iterator))
        finally:
            incarnation.registry.lose(member)
            _log_join(incarnation, member, "its stream has ended")

    async def ScheduleBoundary(
        self, request: control_pb2.ScheduleBoundaryRequest, context: Any
    ) -> control_pb2.ScheduleBoundaryResponse:
        async with errors_as_statuses(context, "ScheduleBoundary"):
            check_epoch(request.job, request.epoch)
            incarnation = self._jobs.at(request.job, request.epoch)
            snapshots = _snapshots(request, incarnation.bootstrap.world_size)
            timeout_s = context.time_remaining()
            if timeout_s is None or timeout_s > MAX_TIMEOUT_S:
                raise UsageError(f"deadline: expected one of at most {MAX_TIMEOUT_S:.0f} s")
            verdict = await incarnation.coordinator.schedule(snapshots, timeout_s=timeout_s)
            return control_pb2.ScheduleBoundaryResponse(
                header=_header(incarnation, verdict.step, verdict.edits),
                captured=verdict.captured,
                reason=verdict.reason,
            )
        raise AssertionError("errors have become statuses")


async def _read(incarnation: Incarnation, member: Member, requests: Requests) -> None:
    async for request in requests:
        incarnation.saw_generation(request.control_generation)
        incarnation.registry.update(member, request)


def _log_join(incarnation: Incarnation, member: Member, what: str) -> None:
    # Thousands of ranks would each log a line, again and again: only at DEBUG.
    small = incarnation.bootstrap.world_size <= LOGGED_RANKS
    level = logging.INFO if small else logging.DEBUG
    job, epoch = incarnation.job, incarnation.epoch
    log.log(level, "job %s, epoch %d, rank %d: %s", job, epoch, member.rank, what)


def _welcome(incarnation: Incarnation, notice: Notice) -> control_pb2.JoinResponse:
    return control_pb2.JoinResponse(
        header=_header(incarnation),
        generation=incarnation.terms.generation,
        report_interval_ms=round(incarnation.rhythm.interval_s * 1000),
        revoked=control_pb2.Revocations(
            token_ids=notice.token_ids,
            keep_ms=math.ceil(notice.keep_s * 1000),
            refused_before_ns=math.ceil(notice.refused_before_s * 1e9),
        ),
    )


def _snapshots(
    request: control_pb2.ScheduleBoundaryRequest, world_size: int
) -> dict[int, list[str]]:
    if len(request.snapshots) > MAX_SNAPSHOTS:
        raise UsageError(f"snapshots: more than {MAX_SNAPSHOTS}")
    found: dict[int, list[str]] = defaultdict(list)
    for reference in request.snapshots:
        if not 0 <= reference.rank < world_size:
            raise UsageError(f"snapshots: rank {reference.rank}; expected 0 to {world_size - 1}")
        if not 0 < len(reference.snapshot_id) <= MAX_SNAPSHOT_ID_CHARS:
            raise UsageError("snapshots: an id is empty or too long")
        found[reference.rank].append(reference.snapshot_id)
    return found


def _header(incarnation: Incarnation, step: int = -1, edits: int = -1) -> common_pb2.Header:
    return common_pb2.Header(
        job=incarnation.job,
        epoch=incarnation.epoch,
        step=step,
        edits=edits,
        rank=-1,
        layout_digest=incarnation.registry.layout_digest,
    )
