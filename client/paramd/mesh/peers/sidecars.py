"""Calls to the sidecars of one incarnation, and the types of pinning: spans, pins, states."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from paramd import inside, streams
from paramd.errors import (
    ConflictError,
    DataLossError,
    DeadlineError,
    NotFoundError,
    ParamdError,
    UnreachableError,
)
from paramd.layout.codec import LayoutBound
from paramd.mesh.peers.control import JobDocument
from paramd.mesh.peers.grpc import (
    PHASE_NAMES,
    TELL_S,
    Background,
    Channels,
    LeaseEndedError,
    NotTrustedError,
    RankUnreachableError,
    all_ended,
    boundary_age_s,
    cancelled,
    is_relayed,
    told_errors,
    watched,
)
from paramd.security.tls import host_of, is_loopback
from paramd.state import Settling, StateName
from paramd.v1 import common_pb2, control_pb2, layout_pb2, sidecar_pb2
from paramd.wire import LEASE_S, Chunk, checksum_of


@dataclass(frozen=True, slots=True)
class RankPin:
    """One rank's snapshot. The step of its state is -1 until a boundary has filled it."""

    rank: int
    snapshot_id: str
    state: StateName
    """State of the bytes."""
    size_bytes: int
    lease_s: float
    iteration: int = -1
    """Backward passes before the update that made its step; equal on ranks in lock-step."""
    unsettled: bool = False
    """Training has not continued since its update."""
    boundary_token: int = 0
    """Of the agreed request that filled it, or of a mark its history; 0: neither, or not yet."""
    settling: Settling = Settling.UNKNOWN
    """How far the state had come, as far as its samples show."""

    @classmethod
    def of(cls, rank: int, answer: sidecar_pb2.PinSnapshotResponse) -> RankPin:
        return cls(
            rank=rank,
            snapshot_id=answer.snapshot_id,
            state=StateName.of(answer.header),
            size_bytes=answer.size_bytes,
            lease_s=answer.lease_ms / 1000,
            iteration=answer.header.iteration,
            unsettled=answer.header.unsettled,
            boundary_token=answer.header.boundary_token,
            settling=Settling(answer.settling),
        )


@dataclass(frozen=True, slots=True)
class Captured:
    """Result of a scheduled boundary: all snapshots filled at `step`, or why not."""

    captured: bool
    state: StateName
    reason: str
    boundary_token: int = 0
    """Of the request that filled them."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Snapshots of all needed ranks at one state."""

    state: StateName
    """State of all of them."""
    pins: Mapping[int, RankPin]
    unsettled: bool = False
    """On some rank training has not continued since the update that made its step."""
    beside: Mapping[int, RankPin] = field(default_factory=dict)
    """Samples of the same state, to compare replicas."""
    boundary_token: int = 0
    """Of the agreed request that filled all of them: whatever is read of them must bear it."""


Spans = Mapping[int, Sequence[tuple[int, int]]]
"""Requested arena spans, by rank: sorted, half-open, in bytes."""


class PinTransport(Protocol):
    """The calls that pinning makes; all raise ParamdError."""

    async def pin(
        self, rank: int, spans: Sequence[tuple[int, int]], how: PinKind, timeout_s: float
    ) -> RankPin:
        """Pin spans of one rank."""

    async def schedule(self, pins: Sequence[RankPin], timeout_s: float) -> Captured:
        """Fill prepared snapshots at one agreed boundary."""

    async def renew(self, pin: RankPin) -> float:
        """Renew a lease; return the seconds granted."""

    def release(self, pin: RankPin) -> None:
        """End a lease in the background; never fails, never waits."""


@dataclass(frozen=True, slots=True)
class PinKind:
    """Options of a pin, called like the fields of its request."""

    at_boundary: bool = False
    with_buffers: bool = False
    unsettled: bool = False
    """Accept parameters changed after their update while training has not continued."""
    mark: str = ""
    """Not the present parameters but those of this mark."""


