"""The line to the trainer: asks for its stacks, takes in the numbers that its script logs.

`Stacks` come from the trainer's own thread; if that has not answered within `ANSWER_S` although
the process runs, native code keeps the GIL, and the signal that the trainer registered has
`faulthandler` write them (client/paramd/trainer/helpers/insight.py). Nothing is asked more often
than once per `FRESH_S`, however many callers there are.
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
from paramd.memory.handover import MAX_MESSAGE_BYTES
from paramd_service.sidecar.insight.activity import Activity, Frame, activity_of, parse_faulthandler
from paramd_service.sidecar.insight.process import catches
from paramd_service.sidecar.owner import process_state
from paramd_service.sidecar.phase import STOPPED_STATES

ANSWER_S = 2.0
"""The trainer's thread needs the GIL to answer; a running training gives it within 5 ms."""

DUMP_S = 1.0
FRESH_S = 1.0
_POLL_S = 0.02
MAX_DUMP_BYTES = 1 << 20

MAX_KEPT = 10_000
"""Entries kept; the oldest go first. One of five numbers takes about a kilobyte."""

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
        """Entries ever taken in."""

    def add(self, entries: Iterable[Any]) -> None:
        """Take in [step, time_s, {name: value}] as the trainer sent them; others are ignored."""
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
class ThreadStack:
    """One thread of a trainer."""

    name: str
    native_id: int
    """0 when unknown."""
    training: bool
    """Whether it called `attach`."""
    frames: tuple[Frame, ...]
    """Innermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A collective in the flight recorder."""

    name: str
    group: str
    sequence: int
    done: bool
    age_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    """What a trainer was doing at one moment."""

    at_s: float
    """By CLOCK_MONOTONIC."""
    source: str = ""
    """trainer, faulthandler; empty: there are none."""
    missing: str = ""
    """Why there are none."""
    threads: tuple[ThreadStack, ...] = ()
    collectives: tuple[Collective, ...] = ()
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
        """Take over a line that the trainer handed over. The caller closes its descriptors.

        Raises:
            UsageError: the message or the descriptors are not a line.
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
        """Idempotent."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            os.close(self._dump)
            self._socket, self._dump = None, -1
        for answer in self._answers.values():
            answer.cancel()
        self._answers.clear()

    def tell(self, message: Mapping[str, Any]) -> bool:
        """Send what needs no answer; False if there is no line at present, or it is full."""
        if self._socket is None:
            return False
        try:
            self._socket.send(json.dumps(message).encode())
        except OSError:
            return False
        return True

    async def stacks(self, *, collectives: bool) -> Stacks:
        """The trainer's stacks, at most `FRESH_S` old; says what is missing instead of failing.

        Args:
            collectives: Ask for the flight recorder's, too. A training on schedule is never asked:
                the recorder looks at events of its devices with the GIL held.
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
            # Both at once when a trainer ends: its line closes, and whoever asks is cancelled.
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
        # The main thread was made first, and faulthandler lists the newest first.
        stacks = tuple(
            ThreadStack(name=ident, native_id=0, training=at == len(threads) - 1, frames=(*frames,))
            for at, (ident, frames) in enumerate(threads)
        )
        doing = activity_of(stacks[-1].frames)
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
        except ValueError:
            return
        if not isinstance(message, dict):
            self.close()
        elif message.get("op") == "log" and isinstance(message.get("entries"), list):
            self._numbers.add(message["entries"])
        else:
            answer = self._answers.get(message.get("id", 0))
            if answer is not None and not answer.done():
                answer.set_result(message)


def _parsed(message: Mapping[str, Any], at_s: float) -> Stacks:
    try:
        threads = tuple(
            ThreadStack(
                name=str(one["name"]),
                native_id=int(one["id"]),
                training=bool(one["training"]),
                frames=tuple(Frame(str(f), int(n), str(name)) for f, n, name in one["frames"]),
            )
            for one in message["threads"]
        )
        collectives = tuple(Collective(**one) for one in message.get("collectives", ()))
    except (KeyError, TypeError, ValueError) as error:
        return Stacks(at_s=at_s, missing=f"the trainer's answer cannot be read: {error!r}")
    training = next((one.frames for one in threads if one.training), ())
    return Stacks(
        at_s=at_s,
        source="trainer",
        threads=threads,
        collectives=collectives,
        no_collectives=str(message.get("no_collectives", "")),
        device_bytes=int(message.get("device_bytes", -1)),
        activity=activity_of(training),
    )


def _load_tgkill() -> Callable[[int, int, int], int]:
    call: Any = getattr(ctypes.CDLL(None), "tgkill", None)
    return call if call is not None else lambda pid, thread, number: -1


_tgkill = _load_tgkill()
