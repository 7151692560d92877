"""Streams of steps: requests upcoming steps from all ranks and yields their captures.

Two steps are requested ahead. A step that any rank missed is dropped on all. A slow reader gets
the newest frame: captures that training has long passed are released unread. Steps are requested of
a history: after a rollback they are repeated, and the stream continues with the repeated ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from paramd.errors import (
    AbortedError,
    ConflictError,
    DeadlineError,
    ExhaustedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd.layout.select import NameIndex, Pattern
from paramd.memory.control_page import Rewind
from paramd.mesh.peers.control import JobDocument
from paramd.mesh.peers.grpc import LeaseEndedError, all_ended
from paramd.mesh.peers.sidecars import Pinned, RankPin, Sidecars, out_of_lockstep
from paramd.mesh.reading.stream import Reading, Transport
from paramd.state import At, StateName
from paramd.v1 import sidecar_pb2

if TYPE_CHECKING:
    import torch

log = logging.getLogger("paramd")

AHEAD = 2
"""Steps requested ahead; sidecars have as many slots."""

OUTAGE_S = 20.0
"""How long, in seconds, a rank may be unreachable before the stream raises its error."""

UNSERVED_LOOK_S = 5.0
"""Seconds between two looks, while no frame comes, at whether ranks serve their parameters."""

_FRESH_S = 0.25
"""Captures younger than this are read without checking how far training is."""

_ANSWER_S = 0.01
"""Assumed latency of a request: a requested step must be at least this far ahead."""

MOST_FURTHER_S = 2.0
"""Most seconds of training that requests are made further ahead because earlier ones were late."""

KEPT = 0.9
"""Part of that distance, in steps, that is kept after a frame: it shrinks when load has passed."""

_STATE_TIMEOUT_S = 3.0
_STEP_TIMEOUT_S = 480.0
_PAUSE_S = 0.05


class TrainingEndedError(ParamdError):
    """The training detached cleanly; there are no more steps."""


class StreamOverError(Exception):
    """There are no more frames; iteration ends without an error."""


Held = TypeVar("Held")
Result = TypeVar("Result")
Answer = TypeVar("Answer")


class ReachLike(Protocol):
    """The part of `SidecarFinder` that streams use; see there."""

    @property
    def document(self) -> JobDocument: ...

    async def refresh(self) -> JobDocument: ...

    async def sidecars(self) -> Sidecars: ...

    async def index(self, sidecars: Sidecars) -> NameIndex: ...

    def costs(self) -> dict[int, float]: ...

    async def attempts(
        self, attempt: Callable[[Sidecars], Awaitable[Answer]], deadline_s: float
    ) -> Answer: ...


class Steps(Protocol[Held]):
    """The pins of a stream at each step."""

    ranks: tuple[int, ...]
    """Ranks that are pinned; the first one also reports how far training is."""

    async def hold(self, sidecars: Sidecars, at: At, timeout_s: float) -> Held:
        """Pin one upcoming step on all ranks, or on none.

        Raises:
            AbortedError: If a rank missed it.
            TrainingEndedError: If there are no more steps.
        """

    def release(self, held: Held) -> None:
        """Release what `hold` pinned; never waits."""


@dataclass(eq=False, slots=True)
class _Ask(Generic[Held]):
    at: At
    task: asyncio.Task[Held]
    further: float
    """Steps by which it was made further ahead."""
    done_s: float = field(default=0.0)


class StepStream(Generic[Held, Result]):
    """One subscription. Use from one task at a time."""

    def __init__(
        self,
        reach: ReachLike,
        steps: Steps[Held],
        read: Callable[[Sidecars, At, int, Held], Awaitable[Result | None]],
        *,
        every: int,
        keep_all: bool = False,
        parameters: bool = False,
    ) -> None:
        """`read` makes a frame of (sidecars, at, dropped, held); None drops the step. Steps are
        multiples of `every`. `keep_all`: outdated captures, too, for readers that want every frame.
        `parameters`: frames need ranks that serve their parameters.
        """
        self._reach = reach
        self._steps = steps
        self._read = read
        self._every = every
        self._keep_all = keep_all
        self._parameters = parameters
        self._look_at_s = time.monotonic() + UNSERVED_LOOK_S
        self._unserved_since_s: float | None = None
        self._frame_s = time.monotonic()
        """When the last frame came."""
        self._told_quiet = False
        self._identity = (reach.document.incarnation, reach.document.layout_digest)
        self._asks: deque[_Ask[Held]] = deque()
        self._next = 0
        """Next step to request; 0 to ask a sidecar how far training is."""
        self._asked = 0
        """Last requested step."""
        self._further = 0.0
        """Steps by which requests are made further ahead: twice as many after each that was late,
        as on a busy host, where each request takes as long as several steps."""
        self._last = At(0, 0)
        """Step of the last frame returned."""
        self._history = 0
        """The history that steps are requested of."""
        self._rewinds: dict[int, Rewind] = {}
        """The rollbacks known, by the history that each began."""
        self._down_since_s: float | None = None
        self._over = False

    async def next(self) -> Result:
        """The next frame.

        Raises:
            StreamOverError: If the training has detached or the stream was closed.
            ConflictError: For a new run, a trainer that ended or a torn rank.
            UnreachableError: If a rank did not respond for `OUTAGE_S`.
        """
        while not self._over:
            await self._ask_ahead()
            ask = self._asks[0]
            await self._ended(ask)
            if self._over:
                break
            if not (await self._usable(ask) and ask in self._asks):
                continue  # or it was dropped meanwhile
            self._asks.popleft()
            held = ask.task.result()
            try:
                sidecars = await self._reach.sidecars()
                found = await self._read(sidecars, ask.at, self._dropped(ask.at), held)
            except (NotFoundError, UnreachableError) as error:
                if isinstance(error, LeaseEndedError):
                    CAPTURE_LEASE.ended()
                await self._after(error)
                continue
            finally:
                self._steps.release(held)
            if found is not None:
                self._last, self._further = ask.at, KEPT * self._further
                self._down_since_s = self._unserved_since_s = None
                self._frame_s, self._told_quiet = time.monotonic(), False
                self._look_at_s = self._frame_s + UNSERVED_LOOK_S
                return found
        raise StreamOverError

    async def _ended(self, ask: _Ask[Held]) -> None:
        """Wait for a request's end. Raises ConflictError if parameters are needed, and a rank does
        not serve them for `OUTAGE_S`: there will be no frame."""
        ended = False
        while not ended:
            left_s = max(self._look_at_s - time.monotonic(), 0.0)
            timeout_s = left_s if self._parameters else None
            ended = bool((await asyncio.wait({ask.task}, timeout=timeout_s))[0])
            # Also after a request that failed: the next one may fail in the same way.
            if self._parameters and time.monotonic() >= self._look_at_s:
                await self._look()

    async def _look(self) -> None:
        why, now_s = await self._unserved(), time.monotonic()
        self._look_at_s = now_s + UNSERVED_LOOK_S
        if not why:
            self._unserved_since_s = None
        elif self._unserved_since_s is None:
            self._unserved_since_s = now_s
            log.warning("paramd: no frame comes: %s", why)
        elif now_s - self._unserved_since_s >= OUTAGE_S:
            raise ConflictError(why)

    async def _unserved(self) -> str:
        """Why a rank does not serve its parameters, as a read says it; empty: all that answer do.
        Other weights that stand in for a while are no reason."""
        sidecars = await self._reach.sidecars()
        for rank in self._steps.ranks:
            with suppress(ParamdError):
                found = await sidecars.state(rank, _STATE_TIMEOUT_S)
                if found.state.unserved_reason and not found.header.label:
                    reason = found.state.unserved_reason
                    return f"rank {rank}: the parameters cannot be served: {reason}"
        return ""

    async def frames(self) -> AsyncGenerator[Result, None]:
        """All frames until the stream is over; closes it at the end. Raises as `next`."""
        try:
            while True:
                yield await self.next()
        except StreamOverError:
            return
        finally:
            await self.close()

    async def close(self) -> None:
        """Cancel requests and release captures. Idempotent."""
        self._over = True
        await self._drop_asks()

    def _dropped(self, at: At) -> int:
        return missed(self._last, at, self._rewinds, self._every) if self._last.step else 0

    async def _ask_ahead(self) -> None:
        while len(self._asks) < AHEAD:
            # While requests are late, the step after the last one may be past, too.
            if not self._next or self._further >= 1:
                self._next = await self._first_step(further=True)
            sidecars = await self._reach.sidecars()
            step, self._asked, self._next = self._next, self._next, self._next + self._every
            at = At(self._history, step)
            task = asyncio.create_task(self._steps.hold(sidecars, at, _STEP_TIMEOUT_S))
            ask = _Ask(at, task, self._further)
            task.add_done_callback(partial(_note_time, ask))
            self._asks.append(ask)

    async def _first_step(self, *, further: bool = False) -> int:
        """The next multiple of `every` that can still be requested in time; `further`: also while
        requests are late."""
        while True:
            try:
                sidecars = await self._reach.sidecars()
                self._check_identity()
                found = await sidecars.state(self._steps.ranks[0], _STATE_TIMEOUT_S)
                break
            except (UnreachableError, DeadlineError) as error:
                await self._after(error)
        if found.header.history != self._history:
            # Steps come again, from the one that the training was put back to.
            self._history, self._asked = found.header.history, 0
            self._rewinds |= {
                one.history: Rewind(one.history, one.from_step, one.to_step)
                for one in found.state.rewinds
            }
        step_s = found.state.step_time_ns / 1e9
        lead = 1 + int(_ANSWER_S / step_s) if step_s > 0 else 1
        if further:
            self._further = min(self._further, MOST_FURTHER_S / step_s if step_s > 0 else 1.0)
            lead += int(self._further)
        earliest = max(found.header.step + 1 + lead, self._asked + 1)
        return -(-earliest // self._every) * self._every

    async def _usable(self, ask: _Ask[Held]) -> bool:
        """Whether a finished request should be read; otherwise it is dropped."""
        error = ask.task.exception() if not ask.task.cancelled() else None
        if ask.task.cancelled() or error is not None:
            self._asks.popleft()
            # Once for requests that were made together.
            if isinstance(error, AbortedError) and ask.further >= self._further:
                self._further = max(1.0, 2 * ask.further)
            if error is not None:
                await self._after(error)
            return False
        if self._keep_all or time.monotonic() - ask.done_s < _FRESH_S:
            return True
        try:
            step = await self._first_step()
        except ParamdError:
            return True
        if ask.at.history == self._history and step - ask.at.step <= 2 * self._every + 1:
            return True
        # The reader fell behind: drop outdated captures and request current steps.
        await self._drop_asks()
        self._next = step
        return False

    async def _after(self, error: BaseException) -> None:
        """Recover from a failed request or read; raise if the stream cannot continue."""
        if isinstance(error, TrainingEndedError):
            await self.close()
            raise StreamOverError
        if isinstance(error, AbortedError | ExhaustedError | NotFoundError | DeadlineError):
            if isinstance(error, ExhaustedError):
                await asyncio.sleep(_PAUSE_S)
            if not self._told_quiet and time.monotonic() - self._frame_s > UNSERVED_LOOK_S:
                # Once until a frame comes: the next request may succeed, or none ever.
                self._told_quiet = True
                log.warning("paramd: no frame comes: %s", error)
            self._next = 0
            return
        if not isinstance(error, UnreachableError):
            await self._tell_new_incarnation()
            raise error
        now_s = time.monotonic()
        if self._down_since_s is None:
            self._down_since_s = now_s
        if now_s - self._down_since_s > OUTAGE_S:
            raise error
        await self._drop_asks()
        self._next = 0
        await asyncio.sleep(_PAUSE_S)
        await self._tell_new_incarnation()
        if self._reach.document.state == "ended":
            # The sidecars left before one of them could say so.
            await self.close()
            raise StreamOverError

    async def _tell_new_incarnation(self) -> None:
        try:
            await self._reach.refresh()
        except ParamdError:
            return  # the sidecar's error says more
        self._check_identity()

    def _check_identity(self) -> None:
        document = self._reach.document
        incarnation, digest = self._identity
        if document.incarnation != incarnation:
            raise ConflictError(
                f"run {incarnation} has ended, the job is in run "
                f"{document.incarnation}; subscribe again"
            )
        # Empty while a rank is away; that is not a change.
        if digest and document.layout_digest not in ("", digest):
            raise ConflictError(
                f"the layout of run {incarnation} is not the one subscribed to; subscribe again"
            )
        self._identity = (incarnation, document.layout_digest or digest)

    async def _drop_asks(self) -> None:
        asks, self._asks = list(self._asks), deque()
        for ask in asks:
            ask.task.cancel()
        if asks:
            await asyncio.wait([ask.task for ask in asks])
        for ask in asks:
            # Cancelled too late: it has leases that nothing else would release.
            if not ask.task.cancelled() and ask.task.exception() is None:
                self._steps.release(ask.task.result())


def missed(last: At, at: At, rewinds: Mapping[int, Rewind], every: int) -> int:
    """Frames between two, in all histories: steps that come again count again. Of a rollback that
    is not known (an earlier one than the last 16), the steps before it cannot be counted."""
    count, begin = 0, last.step
    for history in range(last.history + 1, at.history + 1):
        rewind = rewinds.get(history)
        if rewind is None:
            begin = at.step
            continue
        count += max(0, rewind.from_step // every - begin // every)
        begin = rewind.to_step
    return count + max(0, (at.step - 1) // every - begin // every)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRequest:
    """Arguments of every subscription."""

    patterns: tuple[Pattern, ...]
    every: int = 1
    """Frames are of updates whose number is a multiple of this; 1 or more."""
    dtype: torch.dtype | None = None
    """Dtype of the tensors; None keeps each parameter's own."""
    transport: Transport = "auto"

    def __post_init__(self) -> None:
        if not self.patterns:
            raise UsageError("no pattern was given; expected at least one, '*' means all")
        if self.every < 1:
            raise UsageError(f"every: {self.every}; expected 1 or more")