def one_step(pins: Sequence[RankPin]) -> StateName | None:
    """The state that all pins share, or None; ConflictError: one step, several iterations."""
    found = {(pin.state, pin.boundary_token) for pin in pins}
    if len(found) != 1 or not _settled_alike(pins):
        return None
    ((state, _),) = found
    if state.step >= 0 and len({pin.iteration for pin in pins}) > 1:
        raise out_of_lockstep(state.step, {pin.rank: pin.iteration for pin in pins})
    return state if state.step >= 0 else None


_SETTLED = frozenset({Settling.UNKNOWN, Settling.KEPT, Settling.CHANGED})
_UNCHANGED = frozenset({Settling.LEFT, Settling.KEPT})


def _settled_alike(pins: Sequence[RankPin]) -> bool:
    """Whether no pin is of before a change of the script's, and another of after it."""
    found = {pin.settling for pin in pins}
    return found <= _SETTLED or found <= _UNCHANGED or found == {Settling.CHANGING}


_TOLD = {
    Settling.LEFT: ", as its update left it",
    Settling.CHANGED: ", as changed after its update",
    Settling.CHANGING: ", which the script is changing",
}


def out_of_lockstep(step: int, iterations: Mapping[int, int]) -> ConflictError:
    told = ", ".join(f"rank {rank} in iteration {of}" for rank, of in list(iterations.items())[:8])
    return ConflictError(
        f"the ranks are not at the same step of training: update {step} was made by {told}. One of "
        "them skipped an update: its optimizer raised, or its gradient scaler skipped it on that "
        "rank alone. Restart the training from a checkpoint"
    )


def no_step_in_time(spans: Spans, reason: str) -> DeadlineError:
    """The error when no attempt found a common step."""
    ranks = [rank for rank in spans if rank >= 0]  # those below stand for other state of these
    return DeadlineError(
        f"no common step of ranks {_listed(ranks)} in time; last reason: {reason}; allow "
        "more time (timeout=), or pause training"
    )


def pinned_at(common: StateName, pins: Sequence[RankPin], beside: Sequence[RankPin] = ()) -> Pinned:
    """`pins` of all ranks, which share the state `common`, and those `beside` them."""
    unsettled = any(pin.unsettled for pin in pins)
    by_rank, compared = ({pin.rank: pin for pin in some} for some in (pins, beside))
    token = next((pin.boundary_token for pin in pins), 0)
    return Pinned(common, by_rank, unsettled, compared, token)


def told_step(pin: RankPin) -> str:
    """Step of a pin, its number of edits if any, and the label of replacing weights."""
    return str(pin.state).removeprefix("step ") + _TOLD.get(pin.settling, "")


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} ranks)"


@dataclass(slots=True)
class FastPathBackoff:
    """Whether to pin each rank's latest step before asking for an agreed boundary.

    A failed attempt costs a round of copies on all ranks. So after the steps differed, pins go
    straight to a boundary for a period that doubles with every further failure.
    """

    first_pause_s: float = 0.5
    last_pause_s: float = 8.0
    _pause_s: float = 0.0
    _until_s: float = field(default=float("-inf"))

    def tries(self, now_s: float) -> bool:
        """Whether to try the fast path at `now_s`."""
        return now_s >= self._until_s

    def differed(self, now_s: float) -> None:
        self._pause_s = min(max(2 * self._pause_s, self.first_pause_s), self.last_pause_s)
        self._until_s = now_s + self._pause_s

    def agreed(self) -> None:
        self._pause_s = 0.0
        self._until_s = float("-inf")


Result = TypeVar("Result")
Answer = TypeVar("Answer", bound=Message)

log = logging.getLogger("paramd")

LAYOUT_TIMEOUT_S = 30.0

_PROBE_TIMEOUT_S = 3.0
# Before the control plane's own probes.
_BOUNDARY_PROBE_AFTER_S = 1.0
_BOUNDARY_PROBES = 64
_RENEW_TIMEOUT_S = 5.0
_GRANT_TIMEOUT_S = 5.0
_WITHOUT_STREAMS_S = 60.0
_RELEASE_TIMEOUT_S = 2.0
_LATE_PIN_S = 2.0


