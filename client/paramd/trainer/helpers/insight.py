"""A trainer's answers to its sidecar: Python stacks, collectives, the script's numbers.

One daemon thread answers over a socket that the sidecar was handed. It runs Python, so it cannot
answer while native code keeps the GIL. For that case a signal is registered with `faulthandler`,
whose handler needs no GIL: the sidecar sends it to this thread alone (tgkill), so no system call
of another thread is interrupted, and reads the stacks from a memfd. With the GIL taken no Python
frame changes meanwhile, which makes walking them from a handler safe.

Nothing here waits for the sidecar: what it does not take in time is dropped and counted.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import logging
import math
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any

import torch

from paramd.clock import now_s
from paramd.errors import UsageError
from paramd.memory.handover import MAX_MESSAGE_BYTES, Message
from paramd.trainer.model import accelerator

log = logging.getLogger("paramd")

MAX_FRAMES = 48
"""Innermost frames kept of a thread."""

MAX_THREADS = 64
MAX_COLLECTIVES = 16
"""Latest collectives sent; unfinished ones come first."""

MAX_NUMBERS = 64
"""Most numbers of one `log` call."""

MAX_PENDING = 1024
"""Most `log` calls kept until the sidecar has taken them; older ones are dropped."""

_AGAIN_MS = 1000
_BATCH = 100
_BATCH_PAUSE_S = 0.2
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,59}")


class Insight:
    """One trainer's side of the line to its sidecar. Thread-safe."""

    def __init__(self) -> None:
        """No thread runs before `open_line`."""
        self._training = threading.get_ident()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not sealed, as it grows with the stacks; the sidecar reads so much of it as there is.
        self._dump = os.memfd_create("paramd-stacks", os.MFD_CLOEXEC)
        os.fchmod(self._dump, 0o600)
        self._signal = _register(self._dump)
        self._pending: deque[_Entry] = deque(maxlen=MAX_PENDING)
        self._idle = True
        self._line: socket.socket | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def open_line(self) -> tuple[Message, list[int]]:
        """A new line to a sidecar: the message and its descriptors, which the caller closes."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock:
            before, self._line = self._line, ours
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paramd-insight", daemon=True)
            self._thread.start()
        self._rouse()
        if before is not None:
            # The thread may be inside poll() with it, and looks again now; or has just closed it.
            with contextlib.suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)
        message = {"op": "insight", "thread": self._thread.native_id, "signal": self._signal}
        return message, [theirs.detach(), os.dup(self._dump)]

    def log(self, step: int, numbers: Mapping[str, float | torch.Tensor]) -> None:
        """Queue numbers for the sidecar; never blocks. UsageError: one is invalid, none kept."""
        checked = checked_numbers(numbers)
        self._pending.append(_Entry(step, now_s(), checked, _computed(checked)))
        if self._idle:
            self._idle = False
            self._rouse()

    def close(self) -> None:
        """End the thread and restore the signal. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._rouse()
        if self._thread is not None:
            self._thread.join(5.0)
        if self._line is not None:
            self._line.close()
        if self._signal:
            faulthandler.unregister(self._signal)
        os.close(self._dump)
        os.close(self._wake)

    def _rouse(self) -> None:
        # Full, or closed by a `detach` on another thread: neither is the script's concern.
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        open_line: socket.socket | None = None
        while not self._closed:
            with self._lock:
                line = self._line
            if open_line is not None and open_line is not line:
                open_line.close()
            open_line = line
            try:
                asked = self._wait(line)
                if asked is not None:
                    _send(line, self._answer(asked))
                self._deliver(line)
            except Exception:
                log.debug("paramd: the line to the sidecar failed", exc_info=True)
                with self._lock:
                    if self._line is line:
                        self._line = None
        if open_line is not None:
            open_line.close()

    def _wait(self, line: socket.socket | None) -> dict[str, Any] | None:
        """Wait for a request or a wake-up. Raises EOFError when the sidecar has gone."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if line is not None:
            poller.register(line, select.POLLIN)
        # In this order: `log` appends first and then looks whether to rouse us.
        self._idle = True
        ready = [fd for fd, _ in poller.poll(_AGAIN_MS if self._pending else None)]
        self._idle = False
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if self._pending:
                ready += _pause(line)
        if line is None or line.fileno() not in ready:
            return None
        data = line.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise EOFError("the sidecar closed the line")
        asked: dict[str, Any] = json.loads(data)
        return asked

    def _answer(self, asked: Mapping[str, Any]) -> Message:
        answer: Message = {"op": "stacks", "id": asked.get("id"), "threads": self._stacks()}
        if asked.get("collectives"):
            answer |= collectives()
        answer |= device_memory()
        # Cut so that it fits one message.
        while len(json.dumps(answer)) > MAX_MESSAGE_BYTES // 2 and len(answer["threads"]) > 1:
            answer["threads"] = answer["threads"][: len(answer["threads"]) // 2]
            answer["cut"] = True
        return answer

    def _stacks(self) -> list[dict[str, Any]]:
        names = {thread.ident: thread for thread in threading.enumerate()}
        own = threading.get_ident()
        found = []
        for ident, frame in sys._current_frames().items():
            if ident == own:
                continue
            thread = names.get(ident)
            native = thread.native_id if thread is not None else None
            frames = [
                (one.f_code.co_filename, line or 0, one.f_code.co_qualname)
                for one, line in itertools.islice(walk_stack(frame), MAX_FRAMES)
            ]
            found.append(
                {
                    "name": thread.name if thread is not None else "",
                    "id": native if native is not None else 0,
                    "training": ident == self._training,
                    "frames": frames,
                }
            )
        # The training's thread first: it must survive the cut.
        found.sort(key=lambda one: not one["training"])
        return found[:MAX_THREADS]

    def _deliver(self, line: socket.socket | None) -> None:
        while line is not None and self._pending and self._pending[0].is_computed():
            ready = list(itertools.takewhile(_Entry.is_computed, list(self._pending)[:_BATCH]))
            entries = [entry.as_json() for entry in ready]
            while len(entries) > 1 and len(json.dumps(entries)) > MAX_MESSAGE_BYTES // 2:
                entries = entries[: len(entries) // 2]
            try:
                _send(line, {"op": "log", "entries": entries})
            except BlockingIOError:
                return
            for entry in ready[: len(entries)]:
                # `log` may have dropped the oldest meanwhile.
                with contextlib.suppress(ValueError):
                    self._pending.remove(entry)


def _pause(line: socket.socket | None) -> list[int]:
    """Wait for more numbers, which come one call at a time: the training's GIL is taken for many at
    once. A question ends the wait: if its answer waited for numbers, it would always show the same
    part of a step, at which the training would then seem to be all the time. Returns what is
    ready."""
    if line is None:
        time.sleep(_BATCH_PAUSE_S)
        return []
    poller = select.poll()
    poller.register(line, select.POLLIN)
    return [fd for fd, _ in poller.poll(1e3 * _BATCH_PAUSE_S)]


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One `log` call."""

    step: int
    time_s: float
    numbers: Mapping[str, float | torch.Tensor]
    computed: torch.Event | None
    """Passed once the tensors among them can be read without waiting for their device."""

    def is_computed(self) -> bool:
        return self.computed is None or self.computed.query()

    def as_json(self) -> list[Any]:
        numbers = {name: float(value) for name, value in self.numbers.items()}
        told = {name: n if math.isfinite(n) else str(n) for name, n in numbers.items()}
        return [self.step, self.time_s, told]


