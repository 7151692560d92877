"""GPUs in figures, by NVML (`nvidia-ml-py`, the extra `nvidia`). Without it there are none."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from paramd.v1 import common_pb2

MOST = 16
"""GPUs told of one host at most."""

_MIB = 1 << 20

THROTTLED = (
    ("heat", 0x20 | 0x40),
    ("power", 0x04 | 0x80),
    ("hardware", 0x08),
    ("synchronized", 0x10),
)
"""Bits of NVML's reasons for a lower clock: software and hardware slowdown by heat, power cap and
power brake, slowdown by hardware, and a boost held equal to other GPUs'. An idle GPU's low clock
(bit 0) and one set by the owner (bit 1) are no throttling."""

_TEMPERATURE_GPU = 0
_CLOCK_SM = 1
_UNCORRECTED, _VOLATILE = 1, 0
_XID = 0x08

Value = TypeVar("Value")
Handle = Any
"""Opaque."""


class Utilization(Protocol):
    """NVML's answer about use."""

    gpu: int


class Memory(Protocol):
    """NVML's answer about memory."""

    used: int
    total: int


class Process(Protocol):
    """A process that uses a GPU."""

    pid: int


class Event(Protocol):
    """An event of NVML."""

    device: Handle
    eventType: int
    eventData: int


class Library(Protocol):
    """The part of `pynvml` that is used. All calls raise `NVMLError` where a GPU does not tell."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle: ...
    def nvmlDeviceGetIndex(self, handle: Handle) -> int: ...
    def nvmlDeviceGetName(self, handle: Handle) -> str | bytes: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Utilization: ...
    def nvmlDeviceGetClockInfo(self, handle: Handle, kind: int) -> int: ...
    def nvmlDeviceGetMaxClockInfo(self, handle: Handle, kind: int) -> int: ...
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Handle) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> Memory: ...
    def nvmlDeviceGetTotalEccErrors(self, handle: Handle, kind: int, counter: int) -> int: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> Sequence[Process]: ...
    def nvmlEventSetCreate(self) -> Any: ...
    def nvmlDeviceRegisterEvents(self, handle: Handle, kinds: int, events: Any) -> None: ...
    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Event: ...
    def nvmlEventSetFree(self, events: Any) -> None: ...


class Devices:
    """The GPUs of this host. One thread at a time.

    Life cycle: `open`, `facts` every few seconds, `close`. Nothing is loaded before `open`.
    """

    def __init__(self) -> None:
        """No I/O."""
        self._library: Library | None = None
        self._error: type[Exception] = Exception
        self._handles: dict[int, Handle] = {}
        """By number in NVML; without GPUs that do not answer."""
        self._events: Any = None
        self._xids: dict[int, int] = {}

    def open(self, load: Callable[[], Library] | None = None) -> bool:
        """Load NVML; return whether there is a GPU to tell of.

        Args:
            load: Gives the library; raises ImportError where there is none.
        """
        try:
            library = (load if load is not None else _pynvml)()
        except ImportError:
            return False
        try:
            library.nvmlInit()
        except library.NVMLError:
            return False
        self._library, self._error = library, library.NVMLError
        count = min(self._told(library.nvmlDeviceGetCount, 0), MOST)
        for index in range(count):
            handle = self._told(partial(library.nvmlDeviceGetHandleByIndex, index), None)
            if handle is not None:
                self._handles[index] = handle
        self._listen(library)
        return bool(self._handles)

    def facts(self, trainer_pid: int) -> list[common_pb2.DeviceFacts]:
        """Figures of the GPUs that the trainer uses, or of all when NVML does not tell which."""
        if self._library is None:
            return []
        self._hear(self._library)
        every = list(self._handles)
        mine = [index for index in every if trainer_pid and trainer_pid in self._users(index)]
        return [self._facts(self._library, index) for index in (mine if mine else every)]

    def close(self) -> None:
        """Idempotent."""
        library, self._library = self._library, None
        if library is None:
            return
        if self._events is not None:
            self._told(lambda: library.nvmlEventSetFree(self._events), None)
        self._told(library.nvmlShutdown, None)

    def _facts(self, library: Library, index: int) -> common_pb2.DeviceFacts:
        handle = self._handles[index]
        name = self._told(lambda: _text(library.nvmlDeviceGetName(handle)), "")
        reasons = self._told(lambda: library.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0)
        use = self._told(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100, -1.0)
        memory = self._told(lambda: _bytes(library.nvmlDeviceGetMemoryInfo(handle)), (-1, -1))
        clock = self._told(lambda: library.nvmlDeviceGetClockInfo(handle, _CLOCK_SM), -1)
        most_clock = self._told(lambda: library.nvmlDeviceGetMaxClockInfo(handle, _CLOCK_SM), -1)
        celsius = self._told(lambda: library.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU), -1)
        ecc_errors = self._told(
            lambda: library.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE), -1
        )
        return common_pb2.DeviceFacts(
            index=index,
            name=name[:64],
            busy=use,
            clock_mhz=clock,
            most_clock_mhz=most_clock,
            throttled=[word for word, bits in THROTTLED if reasons & bits],
            celsius=celsius,
            used_bytes=memory[0],
            memory_bytes=memory[1],
            ecc_errors=ecc_errors,
            xid=self._xids.get(index, 0),
        )

    def _users(self, index: int) -> set[int]:
        """Pids that compute on it. In a container NVML may tell none, or those of the host."""
        library = self._library
        assert library is not None
        handle = self._handles[index]
        return self._told(
            lambda: {one.pid for one in library.nvmlDeviceGetComputeRunningProcesses(handle)}, set()
        )

    def _listen(self, library: Library) -> None:
        """Register for Xid errors; GPUs or containers that do not allow it tell none."""
        self._events = self._told(library.nvmlEventSetCreate, None)
        if self._events is None:
            return
        for handle in self._handles.values():
            register = partial(library.nvmlDeviceRegisterEvents, handle, _XID, self._events)
            self._told(register, None)

    def _hear(self, library: Library) -> None:
        """Take in the Xid errors since the last time, without waiting for any."""
        if self._events is None:
            return
        for _ in range(MOST):
            try:
                event = library.nvmlEventSetWait_v2(self._events, 0)
            except library.NVMLError:  # none has happened
                return
            if event.eventType & _XID:
                device = event.device
                index = self._told(partial(library.nvmlDeviceGetIndex, device), -1)
                self._xids[index] = int(event.eventData)

    def _told(self, ask: Callable[[], Value], otherwise: Value) -> Value:
        try:
            return ask()
        except self._error:
            return otherwise


def _bytes(memory: Memory) -> tuple[int, int]:
    return memory.used, memory.total


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _pynvml() -> Library:
    return cast(Library, importlib.import_module("pynvml"))