@asynccontextmanager
async def frames_of(
    stream: StepStream[Any, Result], open_streams: set[StepStream[Any, Any]]
) -> AsyncIterator[AsyncGenerator[Result, None]]:
    """The frames of a stream; it is in `open_streams` for the block, then closed."""
    open_streams.add(stream)
    try:
        async with aclosing(stream.frames()) as frames:
            yield frames
    finally:
        open_streams.discard(stream)


def _note_time(ask: _Ask[Held], _task: asyncio.Task[Held]) -> None:
    ask.done_s = time.monotonic()


CAPTURE_LEASE_S, MOST_CAPTURE_LEASE_S = 0.9, 10.0
"""Longest time that a killed reader keeps memory: usually, and on a host that is starved."""

RENEWALS = 3
"""Renewals within one lease."""


class CaptureLease:
    """How long this process leases captures. Any thread.

    Where every process waits for a core, a lease of `CAPTURE_LEASE_S` ends before it is renewed,
    again and again. So leases are as long as `RENEWALS` renewals have lately taken.
    """

    def __init__(self) -> None:
        self.seconds = CAPTURE_LEASE_S

    def renewed(self, took_s: float) -> None:
        """A renewal has come `took_s` after the one before it."""
        wanted_s = max(RENEWALS * took_s, KEPT * self.seconds, CAPTURE_LEASE_S)
        self.seconds = min(wanted_s, MOST_CAPTURE_LEASE_S)

    def ended(self) -> None:
        """A lease has ended before it was renewed."""
        self.seconds = min(2 * self.seconds, MOST_CAPTURE_LEASE_S)