def _computed(numbers: Mapping[str, float | torch.Tensor]) -> torch.Event | None:
    for value in numbers.values():
        if isinstance(value, torch.Tensor) and accelerator.holds(value):
            event = torch.Event(value.device)
            event.record(torch.accelerator.current_stream(value.device))
            return event
    return None


def checked_numbers(numbers: Mapping[str, float | torch.Tensor]) -> dict[str, Any]:
    """The numbers with tensors copied, so that the script may change its own.

    Raises:
        UsageError: Too many or none, an invalid name, or a value that is not a number.
    """
    if not 0 < len(numbers) <= MAX_NUMBERS:
        raise UsageError(f"log: {len(numbers)} numbers; expected 1 to {MAX_NUMBERS}, as name=value")
    checked: dict[str, Any] = {}
    for name, value in numbers.items():
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"log: {name[:80]!r} cannot name a number; expected a letter, then letters, "
                "digits, '_', '.', '/' or '-', at most 60 characters"
            )
        if isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.is_complex():
                raise UsageError(
                    f"log: {name} is a {value.dtype} tensor of shape {tuple(value.shape)}; "
                    "expected one real number"
                )
            if accelerator.holds(value) and accelerator.captures(value.device):
                raise UsageError(
                    f"log: {name} is a tensor of a graph that is being captured; call log "
                    "after the graph was replayed"
                )
            # Converted on the thread: reading a device's tensor waits for the device.
            checked[name] = value.detach().clone()
            continue
        try:
            checked[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(
                f"log: {name} is of type {type(value).__name__}; expected a number"
            ) from None
    return checked


def collectives() -> dict[str, Any]:
    """Torch's flight recorder's latest collectives, as plain data; or why none are recorded."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined,unused-ignore]

        found = json.loads(_dump_fr_trace_json(includeCollectives=True, onlyActive=False))
        entries = list(found.get("entries") or ())
    except Exception as error:
        return {"collectives": [], "no_collectives": f"this torch has no JSON trace: {error!r}"}
    if not entries:
        return {
            "collectives": [],
            "no_collectives": "the flight recorder is empty; set TORCH_FR_BUFFER_SIZE=2000",
        }
    now_ns = time.time_ns()
    rows = [_collective(entry, now_ns) for entry in entries]
    open_rows = [row for row in rows if not row["done"]]
    done = [row for row in rows if row["done"]]
    room = max(MAX_COLLECTIVES - len(open_rows), 1)
    return {"collectives": open_rows[-MAX_COLLECTIVES:] + done[-room:]}


def _collective(entry: Mapping[str, Any], now_ns: int) -> dict[str, Any]:
    group = entry.get("process_group") or ["", ""]
    is_p2p = bool(entry.get("is_p2p"))
    begun_ns = int(entry.get("time_created_ns") or now_ns)
    return {
        "name": str(entry.get("profiling_name", ""))[:80],
        "group": str(group[1] if len(group) > 1 and group[1] else group[0])[:80],
        "sequence": int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id") or 0),
        "done": bool(entry.get("retired")) or entry.get("state") == "completed",
        "age_s": max(now_ns - begun_ns, 0) / 1e9,
    }


def device_memory() -> dict[str, Any]:
    """Bytes of device memory that torch uses and reserves; empty without a device in use."""
    if accelerator.in_use() is None:
        return {}
    try:
        # All devices: this thread's current device is the first, wherever the training is.
        devices = range(torch.accelerator.device_count())
        return {
            "device_bytes": sum(map(torch.accelerator.memory_allocated, devices)),
            "device_reserved_bytes": sum(map(torch.accelerator.memory_reserved, devices)),
        }
    except Exception:
        return {}


def _send(line: socket.socket | None, message: Message) -> None:
    if line is not None:
        line.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _register(dump: int) -> int:
    """Have a free real-time signal write all threads' stacks to `dump`; 0 if none is free."""
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN + 1, -1):
        # None: a handler that Python did not install.
        if signal.getsignal(number) is signal.SIG_DFL:
            try:
                faulthandler.register(number, file=dump, all_threads=True, chain=False)
            except (OSError, RuntimeError, ValueError):
                return 0
            return int(number)
    return 0
