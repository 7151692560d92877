"""Asks all ranks for the same later steps, a little ahead, and hands out what came of it.

Two steps are asked for ahead. A step counts when every rank has it; one that any rank
missed is dropped on all. A reader that is late is given the newest there is: what was
captured for it while it was busy elsewhere is let go of when training went on since.

Snapshots of one step on several ranks, kept for as long as a reader may come for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from paramd.errors import (
    AbortedError,
    ConflictError,
    DeadlineError,
    ExhaustedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
)
from paramd.layout.select import NameIndex
from paramd.mesh.peers.control import JobDocument
from paramd.mesh.peers.sidecars import RankPin, Sidecars, out_of_lockstep
from paramd.v1 import sidecar_pb2

AHEAD = 2
"""Steps asked for at once; sidecars have as many slots."""

OUTAGE_S = 20.0
"""How long a rank that does not answer is waited for before the stream ends with its error."""

_FRESH_S = 0.25
"""Younger frames are handed out without asking whether training went on."""

_ANSWER_S = 0.01
"""How long asking takes at most, usually: so much later must a step be that is asked for."""

_STATE_TIMEOUT_S = 3.0
_STEP_TIMEOUT_S = 480.0
_PAUSE_S = 0.05


class TrainingEndedError(ParamdError):
    """The training has detached in order: no step comes any more."""


class StreamOverError(Exception):
    """There are no more frames; whoever iterates ends quietly."""


Held = TypeVar("Held")
Result = TypeVar("Result")
Answer = TypeVar("Answer")


class ReachLike(Protocol):
    """What streams need to know of their job; see `reach.Reach`."""

    @property
    def document(self) -> JobDocument:
        """The job as last heard."""

    async def refresh(self) -> JobDocument:
        """The job, asked for again."""

    async def sidecars(self) -> Sidecars:
        """The sidecars as last heard."""

    async def index(self, sidecars: Sidecars) -> NameIndex:
        """Names and layout of the present incarnation."""

    def costs(self) -> dict[int, float]:
        """Costs that make others stand in for ranks that lately did not answer."""

    async def attempts(
        self, attempt: Callable[[Sidecars], Awaitable[Answer]], deadline_s: float
    ) -> Answer:
        """Runs `attempt`, and again when what it relied on proved stale."""


class Steps(Protocol[Held]):
    """What a stream is of."""

    ranks: tuple[int, ...]
    """Whom it asks; the first one is asked how far training is."""

    async def hold(self, sidecars: Sidecars, step: int, timeout_s: float) -> Held:
        """What all ranks have of one step, on all of them or on none.

        Raises:
            AbortedError: a rank missed it. TrainingEndedError: no step comes any more.
        """

    def release(self, held: Held) -> None:
        """Ends what `hold` began; never waits."""


@dataclass(eq=False, slots=True)
class _Ask(Generic[Held]):
    step: int
    task: asyncio.Task[Held]
    done_s: float = field(default=0.0)


class StepStream(Generic[Held, Result]):
    """One subscription. Use from one task at a time."""

    def __init__(
        self,
        reach: ReachLike,
        steps: Steps[Held],
        read: Callable[[Sidecars, int, int, Held], Awaitable[Result | None]],
        *,
        every: int,
        keep_all: bool = False,
    ) -> None:
        """
        Args:
            read: what to make of (sidecars, step, dropped, held); None when it came to nothing,
                which counts as dropped.
            every: updates between two frames; steps are its multiples.
            keep_all: hand out also what is old by now, for readers that want each frame.
        """
        self._reach = reach
        self._steps = steps
        self._read = read
        self._every = every
        self._keep_all = keep_all
        self._identity = (reach.document.incarnation, reach.document.layout_digest)
        self._asks: deque[_Ask[Held]] = deque()
        self._next = 0
        """Next step to ask for; 0 when that is to be found out."""
        self._asked = 0
        """Last step that was asked for."""
        self._last = 0
        """Step of the last frame that was handed out."""
        self._down_since_s: float | None = None
        self._over = False

    async def next(self) -> Result:
        """The next frame. A cancelled call loses none.

        Raises:
            StreamOverError: the training has detached, or the stream was closed.
            ConflictError: the job attached anew, a trainer ended, or a rank is torn.
            UnreachableError: a rank did not answer for `OUTAGE_S`.
        """
        while not self._over:
            await self._ask_ahead()
            ask = self._asks[0]
            await asyncio.wait({ask.task})
            if self._over:
                break
            if not await self._usable(ask):
                continue
            self._asks.popleft()
            held = ask.task.result()
            try:
                sidecars = await self._reach.sidecars()
                found = await self._read(sidecars, ask.step, self._dropped(ask.step), held)
            except (NotFoundError, UnreachableError) as error:
                await self._after(error)
                continue
            finally:
                self._steps.release(held)
            if found is not None:
                self._last = ask.step
                self._down_since_s = None
                return found
        raise StreamOverError

    async def frames(self) -> AsyncGenerator[Result, None]:
        """Frame by frame until the stream is over; closes it at the end. Raises as `next`."""
        try:
            while True:
                yield await self.next()
        except StreamOverError:
            return
        finally:
            await self.close()

    async def close(self) -> None:
        """Lets go of everything. Idempotent."""
        self._over = True
        await self._drop_asks()

    def _dropped(self, step: int) -> int:
        return (step - self._last) // self._every - 1 if self._last else 0

    async def _ask_ahead(self) -> None:
        while len(self._asks) < AHEAD:
            if not self._next:
                self._next = await self._first_step()
            sidecars = await self._reach.sidecars()
            step, self._asked, self._next = self._next, self._next, self._next + self._every
            task = asyncio.create_task(self._steps.hold(sidecars, step, _STEP_TIMEOUT_S))
            ask = _Ask(step, task)
            task.add_done_callback(partial(_note_time, ask))
            self._asks.append(ask)

    async def _first_step(self) -> int:
        """The next multiple that can still be asked for in time."""
        while True:
            try:
                sidecars = await self._reach.sidecars()
                self._check_identity()
                found = await sidecars.state(self._steps.ranks[0], _STATE_TIMEOUT_S)
                break
            except (UnreachableError, DeadlineError) as error:
                await self._after(error)
        step_s = found.state.step_time_ns / 1e9
        lead = 1 + int(_ANSWER_S / step_s) if step_s > 0 else 1
        earliest = max(found.header.step + 1 + lead, self._asked + 1)
        return -(-earliest // self._every) * self._every

    async def _usable(self, ask: _Ask[Held]) -> bool:
        """Whether an ask that has ended came to something worth reading; else it is over."""
        error = ask.task.exception() if not ask.task.cancelled() else None
        if ask.task.cancelled() or error is not None:
            self._asks.popleft()
            if error is not None:
                await self._after(error)
            return False
        if self._keep_all or time.monotonic() - ask.done_s < _FRESH_S:
            return True
        try:
            step = await self._first_step()
        except ParamdError:
            return True
        if step - ask.step <= 2 * self._every + 1:
            return True
        # The reader was away: newer ones are to be had, and those that were held are old.
        await self._drop_asks()
        self._next = step
        return False

    async def _after(self, error: BaseException) -> None:
        """Learns from what failed; raises what ends the stream."""
        if isinstance(error, TrainingEndedError):
            await self.close()
            raise StreamOverError
        if isinstance(error, AbortedError | ExhaustedError | NotFoundError | DeadlineError):
            if isinstance(error, ExhaustedError):
                await asyncio.sleep(_PAUSE_S)
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

    async def _tell_new_incarnation(self) -> None:
        try:
            await self._reach.refresh()
        except ParamdError:
            return  # what the sidecar said tells more
        self._check_identity()

    def _check_identity(self) -> None:
        document = self._reach.document
        incarnation, digest = self._identity
        if document.incarnation != incarnation:
            raise ConflictError(
                f"the job attached anew: incarnation {incarnation} has ended, incarnation "
                f"{document.incarnation} goes on; "
                "subscribe again"
            )
        # Empty while a rank is away: then nothing is known of it, and nothing has changed.
        if digest and document.layout_digest not in ("", digest):
            raise ConflictError(
                f"the layout of incarnation {incarnation} is not the one subscribed to; "
                "subscribe again"
            )
        self._identity = (incarnation, document.layout_digest or digest)

    async def _drop_asks(self) -> None:
        asks, self._asks = list(self._asks), deque()
        for ask in asks:
            ask.task.cancel()
        if asks:
            await asyncio.wait([ask.task for ask in asks])
        for ask in asks:
            if not ask.task.cancelled() and ask.task.exception() is None:
                self._steps.release(ask.task.result())


@asynccontextmanager
async def frames_of(
    stream: StepStream[Any, Result], open_streams: set[StepStream[Any, Any]]
) -> AsyncIterator[AsyncGenerator[Result, None]]:
    """The frames of a stream, which stands among `open_streams` until the block ends it."""
    open_streams.add(stream)
    try:
        async with aclosing(stream.frames()) as frames:
            yield frames
    finally:
        open_streams.discard(stream)


def _note_time(ask: _Ask[Held], _task: asyncio.Task[Held]) -> None:
    ask.done_s = time.monotonic()


LEASE_S = 0.9
"""So long at most does a reader that was killed keep memory."""

HOLD_S = 10.0
"""How long what was asked for waits for its reader."""


class PinnedStep:
    """Answers of all ranks at one step, their leases renewed until `release`."""

    def __init__(
        self,
        sidecars: Sidecars,
        state: tuple[int, int],
        answers: Mapping[int, Any],
        pins: Mapping[int, RankPin],
    ) -> None:
        """`state` is the incarnation, and the edits that the bytes have in them (-1: gradients)."""
        self.incarnation, self.edits = state
        self.answers: Mapping[int, sidecar_pb2.PinSnapshotResponse] = answers
        self.pins = pins
        self._sidecars = sidecars
        self._renewing = (
            asyncio.create_task(self._renew(), name="paramd-step-leases") if pins else None
        )

    def release(self) -> None:
        """Ends the leases; never waits. Idempotent."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
            for pin in self.pins.values():
                self._sidecars.release(pin)

    async def _renew(self) -> None:
        for _ in range(int(HOLD_S / (LEASE_S / 3))):
            await asyncio.sleep(LEASE_S / 3)
            # A lease that could not be renewed shows as NOT_FOUND at the next read.
            await asyncio.gather(
                *(self._sidecars.renew(pin, LEASE_S) for pin in self.pins.values()),
                return_exceptions=True,
            )