@dataclass(frozen=True, slots=True)
class StreamOffer:
    """A grant for one bulk stream, and where to show it."""

    grant: streams.Grant = field(repr=False)
    header: common_pb2.Header
    """State of the snapshot."""
    host: str
    port: int
    """0: its sidecar has none."""
    tls: ssl.SSLContext | None
    staged_bytes: int = 0
    """Offset at which an edit's data continues."""

    @property
    def leaves_host(self) -> bool:
        return not is_loopback(self.host)


class SnapshotSource:
    """One rank's pinned snapshot, read over a stream."""

    def __init__(
        self, sidecars: Sidecars, channels: Channels, pin: RankPin, *, end_bytes: int = 0
    ) -> None:
        """`end_bytes` is the exclusive end of the read; 0 means the snapshot's end."""
        self._sidecars = sidecars
        self._channels = channels
        self._pin = pin
        self._asked = sidecars.document.asked(pin.rank)
        self._end_bytes = end_bytes
        self.who = self._asked.who

    def chunks(self, offset_bytes: int, timeout_s: float) -> AsyncIterator[Chunk]:
        size_bytes = max(self._end_bytes - offset_bytes, 0)
        if self._end_bytes and not size_bytes:
            # Only the proof is missing; a size of 0 would mean all that follows.
            offset_bytes = self._pin.size_bytes
        request = sidecar_pb2.ReadSnapshotRequest(
            snapshot_id=self._pin.snapshot_id, offset_bytes=offset_bytes, size_bytes=size_bytes
        )
        return self._channels.read(self._asked, request, timeout_s=timeout_s)

    async def offer(self) -> StreamOffer:
        """A grant for one bulk stream. Raises as `Sidecars.offer`."""
        request = sidecar_pb2.GrantStreamRequest(snapshot_id=self._pin.snapshot_id)
        return await self._sidecars.offer(self._pin.rank, request)

    async def probe(self) -> None:
        """Raise RankUnreachableError if the sidecar does not respond."""
        await self._sidecars.probe(self._pin.rank)


class _Waiting:
    """Logs, every few seconds, the rank that a boundary waits for."""

    def __init__(self) -> None:
        self._began_s = self._told_s = time.monotonic()

    def on(self, states: Iterable[tuple[int, common_pb2.RankState | None]]) -> None:
        """The ranks' states now; None of one that gives none."""
        now_s = time.monotonic()
        # A rank that itself only waits is named last.
        known = [
            (not state.waits_for_others, boundary_age_s(state), -rank, state)
            for rank, state in states
            if state
        ]
        if not known or now_s - self._told_s < TELL_S:
            return
        self._told_s = now_s
        *_, rank, state = max(known, key=itemgetter(0, 1, 2))
        log.warning(
            "paramd: waiting %.0f s for all ranks to reach a step boundary; rank %d is late (in "
            "%s, step %d)",
            now_s - self._began_s,
            -rank,
            PHASE_NAMES.get(state.phase, "an unknown phase"),
            state.step,
        )


READ_INSTEAD = (
    "Read parameters without buffers, or read from another thread or process; for a checkpoint, "
    "call attachment.export(...) on all ranks"
)


