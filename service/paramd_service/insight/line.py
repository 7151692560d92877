"""The line to the trainer: requests its stacks, receives the numbers that its script logs.

`Stacks` come from a thread in the trainer. If that does not answer within `ANSWER_S` although the
process runs, native code keeps the GIL; then the signal that the trainer registered has
`faulthandler` write them (client/paramd/trainer/helpers/insight.py). Nothing is requested more
often than once per `FRESH_S`, however many callers there are.

A trainer is examined on request, and every few seconds while it is overdue. Only repeated samples
show since when: a stack shows where a thread is, not for how long. A training on schedule is left
alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paramd import places
from paramd.errors import UsageError
from paramd.memory.control_page import Word
from paramd.memory.handover import MAX_MESSAGE_BYTES
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.aio import stopped
from paramd_service.insight.activity import Activity, Frame, activity_of, parse_faulthandler
from paramd_service.insight.process import TrainerOutput, catches
from paramd_service.sidecar.owner import AttachedMemory, process_state
from paramd_service.sidecar.phase import STOPPED_STATES

ANSWER_S = 2.0
"""The trainer's thread needs the GIL to answer; a running training gives it within 5 ms."""

DUMP_S = 1.0
FRESH_S = 0.1
"""Less than the time between two samples of whoever compares ranks: a stack that is given twice
counts twice, and ranks' stacks that are of different times seem to wait for each other."""
_POLL_S = 0.02
MAX_DUMP_BYTES = 1 << 20

MAX_KEPT = 10_000
"""Entries kept; the oldest are dropped first. One of five numbers takes about a kilobyte."""

MAX_NAMES = 64


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One call of `attachment.log`."""

    number: int
    """Counts entries of this sidecar from 1."""
    step: int
    time_s: float
    """Seconds since the Unix epoch, by the trainer's clock."""
    values: Mapping[str, float]


class LoggedNumbers:
    """Ring of entries."""

    def __init__(self) -> None:
        self._kept: deque[LogEntry] = deque(maxlen=MAX_KEPT)
        self.count = 0
        """Entries received so far."""

    def add(self, entries: Iterable[Any]) -> None:
        """Take [step, time_s, {name: value}] as the trainer sent them; others are ignored."""
        for entry in entries:
            try:
                step, time_s, values = entry
                numbers = {str(n)[:64]: float(v) for n, v in list(values.items())[:MAX_NAMES]}
                found = LogEntry(self.count + 1, int(step), float(time_s), numbers)
            except (TypeError, ValueError, AttributeError, OverflowError):
                continue
            if math.isfinite(found.time_s):
                self.count += 1
                self._kept.append(found)

    def after(self, number: int, limit: int) -> list[LogEntry]:
        """The oldest `limit` entries above `number` that are still kept."""
        if not self._kept or number >= self.count:
            return []
        skipped = max(number - self._kept[0].number + 1, 0)
        kept = list(self._kept)
        return kept[skipped : skipped + limit]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    """A trainer's stacks at one moment."""

    at_s: float
    """By CLOCK_MONOTONIC."""
    source: str = ""
    """trainer or faulthandler; empty without stacks."""
    missing: str = ""
    """Why there are no stacks."""
    threads: tuple[pb.TrainerThread, ...] = ()
    collectives: tuple[pb.TrainerCollective, ...] = ()
    no_collectives: str = ""
    device_bytes: int = -1
    activity: Activity = field(default=Activity("", "at an unknown place"))


