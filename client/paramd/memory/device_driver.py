"""The CUDA driver's own interface, as far as device arenas need it, through its exported C symbols.

    driver = load()                    # libcuda, or the library in PARAMD_CUDA_DRIVER
    driver = load(HIP)                 # the same of HIP's runtime (PARAMD_HIP_RUNTIME)
    device = driver.device(uuid)
    handle = driver.create(device, size_bytes); descriptor = driver.export(handle)

No package and no torch is needed, so the sidecar can make memory without either. Every refusal
becomes an error that names the call, the code and the remedy. tests/gpu/driver has a simulated
driver with the same symbols; `simulated` distinguishes them.

Only NVIDIA's management library (`used_bytes`) reports the device memory of this process: the
driver reports free memory, only within a context, and for all processes together.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_ulonglong,
    c_void_p,
)
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final
from uuid import UUID

from paramd.errors import ExhaustedError, UnreachableError
from paramd.memory import device_symbols as abi
from paramd.memory.device_symbols import CUDA_SYMBOLS, HIP_SYMBOLS

CUDA: Final = "cuda"
HIP: Final = "hip"

VARIABLE = "PARAMD_CUDA_DRIVER"
HIP_VARIABLE = "PARAMD_HIP_RUNTIME"
"""Environment variables that name the library, if it is not in its usual place."""

_DEFAULT = "libcuda.so.1"
_HIP_DEFAULT = "libamdhip64.so"

_CUDA_ATTRIBUTES = ((102, "virtual memory management"), (103, "sharing memory by file descriptors"))
_HIP_ATTRIBUTES = ((89, "virtual memory management"),)
"""Features that arenas need, with the number by which the device is asked."""

_OTHERWISE = "attach with arena='mirror', which needs none of this, and report the code"

LIBRARY = "libnvidia-ml.so.1"
_NOT_AVAILABLE = (1 << 64) - 1
_MOST_PROCESSES = 256


class DeviceError(UnreachableError):
    """The CUDA driver or HIP runtime is missing, or refused a call."""

    def __init__(self, text: str, *, call: str = "", code: int = 0) -> None:
        super().__init__(text)
        self.call = call
        """The function; empty if there is no driver."""
        self.code = code
        """The call's CUresult or hipError_t."""


