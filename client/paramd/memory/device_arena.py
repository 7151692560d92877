"""The arena on a device: memory behind a descriptor that the device's driver made.

    create(driver, uuid, arena_bytes)     the sidecar: allocated and exported, never mapped, so it
                                          takes no context and no device memory of its own
    TrainerDevice(driver, device)         the trainer: its context, and the event that it records
      .open(descriptor, arena_bytes)        maps the memory; tensors are made on its addresses
    DeviceReader(...)                     the sidecar again, at the first read: a context, a side
                                          stream, windows of page-locked memory

The optimizer's state on the device has memory of the same kind, in several allocations, since it
grows: the sidecar makes one when the trainer needs it (`create_allocation`), and both map them one
behind the other (`Addresses`), covered by the same fence and event.

SEQ on the host names the state that the trainer has *queued*, not the one the device has reached.
So before it publishes a state, the trainer queues two things behind the update: a number, the
*fence*, that the device writes behind the arena's last byte, and an event. Readers queue their
copies behind that event, and the fence's before the others: found in memory, it proves that the
device had come to the state. Once the trainer's process has ended its queue is gone, finished or
not, and its event proves nothing any more; the fence still does.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from paramd.errors import UsageError
from paramd.memory.control_page import Word, Words
from paramd.memory.device_driver import CUDA, HIP, DeviceError, Driver, load, rounded, used_bytes
from paramd.memory.device_symbols import EVENT_HANDLE_BYTES, UUID_BYTES
from paramd.memory.gate import CopySpan, LateError, batches
from paramd.memory.handover import Allocation, optimizer_bytes

BASE = 1 << 62
"""First address of an arena in a process that has not mapped it: no memory of the host is there."""

STATE_BASE = BASE + (1 << 61)
"""The same for the optimizer's state on the device."""

WINDOW_BYTES, WINDOWS = 1 << 20, 4
"""Page-locked memory of a reader: while one window is emptied, the others are filled."""

LOCKED_BYTES = WINDOW_BYTES * WINDOWS
"""From this size on it pays to page-lock memory, which the device then fills by itself."""

LATE_S = 1.0
"""How long, in seconds, a reader waits for the device to finish the update it wants to read."""