CAPTURE_LEASE = CaptureLease()

HOLD_S = 10.0
"""How long, in seconds, a capture is kept for its reader."""

READ_S = 60.0
"""Time limit for reading one frame."""


class PinnedStep:
    """Snapshots of all ranks at one step; leases are renewed until `release`, or `hold_s`."""

    def __init__(
        self,
        sidecars: Sidecars,
        state: StateName,
        answers: Mapping[int, Any],
        pins: Mapping[int, RankPin],
        hold_s: float = HOLD_S,
    ) -> None:
        self._hold_s = hold_s
        self.state = state
        """The state of all ranks."""
        self.answers: Mapping[int, sidecar_pb2.PinSnapshotResponse] = answers
        self.pins = pins
        self.sidecars = sidecars
        self._renewing = (
            asyncio.create_task(self._renew(), name="paramd-step-leases") if pins else None
        )

    @property
    def pinned(self) -> Pinned:
        return Pinned(self.state, self.pins)

    def reading(self, transport: Transport = "auto") -> Reading:
        """A read of the pins, within `READ_S` from now, for which they are kept."""
        self._hold_s = max(self._hold_s, READ_S)
        return Reading(self.sidecars, self.pinned, time.monotonic() + READ_S, transport)

    def release(self) -> None:
        """End the leases; never waits. Idempotent."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
            for pin in self.pins.values():
                self.sidecars.release(pin)

    async def _renew(self) -> None:
        lease_s = CAPTURE_LEASE.seconds
        while self._hold_s > 0:
            began_s = time.monotonic()
            await asyncio.sleep(lease_s / RENEWALS)
            self._hold_s -= lease_s / RENEWALS
            lease_s = CAPTURE_LEASE.seconds
            # A failed renewal surfaces as NOT_FOUND at the next read.
            await asyncio.gather(
                *(self.sidecars.renew(pin, lease_s) for pin in self.pins.values()),
                return_exceptions=True,
            )
            CAPTURE_LEASE.renewed(time.monotonic() - began_s)


async def hold_step(
    sidecars: Sidecars,
    templates: Mapping[int, sidecar_pb2.PinSnapshotRequest],
    at: At,
    timeout_s: float,
    *,
    hold_s: float = HOLD_S,
) -> PinnedStep:
    """Pin a step on the ranks of `templates`, requests without a step, or on none.

    The responses must name one state: an edit between two updates changes parameters but not the
    step, and one rank may have copied before the edit, another after it.

    Raises:
        AbortedError: If a rank missed the step or has it with other edits.
        TrainingEndedError: If there are no more steps, else as `Sidecars.pin_step`.
    """

    async def pin(rank: int) -> sidecar_pb2.PinSnapshotResponse:
        request = sidecar_pb2.PinSnapshotRequest()
        request.CopyFrom(templates[rank])
        request.at_step, request.at_history = at.step, at.history
        request.lease_ms = round(1000 * CAPTURE_LEASE.seconds)
        return await sidecars.pin_step(rank, request, timeout_s)

    found = await all_ended(map(pin, templates), partial(_release, sidecars))
    answers = dict(zip(templates, found, strict=True))
    try:
        state = _check(sidecars, answers, at)
    except ParamdError:
        for answer in found:
            _release(sidecars, answer)
        raise
    pins = {
        rank: RankPin.of(rank, answer) for rank, answer in answers.items() if answer.snapshot_id
    }
    return PinnedStep(sidecars, state, answers, pins, hold_s)


def _check(
    sidecars: Sidecars, answers: Mapping[int, sidecar_pb2.PinSnapshotResponse], at: At
) -> StateName:
    """The state, equal in all responses. Raises as `hold_step`."""
    if any(answer.ended for answer in answers.values()):
        raise TrainingEndedError("the training has detached")
    headers = [answer.header for answer in answers.values()]
    said = {StateName.of(header) for header in headers}
    wanted = StateName(sidecars.document.incarnation, at.history, at.step, headers[0].edits)
    # Nobody asks for a step as it rests, nor for weights that replace the training's.
    if said != {wanted} or any(header.unsettled for header in headers):
        raise AbortedError(
            f"requested {wanted} of run {wanted.incarnation}, but the ranks have "
            + ", ".join(f"{one} of run {one.incarnation}" for one in sorted(said))
        )
    if len({header.iteration for header in headers}) > 1:
        raise out_of_lockstep(at.step, {header.rank: header.iteration for header in headers})
    return wanted


def _release(sidecars: Sidecars, answer: sidecar_pb2.PinSnapshotResponse) -> None:
    if answer.snapshot_id:
        sidecars.release(RankPin.of(answer.header.rank, answer))