class Driver:
    """The CUDA driver, loaded and initialized. Methods may be called from any thread.

    Those below "with a context" need the device's primary context to be current on the calling
    thread (`enter`, `inside`).
    """

    kind: ClassVar[str] = CUDA
    """CUDA or HIP, as processes report it to one another."""
    title: ClassVar[str] = "CUDA driver"
    variable: ClassVar[str] = VARIABLE
    symbols: ClassVar[Mapping[str, Sequence[Any]]] = CUDA_SYMBOLS
    attributes: ClassVar[Sequence[tuple[int, str]]] = _CUDA_ATTRIBUTES
    visible: ClassVar[str] = "CUDA_VISIBLE_DEVICES"
    """The variable that selects devices."""

    def __init__(self, path: str) -> None:
        """Raises DeviceError: it cannot be loaded, or finds no device."""
        try:
            self._library = ctypes.CDLL(path)
            for name, types in self.symbols.items():
                getattr(self._library, name).argtypes = types
        except (OSError, AttributeError) as error:
            raise DeviceError(
                f"the {self.title} {path!r} cannot be used ({error}); install one, or name its "
                f"library in {self.variable}"
            ) from None
        self.path = path
        self.simulated = hasattr(self._library, "paramd_standin")
        """Whether it is the simulated driver of the tests, whose device memory is the host's."""
        self._call("cuInit", 0)

    def name(self, name: str) -> str:
        return name

    def device(self, uuid: bytes) -> int:
        """The device with that UUID: processes may number their devices differently."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        for ordinal in range(count.value):
            device = self.device_at(ordinal)
            if self.uuid(device) == uuid:
                return device
        raise DeviceError(
            f"device {uuid.hex()} is not visible here; give trainer and sidecar the same devices "
            f"({self.visible}, the container's devices)"
        )

    def device_at(self, ordinal: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), ordinal)
        return device.value

    def uuid(self, device: int) -> bytes:
        """The device's identifier on this host."""
        found = (c_ubyte * abi.UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", byref(found), device)
        return bytes(found)

    def why_not(self, device: int) -> str:
        """Why its memory cannot be shared by descriptors; empty if its attributes allow it."""
        value = c_int()
        for attribute, what in self.attributes:
            self._call("cuDeviceGetAttribute", byref(value), attribute, device)
            if not value.value:
                return f"the device does not support {what}"
        return ""

    def granularity(self, device: int) -> int:
        """Sizes and addresses of memory are multiples of this many bytes."""
        found = c_size_t()
        recommended = 1
        with self._on(device):
            self._call(
                "cuMemGetAllocationGranularity", byref(found), byref(_prop(device)), recommended
            )
        return found.value

    def create(self, device: int, size_bytes: int) -> int:
        """Allocate memory, without a context; return its handle. ExhaustedError: no memory."""
        handle = c_uint64()
        try:
            with self._on(device):
                self._call("cuMemCreate", byref(handle), size_bytes, byref(_prop(device)), 0)
        except DeviceError as error:
            if error.code == abi.OUT_OF_MEMORY:
                raise ExhaustedError(f"{size_bytes:,} bytes of device memory: {error}") from None
            raise
        return handle.value

    def export(self, handle: int) -> int:
        """A new descriptor of the memory, which keeps it alive. Needs no context."""
        descriptor = c_int(-1)
        self._call(
            "cuMemExportToShareableHandle", byref(descriptor), handle, abi.POSIX_DESCRIPTOR, 0
        )
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def import_(self, descriptor: int, device: int) -> int:
        """A handle of the memory behind a descriptor, which stays the caller's."""
        handle, told = c_uint64(), self._told(descriptor)
        with self._on(device):
            self._call("cuMemImportFromShareableHandle", byref(handle), told, abi.POSIX_DESCRIPTOR)
        return handle.value

    def _told(self, descriptor: int) -> Any:
        """A descriptor as it is passed for import."""
        return descriptor

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Memory needs the device's number alone, and nothing of the thread."""
        yield

    def release(self, handle: int) -> None:
        """Give a handle back; maps and descriptors keep the memory."""
        self._call("cuMemRelease", handle)

    def reserve(self, size_bytes: int) -> int:
        """The first of `size_bytes` free addresses."""
        at = c_uint64()
        self._call("cuMemAddressReserve", byref(at), size_bytes, 0, 0, 0)
        return at.value

    def free_addresses(self, at: int, size_bytes: int) -> None:
        self._call("cuMemAddressFree", at, size_bytes)

    def map(self, at: int, size_bytes: int, handle: int, device: int) -> None:
        """Map memory at reserved addresses, for the device to read and write."""
        self._call("cuMemMap", at, size_bytes, 0, handle, 0)
        try:
            access = abi.Access(abi.Location(abi.ON_DEVICE, device), abi.READ_WRITE)
            self._call("cuMemSetAccess", at, size_bytes, byref(access), 1)
        except BaseException:
            self.unmap(at, size_bytes)
            raise

    def unmap(self, at: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", at, size_bytes)

    def retain(self, device: int) -> int:
        """The device's primary context, which torch uses too; made if there is none yet."""
        return self._made("cuDevicePrimaryCtxRetain", device)

    def let_go(self, device: int) -> None:
        """Undo one `retain`."""
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    def enter(self, context: int) -> None:
        """Make the context current on this thread until it ends."""
        if self._current() != context:
            self._make_current(context)

    @contextmanager
    def inside(self, context: int) -> Iterator[None]:
        """Make the context current on a foreign thread, and then the previous one."""
        before = self._current()
        self.enter(context)
        try:
            yield
        finally:
            # Without a previous one, nobody misses it.
            if before not in (0, context):
                self._make_current(before)

    def _current(self) -> int:
        return self._made("cuCtxGetCurrent")

    def _make_current(self, context: int) -> None:
        self._call("cuCtxSetCurrent", context)

    # With a context:

    def pinned(self, size_bytes: int) -> int:
        """The address of new page-locked host memory."""
        return self._made("cuMemAllocHost_v2", size_bytes)

    def free_pinned(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def lock_pages(self, address: int, size_bytes: int) -> None:
        """Page-lock host memory that is mapped here. Slow."""
        self._call("cuMemHostRegister_v2", address, size_bytes, 0)

    def unlock_pages(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def stream(self) -> int:
        """A stream that does not wait for the default one."""
        return self._made("cuStreamCreate", abi.NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int) -> None:
        """Wait until all work queued on this stream is done."""
        self._call("cuStreamSynchronize", stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether work queued on the stream is recorded into a graph now, instead of done."""
        status = c_int()
        code = self._code("cuStreamIsCapturing", stream, byref(status))
        if code not in (0, abi.CAPTURE_IMPLICIT):
            raise self._refused("cuStreamIsCapturing", code)
        return bool(code or status.value)

    def fill(self, at: int, value: int, count: int, stream: int) -> None:
        """Queue the writing of `count` 32-bit words."""
        self._call("cuMemsetD32Async", at, value, count, stream)

    def to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy from the device."""
        self._call("cuMemcpyDtoHAsync_v2", target, source, size_bytes, stream)

    def event(self, *, shared: bool = False) -> int:
        """An event without times; `shared`: other processes may open it."""
        return self._made("cuEventCreate", abi.DISABLE_TIMING | (abi.INTERPROCESS if shared else 0))

    def event_handle(self, event: int) -> bytes:
        """Handle by which another process opens a shared event."""
        handle = abi.EventHandle()
        self._call("cuIpcGetEventHandle", byref(handle), event)
        return bytes(handle)

    def open_event(self, handle: bytes) -> int:
        return self._made("cuIpcOpenEventHandle", abi.EventHandle.from_buffer_copy(handle))

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """Have the event stand for all work queued on the stream so far."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Have the stream's later work wait for what the event stands for now."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: int) -> bool:
        code = self._code("cuEventQuery", event)
        if code not in (0, abi.NOT_READY):
            raise self._refused("cuEventQuery", code)
        return bool(code == 0)

    def _code(self, name: str, *arguments: Any) -> int:
        code: int = getattr(self._library, self.name(name))(*arguments)
        return code

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._code(name, *arguments)
        if code:
            raise self._refused(name, code)

    def _made(self, name: str, *arguments: Any) -> int:
        """The value that a function writes to its first argument."""
        found = c_void_p()
        self._call(name, byref(found), *arguments)
        return found.value if found.value is not None else 0

    def _refused(self, name: str, code: int) -> DeviceError:
        text, call = c_void_p(), self.name(name)
        self._code("cuGetErrorName", code, byref(text))
        known = ctypes.string_at(text.value).decode() if text.value else "unknown to it"
        cure = abi.CURES.get(code, _OTHERWISE).replace(Driver.visible, self.visible)
        return DeviceError(
            f"the {self.title} refused {call} with {code} ({known}): {cure}", call=call, code=code
        )


class HipDriver(Driver):
    """HIP's runtime in the same role. It opens every visible device as soon as it is loaded.

    Contexts are the devices' numbers, from 1: each thread has a current device, and imported
    memory, or memory made by some versions, is on that one whatever the arguments.
    """

    kind = HIP
    title = "HIP runtime"
    variable = HIP_VARIABLE
    symbols = HIP_SYMBOLS
    attributes = _HIP_ATTRIBUTES
    visible = "HIP_VISIBLE_DEVICES"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        version = c_int()
        self._call("hipRuntimeGetVersion", byref(version))
        self._by_value = version.value >= abi.HIP_VALUE_VERSION

    def name(self, name: str) -> str:
        return abi.hip_name(name) if name.startswith("cu") else name

    def _told(self, descriptor: int) -> Any:
        return descriptor if self._by_value else byref(c_int(descriptor))

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        with self.inside(self.retain(device)):
            yield

    def retain(self, device: int) -> int:
        return device + 1

    def let_go(self, device: int) -> None:
        """Nothing: the runtime keeps its devices as long as the process lives."""

    def _current(self) -> int:
        device = c_int()
        self._call("hipGetDevice", byref(device))
        return device.value + 1

    def _make_current(self, context: int) -> None:
        self._call("hipSetDevice", context - 1)

    def pinned(self, size_bytes: int) -> int:
        return self._made("cuMemAllocHost_v2", size_bytes, 0)


@cache
def _loaded(kind: str, path: str) -> Driver:
    return HipDriver(path) if kind == HIP else Driver(path)


def load(kind: str = CUDA) -> Driver:
    """This process's driver of that kind. Raises DeviceError."""
    named = os.environ.get(HIP_VARIABLE if kind == HIP else VARIABLE)
    if named:
        return _loaded(kind, named)
    return _loaded(kind, _hip_library() if kind == HIP else _DEFAULT)


def _hip_library() -> str:
    """torch's own if it brought one: two runtimes in a process know nothing of each other."""
    loaded = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
    for path in ("/" + line.partition("/")[2] for line in loaded):
        if Path(path).name.startswith(_HIP_DEFAULT):
            return path
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        bundled = Path(torch.origin).parent / "lib" / _HIP_DEFAULT
        if bundled.exists():
            return str(bundled)
    return _HIP_DEFAULT


def _prop(device: int) -> abi.Prop:
    return abi.Prop(abi.PINNED, abi.POSIX_DESCRIPTOR, abi.Location(abi.ON_DEVICE, device))


def rounded(size_bytes: int, granularity: int) -> int:
    """`size_bytes` as a multiple of the granularity, at least one."""
    return max(-(-size_bytes // granularity), 1) * granularity


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = [
        ("pid", c_uint),
        ("used_bytes", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    ]


def used_bytes(uuid: bytes, library: str = LIBRARY) -> int | None:
    """Device memory of this process; 0 while the device does not know the process.

    None where the library is missing or does not tell. In a container that numbers processes for
    itself it is always 0.
    """
    nvml = _management(library)
    if nvml is None:
        return None
    device, count = c_void_p(), c_uint(_MOST_PROCESSES)
    found = (_Process * _MOST_PROCESSES)()
    if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{UUID(bytes=uuid)}".encode(), byref(device)):
        return None
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, byref(count), found):
        return None
    used = [one.used_bytes for one in found[: count.value] if one.pid == os.getpid()]
    return sum(used) if _NOT_AVAILABLE not in used else None


@cache
def _management(library: str) -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL(library)
        nvml.nvmlDeviceGetHandleByUUID.argtypes = (c_char_p, POINTER(c_void_p))
        nvml.nvmlDeviceGetComputeRunningProcesses_v3.argtypes = (
            c_void_p,
            POINTER(c_uint),
            POINTER(_Process),
        )
        return nvml if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None