_POLL_S = 50e-6
_FENCE_ALIGN, _FENCE_BYTES, _FENCE_MASK = 64, 64, (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class DeviceArenaRequest:
    """A sidecar's knowledge of the device of its trainer's arena."""

    uuid: bytes
    event: bytes
    """Handle that opens the trainer's event (`Driver.open_event`)."""
    kind: str = CUDA
    """Kind of the driver (`Driver.kind`)."""

    def create(self, arena_bytes: int) -> int:
        driver = load(self.kind)
        return create(driver, driver.device(self.uuid), arena_bytes)

    def create_allocation(self, size_bytes: int) -> Allocation:
        driver = load(self.kind)
        return create_allocation(driver, driver.device(self.uuid), size_bytes)

    def to_message(self) -> dict[str, str]:
        return {"uuid": self.uuid.hex(), "event": self.event.hex(), "kind": self.kind}

    @classmethod
    def from_message(cls, told: Any) -> DeviceArenaRequest:
        try:
            found = cls(
                bytes.fromhex(told["uuid"]), bytes.fromhex(told["event"]), told.get("kind", CUDA)
            )
        except (KeyError, TypeError, ValueError):
            raise UsageError("attach: device must have uuid and event, in hex") from None
        if found.kind not in (CUDA, HIP):
            raise UsageError(f"attach: a device's kind is {CUDA!r} or {HIP!r}")
        if (len(found.uuid), len(found.event)) != (UUID_BYTES, EVENT_HANDLE_BYTES):
            raise UsageError(
                f"attach: a device's uuid has {UUID_BYTES} bytes and an event {EVENT_HANDLE_BYTES}"
            )
        return found


def fence_begin(arena_bytes: int) -> int:
    """The fence's first byte, from the arena's first."""
    return -(-arena_bytes // _FENCE_ALIGN) * _FENCE_ALIGN


def device_bytes(driver: Driver, device: int, arena_bytes: int) -> int:
    """Size of the allocation: the arena and its fence, as large as the driver wants it."""
    return rounded(fence_begin(arena_bytes) + _FENCE_BYTES, driver.granularity(device))


def create(driver: Driver, device: int, arena_bytes: int) -> int:
    """A descriptor of new device memory, which lives as long as any process has one or maps it.

    Makes no context.

    Raises:
        DeviceError, ExhaustedError: If the driver refused.
    """
    return _created(driver, device, device_bytes(driver, device, arena_bytes))


def create_allocation(driver: Driver, device: int, size_bytes: int) -> Allocation:
    """New device memory for optimizer state, of at least that size. As `create`."""
    size_bytes = rounded(size_bytes, driver.granularity(device))
    return Allocation(_created(driver, device, size_bytes), size_bytes)


def _created(driver: Driver, device: int, size_bytes: int) -> int:
    handle = driver.create(device, size_bytes)
    try:
        return driver.export(handle)
    finally:
        driver.release(handle)


class Addresses:
    """Addresses for the device in this process, with memory mapped to them from the first on."""

    _reserved_bytes = 0

    def __init__(self, driver: Driver, device: int, size_bytes: int) -> None:
        """Reserve that many addresses, which takes no memory. Raises DeviceError."""
        self._allocations: list[int] = []
        self._driver = driver
        self._device = device
        size_bytes = rounded(size_bytes, driver.granularity(device))
        self.address = driver.reserve(size_bytes)
        self._reserved_bytes = size_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the addresses that have memory."""
        return sum(self._allocations)

    @property
    def allocation_count(self) -> int:
        return len(self._allocations)

    def map(self, descriptor: int, size_bytes: int) -> None:
        """Map the next allocation, whole. The descriptor stays the caller's. Raises DeviceError."""
        handle = self._driver.import_(descriptor, self._device)
        try:
            self._driver.map(self.address + self.mapped_bytes, size_bytes, handle, self._device)
        finally:
            self._driver.release(handle)
        self._allocations.append(size_bytes)

    def unmap(self) -> None:
        """Unmap the last allocation: nothing may use its addresses any more."""
        size_bytes = self._allocations.pop()
        self._driver.unmap(self.address + self.mapped_bytes, size_bytes)

    def __del__(self) -> None:
        # If tensors still use it, the last of them releases it.
        with suppress(DeviceError):
            self.close()

    def close(self) -> None:
        """Unmap everything and free the addresses. Idempotent."""
        if self._reserved_bytes:
            while self._allocations:
                self.unmap()
            reserved_bytes, self._reserved_bytes = self._reserved_bytes, 0
            self._driver.free_addresses(self.address, reserved_bytes)


class DeviceMap(Addresses):
    """An arena's memory, mapped for the device by this process."""

    def __init__(self, driver: Driver, device: int, descriptor: int, arena_bytes: int) -> None:
        """The descriptor stays the caller's. Raises DeviceError."""
        self.descriptor = descriptor
        self.size_bytes = arena_bytes
        mapped_bytes = device_bytes(driver, device, arena_bytes)
        super().__init__(driver, device, mapped_bytes)
        self.map(descriptor, mapped_bytes)

    @property
    def fence(self) -> int:
        return self.address + fence_begin(self.size_bytes)


def why_not(driver: Driver, device: int) -> str:
    """Why arenas cannot be made on the device; empty if they can. Tries with a small one."""
    try:
        reason = driver.why_not(device)
        if reason:
            return reason
        descriptor = create(driver, device, 0)
        try:
            DeviceMap(driver, device, descriptor, 0).close()
        finally:
            os.close(descriptor)
    except (DeviceError, OSError) as error:
        return str(error)
    return ""


class TrainerDevice:
    """The trainer's side of one device. Training thread only."""

    def __init__(self, driver: Driver, device: int, stream: Callable[[], int] = lambda: 0) -> None:
        """`stream` returns the training's present one. DeviceError: no context or event."""
        self.driver = driver
        self.device = device
        self._stream = stream
        self.captured = False
        """Whether an update was captured into a graph, whose replays nobody will see."""
        self._noted = False
        self._map: DeviceMap | None = None
        self._words: Words | None = None
        self._context = driver.retain(device)
        try:
            with driver.inside(self._context):
                self._event = driver.event(shared=True)
                self._queued = driver.event()
                handle = driver.event_handle(self._event)
            self.request = DeviceArenaRequest(driver.uuid(device), handle, driver.kind)
        except BaseException:
            driver.let_go(device)
            raise

    def open(self, descriptor: int, arena_bytes: int, words: Words) -> DeviceMap:
        """Map the arena; `words` are the control page's, where fences are published."""
        self._map = DeviceMap(self.driver, self.device, descriptor, arena_bytes)
        self._words = words
        return self._map

    def publish(self) -> None:
        """Queue fence and event behind the training's work; then a state may be published."""
        assert self._map is not None, "open comes first"
        assert self._words is not None
        # The training's device may be another one here; and an optimizer that steps within backward
        # does so on a thread of autograd's.
        with self.driver.inside(self._context):
            stream = self._stream()
            if self.driver.is_capturing(stream):
                self.captured = True
                return
            before = self._words[Word.DEVICE_FENCE]
            # Begins anywhere: the memory may have the fence of an earlier trainer, which must not
            # match.
            number = (before + 1) & _FENCE_MASK if before else secrets.randbits(31) + 1
            self.driver.fill(self._map.fence, number, 1, stream)
            self.driver.record(self._event, stream)
            # Last, and before SEQ: a reader of this number finds the event recorded.
            self._words[Word.DEVICE_FENCE] = number

    def behind(self) -> bool:
        """Whether the device has yet to finish what the training had queued at `note_queued`."""
        with suppress(DeviceError), self.driver.inside(self._context):
            # To ask for an event would end a capture.
            return self._noted and not self.driver.is_done(self._queued)
        return False

    def note_queued(self) -> None:
        """Note what the training has queued until now; see `behind`."""
        self._noted = False
        with suppress(DeviceError), self.driver.inside(self._context):
            stream = self._stream()
            if not self.driver.is_capturing(stream):
                self.driver.record(self._queued, stream)
                self._noted = True

    def finish(self) -> None:
        """Wait for what the training has queued, before its memory is used in another way."""
        with self.driver.inside(self._context):
            self.driver.synchronize(self._stream())

    def close(self) -> None:
        """Let go of event and context. The map goes with its last tensor. Idempotent."""
        self._map = None
        if self._context:
            self._context = 0
            self.driver.destroy_event(self._event)
            self.driver.destroy_event(self._queued)
            self.driver.let_go(self.device)


@dataclass(frozen=True, slots=True)
class _Window:
    address: int
    event: int


class DeviceReader:
    """An arena as its sidecar has it: bytes are at `address`, and only `move` can read them.

    The optimizer's state is at STATE_BASE. Constructed without touching the device. Any thread may
    call.
    """

    def __init__(
        self,
        request: DeviceArenaRequest,
        descriptor: int,
        arena_bytes: int,
        words: Words,
        state: Sequence[Allocation] = (),
    ) -> None:
        """`words`: the control page's. `state`: allocations of optimizer state. All descriptors
        stay the caller's."""
        self.descriptor = descriptor
        self.size_bytes = arena_bytes
        self.address = BASE
        self.context_bytes: int | None = None
        """Device memory that this process's context takes; None before, and where it is unknown."""
        self.trainer_ended = False
        """Once True, nothing is awaited any more: the trainer's queue has ended."""
        self._request = request
        self._words = words
        self._lock = threading.Lock()
        # Held around `_lock` while pages are locked, 0.07 s a GiB that no copy waits for.
        self._locking = threading.Lock()
        self._undo = ExitStack()
        self._driver: Driver | None = None
        self._context = self._stream = self._event = self._copied = self._fence_room = 0
        self._locked: dict[int, int] = {}
        self._late: set[int] = set()
        self._windows: list[_Window] = []
        self._map: DeviceMap | None = None
        self._allocations = list(state)
        self._state: Addresses | None = None

    @property
    def is_open(self) -> bool:
        """Whether this process has a context on the device, which takes memory there."""
        return self._driver is not None

    def move(self, spans: Sequence[CopySpan]) -> None:
        """Copy bytes of the arena or the state, or of host memory, to host memory.

        Bytes on the device are of one moment: the fence is read once, before all of them.

        Raises:
            LateError: If the device has not finished the last published state, or never will.
            DeviceError: If the driver refused.
        """
        here = [span for span in spans if span.source >= BASE]
        for span in spans:
            if span.source < BASE:
                span.copy()
        if not here:
            return
        with self._lock:
            published = self._words[Word.DEVICE_FENCE]
            self._ready()
            self._copy([replace(span, source=self._mapped_at(span)) for span in here])
            # 0: nothing was queued under this page, so the earlier trainer's memory is intact.
            found = ctypes.c_uint32.from_address(self._fence_room).value
            if published and (found - published) & _FENCE_MASK > _FENCE_MASK // 2:
                raise LateError

    def _mapped_at(self, span: CopySpan) -> int:
        """The address of bytes of the arena or of the state; maps state when first read."""
        assert self._map is not None
        if span.source < STATE_BASE:
            return self._map.address + span.source - BASE
        state = self._state
        if state is None:
            driver = load(self._request.kind)
            device = driver.device(self._request.uuid)
            state = self._state = Addresses(driver, device, optimizer_bytes(self.size_bytes))
        for allocation in self._allocations[state.allocation_count :]:
            state.map(allocation.descriptor, allocation.size_bytes)
        begin = span.source - STATE_BASE
        if begin + span.size_bytes > state.mapped_bytes:
            # An allocation went since the copy began: in an update, which has overtaken it.
            raise LateError
        return state.address + begin

    def has_state(self, allocations: Sequence[Allocation]) -> None:
        """Note that the optimizer's state has these now; all but the last are known."""
        with self._lock:
            self._allocations = list(allocations)
            # The last may have replaced one that its trainer never got.
            while self._state is not None and self._state.allocation_count >= len(allocations):
                self._state.unmap()

    def is_whole(self) -> bool:
        """Whether the device finished what the trainer published last. Raises DeviceError."""
        room = ctypes.c_uint32()
        try:
            self.move([CopySpan(BASE + fence_begin(self.size_bytes), ctypes.addressof(room), 4)])
        except LateError:
            return False
        return True

    def end(self) -> str:
        """Note that the trainer has ended; why its last published state is incomplete, else empty.

        Slow the first time: call it off the event loop.
        """
        self.trainer_ended = True
        try:
            whole = self.is_whole()
        except DeviceError as error:
            return f"the device cannot be read ({error})"
        return "" if whole else "the device had not finished the trainer's last update"

    def lock(self, address: int, size_bytes: int) -> bool:
        """Have the device itself write to this memory, if it can. Slow; opens the device."""
        with self._locking, suppress(DeviceError):
            if size_bytes >= LOCKED_BYTES:
                with self._lock:
                    driver = self._driver if self._driver is not None else self._open()
                driver.enter(self._context)
                driver.lock_pages(address, size_bytes)
                with self._lock:
                    self._locked[address] = address + size_bytes
        return address in self._locked

    def is_late(self, address: int) -> bool:
        """Whether a copy to locked memory was given up and may still come: do not reuse it yet."""
        return address in self._late

    def unlock(self, address: int) -> None:
        """End a lock before its memory goes. Idempotent."""
        with self._lock, suppress(DeviceError):
            if self._locked.pop(address, 0) and address not in self._late:
                assert self._driver is not None
                self._driver.enter(self._context)
                self._driver.unlock_pages(address)

    def close(self) -> None:
        """Give context, windows and map back. Idempotent; a lost device keeps what it has."""
        with self._locking, self._lock, suppress(DeviceError):
            if self._driver is not None:
                self._driver.enter(self._context)
                while self._locked:
                    with suppress(DeviceError):
                        self._driver.unlock_pages(self._locked.popitem()[0])
            if self._state is not None:
                self._state.close()
            self._driver, self._windows, self._map, self._state = None, [], None, None
            self._undo.close()

    def _ready(self) -> None:
        """Open the device at the first read, and have later work wait for the trainer's event."""
        driver = self._driver
        if driver is None:
            driver = self._open()
        driver.enter(self._context)
        if self.trainer_ended:
            return
        if not self._event:
            self._event = driver.open_event(self._request.event)
        self._until_done(driver, self._event)
        driver.wait(self._stream, self._event)

    def _open(self) -> Driver:
        driver = load(self._request.kind)
        with ExitStack() as undo:
            device = driver.device(self._request.uuid)
            before = used_bytes(self._request.uuid)
            self._context = driver.retain(device)
            undo.callback(driver.let_go, device)
            driver.enter(self._context)
            # Before the arena is mapped, which may count as this process's.
            after = used_bytes(self._request.uuid)
            if before is not None and after is not None and after > before:
                self.context_bytes = after - before
            found = DeviceMap(driver, device, self.descriptor, self.size_bytes)
            undo.callback(found.close)
            self._stream = driver.stream()
            undo.callback(driver.destroy_stream, self._stream)
            self._fence_room = driver.pinned(_FENCE_BYTES)
            undo.callback(driver.free_pinned, self._fence_room)
            self._copied = driver.event()
            undo.callback(driver.destroy_event, self._copied)
            windows = []
            for _ in range(WINDOWS):
                window = _Window(driver.pinned(WINDOW_BYTES), driver.event())
                undo.callback(driver.free_pinned, window.address)
                undo.callback(driver.destroy_event, window.event)
                windows.append(window)
            self._undo = undo.pop_all()
        self._windows, self._map, self._driver = windows, found, driver
        return driver

    def _copy(self, spans: Sequence[CopySpan]) -> None:
        """Have the device fill page-locked memory, and windows for the rest."""
        driver = self._driver
        assert driver is not None
        assert self._map is not None
        driver.to_host(self._fence_room, self._map.fence, 4, self._stream)
        direct = {span: at for span in spans if (at := self._lock_at(span))}
        try:
            for span in direct:
                driver.to_host(span.target, span.source, span.size_bytes, self._stream)
            driver.record(self._copied, self._stream)
            self._copy_through_windows(driver, [span for span in spans if span not in direct])
            self._until_done(driver, self._copied)
        except BaseException:
            self._late.update(direct.values())
            raise
        # Of one stream: those that were given up have ended before this one.
        for address in self._late - self._locked.keys():
            with suppress(DeviceError):
                driver.unlock_pages(address)
        self._late.clear()

    def _lock_at(self, span: CopySpan) -> int:
        """The first byte of the locked memory that the span goes to; 0 if there is none."""
        end = span.target + span.size_bytes
        return next((b for b, e in self._locked.items() if b <= span.target and end <= e), 0)

    def _copy_through_windows(self, driver: Driver, spans: Sequence[CopySpan]) -> None:
        """Fill windows in turn, and empty each while those after it are filled."""
        filled: deque[tuple[_Window, list[CopySpan]]] = deque()
        windows = cycle(self._windows)
        for batch in batches(spans, WINDOW_BYTES, WINDOW_BYTES):
            if len(filled) == WINDOWS:
                self._empty(driver, *filled.popleft())
            window, held = next(windows), []
            at = window.address
            for part in batch:
                driver.to_host(at, part.source, part.size_bytes, self._stream)
                held.append(replace(part, source=at))
                at += part.size_bytes
            driver.record(window.event, self._stream)
            filled.append((window, held))
        for one in filled:
            self._empty(driver, *one)

    def _empty(self, driver: Driver, window: _Window, held: Sequence[CopySpan]) -> None:
        self._until_done(driver, window.event)
        for span in held:
            span.copy()

    def _until_done(self, driver: Driver, event: int) -> None:
        # Polled, not awaited: a device that hangs must not hang the thread that copies.
        deadline_s = time.monotonic() + LATE_S
        while not driver.is_done(event):
            # Work that an ended trainer left in its queue is never done.
            if time.monotonic() > deadline_s or (event == self._event and self.trainer_ended):
                raise LateError
            time.sleep(_POLL_S)