async def hold_step(
    sidecars: Sidecars,
    requests: Mapping[int, sidecar_pb2.PinSnapshotRequest],
    step: int,
    timeout_s: float,
) -> PinnedStep:
    """Asks all ranks at once; all answers are of `step`, or nothing is held.

    An edit between two updates changes parameters but not the step, so answers must agree on
    their edits, too: one rank may have copied before it, another one after it.

    Raises:
        AbortedError: a rank missed the step, or has it with other edits.
        TrainingEndedError: no step comes any more.
        ParamdError: as `Sidecars.pin_step`.
    """
    tasks = {
        rank: asyncio.create_task(sidecars.pin_step(rank, request, timeout_s))
        for rank, request in requests.items()
    }
    try:
        await asyncio.gather(*tasks.values())
    except BaseException:
        for task in tasks.values():
            task.cancel()
        await asyncio.wait(tasks.values())
        for rank, task in tasks.items():
            if not task.cancelled() and task.exception() is None:
                _release(sidecars, rank, task.result())
        raise
    answers = {rank: task.result() for rank, task in tasks.items()}
    try:
        state = _check(sidecars, answers, step)
    except ParamdError:
        for rank, answer in answers.items():
            _release(sidecars, rank, answer)
        raise
    pins = {rank: _pin_of(rank, answer) for rank, answer in answers.items() if answer.snapshot_id}
    return PinnedStep(sidecars, state, answers, pins)


