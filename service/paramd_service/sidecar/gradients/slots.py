"""Gradient slots of one incarnation: the update of each slot, and its outcome.

Life of a frame, which is all requests of one update:

    QUEUED --a slot is free--> RESERVING --> ARMED --the trainer filled it--> SERVING --> over
      |                            |           |--- left out, or begun before --> over
      +------ begun already -------+-----------+

All decisions are made on the event loop. A slot's bytes are taken (copied into snapshots, or
reduced) on one low-priority thread while the other slot is armed for a later update. A trainer that
finds no slot armed continues, and the frame does not exist.

A frame is of an update of one history: after a rollback updates repeat, and frames requested before
it are over. The contents of a slot are proven by the update in its DONE word and by the program in
its notes: a version that no other program of the incarnation had, and the digest of the request.
Memory is released when there are no requests, and new ones wait for the end of the release: the
order follows from awaited work, never from what happens to be queued.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from paramd.errors import AbortedError, ConflictError, ExhaustedError, ParamdError
from paramd.memory.control_page import Word, history_of, in_time, step_of, unserved_reason
from paramd.memory.gradient_program import (
    MAX_SPANS,
    NoFrame,
    Notes,
    Slot,
    covers,
    digest_of_spans,
    read_no_frame,
    united,
)
from paramd.memory.handover import GRADIENT_SLOTS
from paramd.memory.left import HEADROOM, Room
from paramd_service.aio import post, uncancelled
from paramd_service.sidecar.gradients.memory import SlotMemory, Spans
from paramd_service.sidecar.owner import AttachedMemory

LOSSLESS_S = 0.9
"""How long a lossless reader counts as present after its last request."""
Work = Callable[[SlotMemory, int], Any]
"""Reads a slot's room, given its index, on the gradient thread."""


class State(Enum):
    """State of a frame; see the module docstring."""

    QUEUED = "waiting for a slot"
    RESERVING = "populating its memory"
    ARMED = "waiting for its update"
    SERVING = "being read from its slot"


@dataclass(eq=False, slots=True)
class Want:
    """One request for gradients."""

    spans: Spans
    work: Work
    done: asyncio.Future[tuple[Any, Notes]]

    def refuse(self, error: Exception) -> None:
        """Fail the request, unless it is done already."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # retrieved, or asyncio logs it if no caller is left


@dataclass(eq=False, slots=True)
class Frame:
    """All requests of one update."""

    moment: int
    """The update, in `in_time`'s order."""
    state: State = State.QUEUED
    wants: list[Want] = field(default_factory=list)
    slot: int = -1
    programs: dict[int, Spans] = field(default_factory=dict)
    """Programs by version: the trainer reports which one it served."""

    @property
    def step(self) -> int:
        """Number of the update."""
        return step_of(self.moment)

    def served(self, notes: Notes) -> Spans:
        """The spans that the trainer put into the slot for this frame; none if not for this one."""
        spans = self.programs.get(notes.version, ())
        same = notes.step == self.step and notes.digest == digest_of_spans(spans)
        return spans if same else ()

    def spans(self) -> Spans:
        return united([span for want in self.wants for span in want.spans])

    def program(self) -> Spans:
        return self.programs[max(self.programs)] if self.programs else ()


class LosslessReaders:
    """Publishes which updates lossless readers must not miss, for the trainer."""

    def __init__(self, words: memoryview[int]) -> None:
        """`words`: the control page's."""
        self._words = words
        self._until_s: dict[int, float] = {}

    def update(self, every: int) -> None:
        """Note a reader of all multiples of `every`; 0: a reader that may miss frames."""
        if every <= 0:
            return
        now_s = time.monotonic()
        self._until_s[every] = now_s + LOSSLESS_S
        self._until_s = {n: until_s for n, until_s in self._until_s.items() if until_s > now_s}
        self._words[Word.LOSSLESS_UNTIL_NS] = int(max(self._until_s.values()) * 1e9)
        # The smallest wins; readers of other multiples are not waited for.
        self._words[Word.LOSSLESS_EVERY] = min(self._until_s)


MAX_ASKS = 1024
"""Most pending requests; each is small, but not free."""
AGAIN_S = 1.0
"""Seconds until idle memory, which the trainer may still have been filling, is tried again."""
LOOK_S = 0.1
"""Polling interval while a request waits and no wake comes."""

_NICENESS = 5

NEVER = 3
"""Frames in a row that a rank leaves out for the same lasting reason before its readers get that
reason as their error."""

_LEFT_OUT = {
    NoFrame.LATE: "was requested too late",
    NoFrame.SKIPPED: "was skipped by a gradient scaler (its gradients are not finite)",
    NoFrame.IN_BACKWARD: "was made within the backward",
    NoFrame.TOO_MANY: "has too many tensors without a plain gradient",
    NoFrame.FAILED: "could not be captured; the trainer's log says why",
}