class Sidecars:
    """Calls to the sidecars of a job document. Errors name the rank."""

    def __init__(
        self,
        channels: Channels,
        document: JobDocument,
        background: Background,
        stopped: Mapping[int, RankUnreachableError] = MappingProxyType({}),
    ) -> None:
        self._channels = channels
        self._background = background
        self._stopped = stopped
        self.document = document

    def check_not_stopped(self, ranks: Iterable[int]) -> None:
        """Raise RankUnreachableError for ranks just found stopped: do not wait for them twice."""
        for rank in ranks:
            if rank in self._stopped:
                raise self._stopped[rank]

    def waits_for_itself(self) -> bool:
        """Whether the caller is the thread that trains this job, so that no boundary comes."""
        document = self.document

        def place_of(rank: int) -> tuple[str, str] | None:
            peer = document.peers.get(rank)
            return (peer.host_id, peer.socket_path) if peer is not None else None

        return inside.waits_for_itself(document.job, document.incarnation, place_of)

    async def pin(
        self, rank: int, spans: Sequence[tuple[int, int]], how: PinKind, timeout_s: float
    ) -> RankPin:
        """Pin spans of one rank; waits up to `timeout_s` while its sidecar responds to probes."""
        request = self.pin_request(
            spans,
            at_boundary=how.at_boundary,
            with_buffers=how.with_buffers,
            unsettled=how.unsettled,
            mark=how.mark,
        )
        return RankPin.of(rank, await self.pin_step(rank, request, timeout_s))

    def pin_request(
        self,
        spans: Sequence[tuple[int, int]],
        lease_s: float = LEASE_S,
        *,
        at_boundary: bool = False,
        with_buffers: bool = False,
        unsettled: bool = False,
        mark: str = "",
        source: sidecar_pb2.Source.ValueType = sidecar_pb2.SOURCE_UNSPECIFIED,
        state_key: str = "",
        lossless_every: int = 0,
        at_step: int = 0,
        at_history: int | None = None,
    ) -> sidecar_pb2.PinSnapshotRequest:
        """The request for a pin of one rank.

        Args:
            spans: bytes of the rank's arena.
            lease_s: seconds that the pin lives unless it is renewed.
            at_boundary, with_buffers, unsettled, mark: as in `PinKind`.
            source, state_key, lossless_every, at_step, at_history: as in the message.
        """
        return sidecar_pb2.PinSnapshotRequest(
            incarnation=self.document.incarnation,
            layout_digest=self.document.layout_digest,
            spans=[sidecar_pb2.Span(begin=begin, end=end) for begin, end in spans],
            lease_ms=int(1000 * lease_s),
            at_boundary=at_boundary,
            with_buffers=with_buffers,
            unsettled=unsettled,
            mark=mark,
            source=source,
            state_key=state_key,
            lossless_every=lossless_every,
            at_step=at_step,
            at_history=at_history,
        )

    async def pin_step(
        self, rank: int, request: sidecar_pb2.PinSnapshotRequest, timeout_s: float
    ) -> sidecar_pb2.PinSnapshotResponse:
        """Pin one rank; waits for a step that lies ahead."""
        call = asyncio.ensure_future(self._call(rank, "PinSnapshot", request, timeout_s))
        try:
            found = await watched(asyncio.shield(call), lambda: self.probe(rank))
        except BaseException:
            self._background.start(self._taken_back(rank, call))
            raise
        assert isinstance(found, sidecar_pb2.PinSnapshotResponse)
        return found

    async def _taken_back(
        self, rank: int, call: asyncio.Future[sidecar_pb2.PinSnapshotResponse]
    ) -> None:
        """Release the grant of a pin whose caller is gone.

        Cancelled at once it could leave a lease that nobody knows of. Clients that find one rank
        full and give up the others would fill those too, and never find all of them free.
        """
        await asyncio.wait({call}, timeout=_LATE_PIN_S)
        if not call.done():
            await cancelled(call)
        elif not call.cancelled() and call.exception() is None:
            self.release(RankPin.of(rank, call.result()))

    async def schedule(self, pins: Sequence[RankPin], timeout_s: float) -> Captured:
        """Fill prepared snapshots at one agreed boundary.

        Raises:
            ConflictError: If the caller is the thread that trains.
        """
        if self.waits_for_itself():
            raise inside.own_wait("this", READ_INSTEAD)
        document = self.document
        request = control_pb2.ScheduleBoundaryRequest(
            job=document.job,
            incarnation=document.incarnation,
            snapshots=[
                control_pb2.SnapshotRef(rank=pin.rank, snapshot_id=pin.snapshot_id) for pin in pins
            ],
        )
        call = self._channels.schedule(document.control_address, request, timeout_s=timeout_s)
        told = _Waiting()
        # A boundary needs all ranks, pinned ones first. The control plane probes them too, but
        # its error names no rank, so the next attempt would wait just as long.
        ranks = list(dict.fromkeys([*(pin.rank for pin in pins), *document.peers]))
        found = await watched(
            call,
            lambda: self._probe_all(ranks[:_BOUNDARY_PROBES], told),
            after_s=_BOUNDARY_PROBE_AFTER_S,
        )
        header = found.header
        if (header.job, header.incarnation) != (document.job, document.incarnation):
            raise ConflictError(
                f"the control plane at {document.control_address} serves job {header.job!r}, "
                f"run {header.incarnation}; expected job {document.job!r}, run "
                f"{document.incarnation}; try again in a moment"
            )
        return Captured(found.captured, StateName.of(header), found.reason, header.boundary_token)

    async def renew(self, pin: RankPin, lease_s: float = LEASE_S) -> float:
        """Renew a lease; return the seconds granted."""
        request = sidecar_pb2.RenewSnapshotRequest(
            snapshot_id=pin.snapshot_id, lease_ms=int(1000 * lease_s)
        )
        found = await self._call(pin.rank, "RenewSnapshot", request, _RENEW_TIMEOUT_S)
        return float(found.lease_ms / 1000)

    def release(self, pin: RankPin) -> None:
        """End a lease in the background; never fails, never waits."""
        request = sidecar_pb2.ReleaseSnapshotRequest(snapshot_id=pin.snapshot_id)
        self._background.start(self._call(pin.rank, "ReleaseSnapshot", request, _RELEASE_TIMEOUT_S))

    async def state(self, rank: int, timeout_s: float) -> sidecar_pb2.GetStateResponse:
        found = await self._call(rank, "GetState", sidecar_pb2.GetStateRequest(), timeout_s)
        assert isinstance(found, sidecar_pb2.GetStateResponse)
        return found

    async def delta(
        self, pin: RankPin, request: sidecar_pb2.DeltaSnapshotRequest, timeout_s: float
    ) -> tuple[sidecar_pb2.DeltaSnapshotResponse, bytes, int]:
        """The changes in a pinned snapshot: header and parts, their bytes, and all bytes received.

        Raises:
            DataLossError: If bytes are missing or do not match their checksum.
        """
        request.snapshot_id = pin.snapshot_id
        asked, data, received_bytes = self.document.asked(pin.rank), bytearray(), 0

        async def collect() -> sidecar_pb2.DeltaSnapshotResponse:
            nonlocal received_bytes
            head = sidecar_pb2.DeltaSnapshotResponse()
            call = self._channels.open(asked, "DeltaSnapshot", request, timeout_s=timeout_s)
            with told_errors(asked.who):
                async for message in call:
                    received_bytes += message.ByteSize()
                    if message.HasField("header"):
                        asked.check(message.header)
                        head = message
                        continue
                    checksum = checksum_of(message.data, message.offset_bytes)
                    if message.offset_bytes != len(data) or checksum != message.xxh3:
                        raise DataLossError(
                            f"{asked.who}: {len(message.data):,} bytes of changes at "
                            f"{message.offset_bytes:,} do not match their checksum"
                        )
                    data.extend(message.data)
            return head

        call = self._told(pin.rank, collect())
        head = await watched(call, lambda: self.probe(pin.rank))
        if len(data) != sum(part.size_bytes for part in head.parts):
            raise DataLossError(
                f"{asked.who}: {len(data):,} bytes of changes, and some are missing"
            )
        return head, bytes(data), received_bytes

    async def layout_batches(self, rank: int) -> list[layout_pb2.Layout]:
        asked = self.document.asked(rank)

        async def collect() -> list[layout_pb2.Layout]:
            request, batches = sidecar_pb2.GetLayoutRequest(), []
            bound = LayoutBound(asked.who)
            call = self._channels.open(asked, "GetLayout", request, timeout_s=LAYOUT_TIMEOUT_S)
            try:
                with told_errors(asked.who):
                    async for batch in call:
                        asked.check(batch.header)
                        bound.count(batch.layout)
                        batches.append(batch.layout)
            finally:
                call.cancel()
            return batches

        batches = await watched(self._told(rank, collect()), lambda: self.probe(rank))
        if not batches:
            raise RankUnreachableError(rank, f"{asked.who}: it sent no layout")
        return batches

    async def stage(
        self, rank: int, requests: AsyncIterator[bytes], *, timeout_s: float
    ) -> sidecar_pb2.StageEditResponse:
        """Stream serialized StageEditRequests to one rank. Raises gRPC's errors."""
        return await self._channels.stage(self.document.asked(rank), requests, timeout_s=timeout_s)

    async def offer(self, rank: int, request: sidecar_pb2.GrantStreamRequest) -> StreamOffer:
        """A grant for a bulk stream of a pinned snapshot, or of an edit's data.

        Raises:
            LeaseEndedError: If the snapshot's lease has ended, or the edit is unknown.
        """
        found = await self.ask(rank, request, sidecar_pb2.GrantStreamResponse, _GRANT_TIMEOUT_S)
        address = self.document.peer(rank).address
        return StreamOffer(
            grant=streams.Grant(found.grant_id, found.secret),
            header=found.header,
            host=host_of(address),
            port=found.port,
            tls=self._channels.stream_tls(address),
            staged_bytes=found.staged_bytes,
        )

    def has_streams(self, rank: int) -> bool:
        """Whether the rank's port for streams may be tried."""
        address = self.document.peer(rank).address
        if is_relayed(address):
            return False
        return time.monotonic() >= self._channels.without_streams.get(address, 0.0)

    def keep_to_grpc(self, rank: int) -> None:
        """The rank's port for streams cannot be reached: do not try it for a while."""
        address = self.document.peer(rank).address
        self._channels.without_streams[address] = time.monotonic() + _WITHOUT_STREAMS_S

    def source(self, pin: RankPin, *, end_bytes: int = 0) -> SnapshotSource:
        """A source that reads a pinned snapshot up to `end_bytes`; 0 means to its end."""
        return SnapshotSource(self, self._channels, pin, end_bytes=end_bytes)

    async def _probe_all(self, ranks: Sequence[int], told: _Waiting) -> None:
        told.on(zip(ranks, await all_ended(map(self.probe, ranks)), strict=True))

    async def probe(self, rank: int) -> common_pb2.RankState | None:
        """The state that `rank`'s sidecar reports; RankUnreachableError without a response."""
        try:
            return (await self.state(rank, _PROBE_TIMEOUT_S)).state
        except (DeadlineError, UnreachableError) as error:
            if isinstance(error.__cause__, NotTrustedError):
                raise
            raise RankUnreachableError(
                rank,
                f"{self.who(rank)} does not answer: its sidecar is stopped, dead or cut off; "
                "try again in a few seconds (this does not stop the training, if it still runs)",
                stopped=True,
            ) from error
        except ParamdError:
            return None  # an error response is a response

    def who(self, rank: int) -> str:
        peer = self.document.peers.get(rank)
        return f"rank {rank} ({peer.address})" if peer is not None else f"rank {rank}"

    async def ask(
        self, rank: int, request: Message, answers: type[Answer], timeout_s: float
    ) -> Answer:
        """Call the method that `request` is of; probe the rank while it takes its time."""
        # A deadline alone does not distinguish a rank in a long update from a stopped sidecar.
        call = self._call(rank, request.DESCRIPTOR.name.removesuffix("Request"), request, timeout_s)
        found = await watched(call, lambda: self.probe(rank))
        assert isinstance(found, answers)
        return found

    async def _call(self, rank: int, method: str, request: object, timeout_s: float) -> Any:
        asked = self.document.asked(rank)
        return await self._told(
            rank, self._channels.ask(asked, method, request, timeout_s=timeout_s)
        )

    async def _told(self, rank: int, call: Awaitable[Result]) -> Result:
        """Await `call`; add the rank and advice to its errors."""
        try:
            return await call
        except NotTrustedError as error:
            raise RankUnreachableError(rank, str(error), stopped=True) from error
        except UnreachableError as error:
            raise RankUnreachableError(
                rank, f"{error}; its sidecar may be restarting, try again in a few seconds"
            ) from error
        except NotFoundError as error:
            # A snapshot that is gone; `get_edit`'s caller catches the base class.
            raise LeaseEndedError(str(error)) from error