def _check(
    sidecars: Sidecars, answers: Mapping[int, sidecar_pb2.PinSnapshotResponse], step: int
) -> tuple[int, int]:
    """Incarnation and edits of all answers."""
    if any(answer.ended for answer in answers.values()):
        raise TrainingEndedError("the training has detached")
    headers = [answer.header for answer in answers.values()]
    said = {(header.incarnation, header.step, header.edits) for header in headers}
    incarnation, edits = sidecars.document.incarnation, headers[0].edits
    if said != {(incarnation, step, edits)}:
        raise AbortedError(
            f"asked for step {step} of incarnation {incarnation}, the ranks have (incarnation, "
            "step, edits) "
            f"{sorted(said)}"
        )
    if len({header.iteration for header in headers}) > 1:
        raise out_of_lockstep(step, {header.rank: header.iteration for header in headers})
    return incarnation, edits


def _release(sidecars: Sidecars, rank: int, answer: sidecar_pb2.PinSnapshotResponse) -> None:
    if answer.snapshot_id:
        sidecars.release(_pin_of(rank, answer))


def _pin_of(rank: int, answer: sidecar_pb2.PinSnapshotResponse) -> RankPin:
    return RankPin(
        rank=rank,
        snapshot_id=answer.snapshot_id,
        incarnation=answer.header.incarnation,
        step=answer.header.step,
        size_bytes=answer.size_bytes,
        lease_s=answer.lease_ms / 1000,
        edits=answer.header.edits,
    )