_NEVER = {
    NoFrame.IN_BACKWARD: "updates of this training have no gradient frame: its optimizers step "
    "within the backward, which frees each gradient before others exist; read parameters "
    "(follow, updates), or step the optimizer after the backward",
    NoFrame.TOO_MANY: "updates of this training have no gradient frame of that many tensors: too "
    "many have no gradient, or a sum of several ranks; request fewer at once",
    NoFrame.FAILED: "gradients of this rank cannot be captured; the trainer's log says why",
}
"""The reasons that last."""


class EndedError(ParamdError):
    """The training has detached: no further step will come."""


class Gradients:
    """Frames of one attachment. All methods run on the event loop's thread."""

    def __init__(
        self,
        attached: AttachedMemory,
        *,
        executor: Executor,
        idle_memory_s: float,
        room: Room = HEADROOM,
    ) -> None:
        """`room` grants the memory of the slots."""
        self._page, self._words = attached.page, attached.page.words
        self._executor = executor
        self._idle_s = idle_memory_s
        self._loop = asyncio.get_running_loop()
        arena_bytes = attached.request.arena_bytes
        self._memory = SlotMemory(attached.shared.gradients, arena_bytes, self._words, room)
        self._filled_until: list[tuple[int, int] | None] = [None] * GRADIENT_SLOTS
        """By slot: the last update and the rollbacks when it was disarmed without being filled. As
        long as they are the same, the trainer may be filling it."""
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="paramd-gradients", initializer=_be_nice
        )
        self._frames: dict[int, Frame] = {}
        """By moment."""
        self._releasing: Future[None] | None = None
        """Releases memory; arming cancels the release, or waits for it."""
        self._in_slot: list[Frame | None] = [None] * GRADIENT_SLOTS
        self._reserving = [0] * GRADIENT_SLOTS
        """By slot: how many reservations of its memory are running."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._forget_earlier()
        self.lossless = LosslessReaders(self._words)
        self._why_over: ParamdError | None = None
        self.captured_count = 0
        """Frames captured in a slot."""
        self._left_out: tuple[NoFrame, int] = NoFrame.LATE, 0
        """Why the last frames were left out, and how many in a row."""

    def _forget_earlier(self) -> None:
        """Take back what an earlier sidecar has asked the trainer for, and free its memory soon."""
        # Its requests have died with it.
        for word in (Word.ARM_SLOT0, Word.ARM_SLOT1, Word.LOSSLESS_EVERY):
            self._words[word] = 0
        if self._memory.inherited:
            self._filled_until = [self._now()] * GRADIENT_SLOTS
            self._idle_timer = self._loop.call_later(AGAIN_S, self._idle)

    @property
    def history(self) -> int:
        """The present history: rollbacks in this incarnation."""
        return self._words[Word.REWOUND]

    async def capture(self, history: int, step: int, spans: Spans, work: Work) -> tuple[Any, Notes]:
        """Run `work` on the gradients that update `step` consumes; return its result and notes.

        Cancellation withdraws the request, but waits for a `work` in progress.

        Raises:
            AbortedError: The update has begun already, or left its gradients out; or the
                training was rolled back, so that the update is no longer of `history`.
            ExhaustedError: No memory, too many spans, or too many requests.
            EndedError: The training has detached.
            ConflictError: It has ended, or the updates of this training have no frames.
        """
        self._check(history, step, spans)
        want = Want(spans, work, self._loop.create_future())
        moment = in_time(step, rewound=history)
        frame = self._frames.setdefault(moment, Frame(moment))
        frame.wants.append(want)
        if frame.state is State.ARMED and not covers(united(frame.program()), spans):
            self._start(frame, self._arm(frame))
        self._look()
        try:
            return await asyncio.shield(want.done)
        except asyncio.CancelledError:
            # `work` uses the slot and the caller's memory until it ends, however often cancelled.
            if frame.state is State.SERVING and not want.done.done():
                with suppress(asyncio.CancelledError, Exception):
                    await uncancelled(want.done)
            self._withdraw(frame, want)
            raise

    def woken(self) -> None:
        """Handle a wake by the trainer. Any thread may call; cheap if nothing is armed."""
        if any(self._in_slot):
            post(self._loop, self._look)

    def end(self, why: ParamdError) -> None:
        """Fail present and future requests with `why`: no further update will come."""
        self._why_over = why
        for frame in list(self._frames.values()):
            if frame.state is not State.SERVING:
                self._fail(frame, why)

    async def close(self) -> None:
        """End everything and release the memory."""
        self.end(self._why_over if self._why_over is not None else EndedError("the run is over"))
        if self._tasks:
            await asyncio.wait(self._tasks)
        for timer in (self._timer, self._idle_timer):  # which those set again
            if timer is not None:
                timer.cancel()
        await self._not_releasing()
        await self._loop.run_in_executor(self._executor, self._thread.shutdown)
        await self._loop.run_in_executor(self._executor, self._memory.close)

    def _check(self, history: int, step: int, spans: Spans) -> None:
        if self._why_over is not None:
            raise self._why_over
        if history != self.history:
            raise rolled_back(step)
        if self._begun(step):
            raise self._passed(step)
        if len(spans) > MAX_SPANS:
            raise ExhaustedError(
                f"{len(spans):,} separate spans of gradients; expected at most {MAX_SPANS:,}, "
                "request whole tensors or fewer of them"
            )
        if sum(len(frame.wants) for frame in self._frames.values()) >= MAX_ASKS:
            raise ExhaustedError(f"{MAX_ASKS} requests already wait for gradients; end some")

    def _begun(self, step: int) -> bool:
        """Whether update `step` has begun, which is too late to capture it."""
        return max(self._words[Word.GRADIENTS_STEP], self._words[Word.STEP]) >= step

    def _passed(self, step: int) -> AbortedError:
        return AbortedError(
            f"update {step} has begun, so its gradients are gone; the rank has finished "
            f"{self._words[Word.STEP]} updates, request a later one"
        )

    def _look(self) -> None:
        """Act on the words; called on every wake, every request and every `LOOK_S`."""
        history = self.history
        for frame in sorted(self._frames.values(), key=lambda frame: frame.moment):
            if frame.state is not State.SERVING and frame.moment < in_time(0, rewound=history):
                self._fail(frame, rolled_back(frame.step))
            elif frame.state is State.ARMED:
                self._look_at(frame)
            elif frame.state is State.QUEUED and self._begun(frame.step):
                self._fail(frame, self._passed(frame.step))
        for frame in sorted(self._frames.values(), key=lambda frame: frame.moment):
            if frame.state is State.QUEUED and None in self._in_slot:
                frame.slot = self._in_slot.index(None)
                self._in_slot[frame.slot] = frame
                frame.state = State.RESERVING
                self._start(frame, self._arm(frame))
        self._look_again()

    def _look_at(self, frame: Frame) -> None:
        # In this order: the trainer writes the DONE word before the update counts as begun. Reading
        # DONE first, a frame served in between would seem missed.
        begun = self._begun(frame.step)
        slot = self._memory.slots[frame.slot]
        done = self._words[slot.done_word]
        if done == frame.moment:
            self.captured_count += 1
            self._left_out = NoFrame.LATE, 0
            frame.state = State.SERVING
            self._start(frame, self._serve(frame, slot))
        elif done == -frame.moment:
            self._fail(frame, self._why_empty(frame))
        elif begun:
            self._fail(frame, self._passed(frame.step))

    def _why_empty(self, frame: Frame) -> ParamdError:
        """The error of a frame that the trainer left out; ConflictError if it will leave out all
        others like it."""
        reason = read_no_frame(self._words, frame.slot)
        before, count = self._left_out
        # Of one that came too late nothing is known.
        if reason is not NoFrame.LATE:
            self._left_out = reason, count + 1 if reason is before else 1
        if reason in _NEVER and self._left_out[1] >= NEVER:
            unserved = unserved_reason(self._page) if reason is NoFrame.FAILED else ""
            return ConflictError(_NEVER[reason] + (f" ({unserved})" if unserved else ""))
        return AbortedError(f"update {frame.step} has no gradient frame: it {_LEFT_OUT[reason]}")

    def _look_again(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._frames:
            self._timer = self._loop.call_later(LOOK_S, self._look)
            if self._idle_timer is not None:
                self._idle_timer.cancel()
                self._idle_timer = None
        elif self._idle_timer is None and self._memory.reserved:
            self._idle_timer = self._loop.call_later(self._idle_s, self._idle)

    @property
    def idle_bytes(self) -> int:
        """Bytes of slots that no frame needs."""
        return self._memory.held_bytes(self._free_rooms())

    def take_idle(self) -> list[Callable[[], object]]:
        """Take away the memory of slots that no frame needs; return what releases it, on any
        thread. Arming waits for it, or cancels it if it has not begun."""
        rooms = self._free_rooms()
        over = self._releasing is None or self._releasing.done()
        if not over or not self._memory.held_bytes(rooms):
            return []
        self._releasing = released = Future[None]()

        def release() -> None:
            if released.set_running_or_notify_cancel():
                try:
                    self._memory.release(rooms)
                finally:
                    released.set_result(None)

        return [release]

    def _idle(self) -> None:
        self._idle_timer = None
        if self._frames:
            return
        for release in self.take_idle():
            self._executor.submit(release)
        if self._memory.reserved and len(self._free_rooms()) < GRADIENT_SLOTS:
            self._idle_timer = self._loop.call_later(AGAIN_S, self._idle)

    def _now(self) -> tuple[int, int]:
        """The last update before which the trainer looked for armed slots, and the rollbacks."""
        return self._words[Word.GRADIENTS_STEP], self._words[Word.REWOUND]

    def _free_rooms(self) -> list[int]:
        """Slots that no frame has, and that neither this process nor the trainer fills with pages.

        The trainer would fill pages that were just released: memory that nobody asked for, and that
        may not be there.
        """
        for index, until in enumerate(self._filled_until):
            if until is not None and (until != self._now() or self._why_over is not None):
                self._filled_until[index] = None
        return [
            index
            for index, frame in enumerate(self._in_slot)
            if frame is None and self._filled_until[index] is None and not self._reserving[index]
        ]

    async def _not_releasing(self) -> None:
        """Cancel a release of memory that has not begun, or wait for its end."""
        while (releasing := self._releasing) is not None:
            if not releasing.cancel():
                await asyncio.wait([asyncio.wrap_future(releasing)])
            if self._releasing is releasing:
                self._releasing = None

    async def _arm(self, frame: Frame) -> None:
        """Populate the slot for all requests, write the program, and arm the slot."""
        slot, index = self._memory.slots[frame.slot], frame.slot
        await self._not_releasing()
        # Repeated: more may be requested while memory is being populated.
        while frame.wants and frame.state in (State.RESERVING, State.ARMED):
            spans = frame.spans()
            if covers(frame.program(), spans):
                break
            try:
                if len(spans) > MAX_SPANS:
                    raise ExhaustedError(
                        f"more than {MAX_SPANS:,} spans are requested of one update"
                    )
                if not self._memory.holds(index, spans):
                    await self._reserve(index, spans)
            except ParamdError as error:
                if self._in_slot[index] is frame:
                    self._fail(frame, error)
                return
            # If the frame has ended meanwhile, its slot may belong to another one.
            if self._in_slot[index] is not frame:
                return
            frame.programs[self._memory.program(index, spans)] = spans
        if self._in_slot[index] is frame and frame.state is State.RESERVING:
            frame.state = State.ARMED
            # Last: the trainer reads the program once it finds its step here.
            self._words[slot.arm_word] = frame.moment
            self._look()

    async def _reserve(self, index: int, spans: Spans) -> None:
        # Counted: the frame may end meanwhile, and what is half there must not be released.
        self._reserving[index] += 1
        try:
            reserve = partial(self._memory.reserve, index, spans)
            await self._loop.run_in_executor(self._executor, reserve)
        finally:
            self._reserving[index] -= 1

    async def _serve(self, frame: Frame, slot: Slot) -> None:
        notes = replace(slot.read_notes(), history=history_of(frame.moment))
        served = frame.served(notes)
        # Searched each time: until the update has begun, a moment after its frame exists, more
        # requests may come.
        while want := next((some for some in frame.wants if not some.done.done()), None):
            # The trainer served an earlier program, before this request was added.
            if not covers(served, want.spans):
                want.refuse(self._passed(frame.step))
                continue
            try:
                result = await self._loop.run_in_executor(
                    self._thread, want.work, self._memory, frame.slot
                )
            except Exception as error:
                want.refuse(error)
            else:
                if not want.done.done():
                    want.done.set_result((result, notes))
        self._end(frame)
        self._look()

    def _fail(self, frame: Frame, error: ParamdError) -> None:
        for want in frame.wants:
            want.refuse(error)
        self._end(frame)

    def _withdraw(self, frame: Frame, want: Want) -> None:
        want.done.cancel()
        if want in frame.wants:
            frame.wants.remove(want)
        if not frame.wants and frame.state is not State.SERVING:
            self._end(frame)
            self._look()

    def _end(self, frame: Frame) -> None:
        if self._frames.get(frame.moment) is frame:
            del self._frames[frame.moment]
        if frame.slot >= 0 and self._in_slot[frame.slot] is frame:
            self._in_slot[frame.slot] = None
            word = self._memory.slots[frame.slot].arm_word
            if self._words[word] == frame.moment:
                self._words[word] = 0
                if frame.state is not State.SERVING and not self._begun(frame.step):
                    # In this order: an update that begins after this finds the slot disarmed.
                    self._filled_until[frame.slot] = self._now()

    def _start(self, frame: Frame, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._over, frame))

    def _over(self, frame: Frame, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # An internal error must not leave callers waiting.
            self._fail(frame, ParamdError(f"update {frame.step} could not be served: {error!r}"))


def rolled_back(step: int) -> AbortedError:
    """The error for requests of a history that a rollback has left."""
    return AbortedError(
        f"the training was rolled back before step {step} could be had; ask again for a step of "
        "its present history"
    )


def _be_nice() -> None:
    """Yield to training where cores are scarce."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