class TrainerLine:
    """One trainer's line. All methods run on the event loop's thread."""

    def __init__(self, pid: int, start: int, numbers: LoggedNumbers) -> None:
        self._pid = pid
        self._start = start
        self._numbers = numbers
        self._socket: socket.socket | None = None
        self._dump = -1
        self._thread = self._signal = 0
        self._asked = 0
        self._answers: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._last: Stacks | None = None
        self._asking = asyncio.Lock()

    def open(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Take over a line that the trainer handed over; the caller closes its descriptors.

        Raises:
            UsageError: If the message or the descriptors are not a line.
        """
        thread, number = message.get("thread"), message.get("signal")
        if len(descriptors) != 2 or type(thread) is not int or type(number) is not int:
            raise UsageError("insight: expected thread, signal, and two descriptors")
        line = socket.socket(fileno=os.dup(descriptors[0]))
        line.setblocking(False)
        self.close()
        self._socket, self._dump = line, os.dup(descriptors[1])
        self._thread, self._signal = thread, number
        asyncio.get_running_loop().add_reader(line.fileno(), self._readable)

    def close(self) -> None:
        """Close the line. Idempotent."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            os.close(self._dump)
            self._socket, self._dump = None, -1
        for answer in self._answers.values():
            answer.cancel()
        self._answers.clear()

    def tell(self, message: Mapping[str, Any]) -> bool:
        """Send a message that needs no answer; False if there is no line now, or it is full."""
        if self._socket is None:
            return False
        try:
            self._socket.send(json.dumps(message).encode())
        except OSError:
            return False
        return True

    async def stacks(self, *, collectives: bool) -> Stacks:
        """The trainer's stacks, at most `FRESH_S` old; `missing` gives the reason for a failure.

        With `collectives`, those of the flight recorder, too. A training on schedule is never asked
        for them: the recorder examines events of its devices with the GIL held.
        """
        async with self._asking:
            last = self._last
            fresh = last is not None and time.monotonic() - last.at_s < FRESH_S
            asked_before = last is not None and (last.collectives or last.no_collectives)
            if last is not None and fresh and (asked_before or not collectives):
                return last
            self._last = await self._ask(collectives)
            return self._last

    async def _ask(self, collectives: bool) -> Stacks:
        now_s = time.monotonic()
        if self._socket is None:
            return Stacks(at_s=now_s, missing="the trainer has handed over no line for stacks")
        if process_state(self._pid) in STOPPED_STATES:
            return Stacks(at_s=now_s, missing="the process is stopped; continue it: kill -CONT")
        self._asked += 1
        number, answer = self._asked, asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        question = {"op": "stacks", "id": number, "collectives": collectives}
        try:
            self._socket.send(json.dumps(question).encode())
            async with asyncio.timeout(ANSWER_S):
                return _parsed(await asyncio.shield(answer), now_s)
        except (TimeoutError, OSError):
            return await self._by_signal(now_s)
        except asyncio.CancelledError:
            # Both at once when a trainer ends: its line closes, and the caller is cancelled.
            asking = asyncio.current_task()
            if not answer.cancelled() or (asking is not None and asking.cancelling()):
                raise
            return Stacks(at_s=now_s, missing="the trainer has ended")
        finally:
            self._answers.pop(number, None)
            answer.cancel()

    async def _by_signal(self, now_s: float) -> Stacks:
        """Have the trainer's `faulthandler` write its stacks: it needs no GIL."""
        why = self._why_no_signal()
        if why:
            return Stacks(at_s=now_s, missing=f"no Python ran within {ANSWER_S:g} s, and {why}")
        os.ftruncate(self._dump, 0)
        os.lseek(self._dump, 0, os.SEEK_SET)
        if _tgkill(self._pid, self._thread, self._signal):
            return Stacks(at_s=now_s, missing="the trainer's thread for stacks has ended")
        text = await self._dumped()
        threads = parse_faulthandler(text)
        if not threads:
            return Stacks(at_s=now_s, missing="neither Python nor its signal handler answered")
        # The main thread was created first, and faulthandler lists the newest first.
        stacks = tuple(
            _thread(ident, 0, frames, training=at == len(threads) - 1)
            for at, (ident, frames) in enumerate(threads)
        )
        doing = activity_of(threads[-1][1])
        return Stacks(
            at_s=now_s,
            source="faulthandler",
            threads=stacks[::-1],
            no_collectives="native code keeps the GIL, without which nobody can ask for them",
            activity=Activity(doing.kind, f"{doing.what}, keeping the GIL", doing.where),
        )

    def _why_no_signal(self) -> str:
        if self._socket is None:
            return "the trainer has closed its line"
        if not self._pid:
            return "it runs in another container, where no signal from here reaches it"
        if not self._signal:
            return "there was no free signal for faulthandler"
        if places.process_start(self._pid) != self._start:
            return "the process has ended"
        if not catches(self._pid, self._signal):
            return f"the script has replaced the handler of signal {self._signal}"
        return ""

    async def _dumped(self) -> str:
        deadline_s, size = time.monotonic() + DUMP_S, 0
        while time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
            now = os.fstat(self._dump).st_size if self._dump >= 0 else 0
            if now and now == size:
                break
            size = now
        if self._dump < 0:
            return ""
        return os.pread(self._dump, MAX_DUMP_BYTES, 0).decode(errors="replace")

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
            message = json.loads(data) if data else None
        except BlockingIOError:
            return
        except OSError:
            message = None
        except (ValueError, RecursionError):
            return
        if not isinstance(message, dict):
            self.close()
        elif message.get("op") == "log" and isinstance(message.get("entries"), list):
            self._numbers.add(message["entries"])
        else:
            number = message.get("id")
            answer = self._answers.get(number) if type(number) is int else None
            if answer is not None and not answer.done():
                answer.set_result(message)


def _parsed(message: Mapping[str, Any], at_s: float) -> Stacks:
    try:
        frames_of = [
            [Frame(str(file), int(line), str(name)) for file, line, name in one["frames"]]
            for one in message["threads"]
        ]
        threads = tuple(
            _thread(str(one["name"]), int(one["id"]), frames, training=bool(one["training"]))
            for one, frames in zip(message["threads"], frames_of, strict=True)
        )
        collectives = tuple(
            pb.TrainerCollective(age_ms=round(one.pop("age_s") * 1e3), **one)
            for one in message.get("collectives", ())
        )
        device_bytes = int(message.get("device_bytes", -1))
        pb.TrainerCollective(age_ms=device_bytes)  # as large as a message may hold
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return Stacks(at_s=at_s, missing=f"the trainer's answer cannot be read: {error!r}")
    training = next((f for one, f in zip(threads, frames_of, strict=True) if one.training), [])
    return Stacks(
        at_s=at_s,
        source="trainer",
        threads=threads,
        collectives=collectives,
        no_collectives=str(message.get("no_collectives", "")).encode(errors="replace").decode(),
        device_bytes=device_bytes,
        activity=activity_of(training),
    )


def _thread(
    name: str, native_id: int, frames: Sequence[Frame], *, training: bool
) -> pb.TrainerThread:
    found = [pb.StackFrame(file=f.file, line=f.line, function=f.function) for f in frames]
    return pb.TrainerThread(name=name, native_id=native_id, training=training, frames=found)


_tgkill: Callable[[int, int, int], int] = getattr(ctypes.CDLL(None), "tgkill", lambda *_: -1)


OVERDUE_LEAST_S = 5.0
OVERDUE_STEPS = 5
"""A boundary is overdue after this many step times, and at least `OVERDUE_LEAST_S`."""
LOOK_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Looked:
    """A sample of the trainer, and for how long it has been the same."""

    stacks: Stacks
    seen_for_s: float
    """How long the training's thread has been seen at this place; 0 in the first sample."""
    overdue: bool


class TrainerInsight:
    """A trainer's line, numbers and activity over time."""

    def __init__(self, attached: AttachedMemory) -> None:
        self.numbers = LoggedNumbers()
        self.line = TrainerLine(attached.trainer_pid, attached.request.start, self.numbers)
        self.output = TrainerOutput()
        self._pid = attached.trainer_pid
        self._page = attached.page
        self._task: asyncio.Task[None] | None = None
        self._place: tuple[int, Activity] | None = None
        self._since_s = 0.0

    def start(self) -> None:
        """Examine the trainer whenever it is overdue."""
        self._task = asyncio.create_task(self._watch(), name="paramd-insight")

    async def stop(self) -> None:
        """Stop, as the trainer has ended, but keep its output. Idempotent."""
        await stopped(self._task)
        self._task = None
        self.line.close()

    async def close(self) -> None:
        """Stop, and close the output. Idempotent."""
        await self.stop()
        await asyncio.to_thread(self.output.close)

    @property
    def overdue(self) -> bool:
        """Whether the next boundary should have come long ago."""
        boundary_ns = self._page[Word.BOUNDARY_NS]
        if not boundary_ns or self._page[Word.HELD]:
            return False
        least_s = max(OVERDUE_LEAST_S, OVERDUE_STEPS * self._page[Word.STEP_TIME_NS] / 1e9)
        return time.monotonic() - boundary_ns / 1e9 > least_s

    @property
    def activity(self) -> str:
        """Kind of what the trainer was seen doing since its last boundary; empty: not seen."""
        place = self._place
        seen = place is not None and place[0] == self._page[Word.BOUNDARY_NS]
        return place[1].kind if place is not None and seen else ""

    async def look(self, *, with_collectives: bool = False) -> Looked:
        """Stacks, with collectives on request or if overdue. A failing trainer raises nothing."""
        overdue = self.overdue
        stacks = await self.line.stacks(collectives=overdue or with_collectives)
        return Looked(stacks, self._seen_for_s(stacks), overdue)

    def _seen_for_s(self, stacks: Stacks) -> float:
        place = (self._page[Word.BOUNDARY_NS], stacks.activity)
        if place != self._place:
            self._place, self._since_s = place, stacks.at_s
        return max(time.monotonic() - self._since_s, 0.0)

    async def _watch(self) -> None:
        await asyncio.to_thread(self.output.open, self._pid)
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.overdue:
                # Without collectives: an evaluation is overdue, too, and should not pay for them.
                self._seen_for_s(await self.line.stacks(collectives=False))
