"""The CUDA driver's own interface, as far as device arenas need it, through its exported C symbols.

    driver = load()                    # libcuda, or what PARAMD_CUDA_DRIVER names
    device = driver.device(uuid)
    handle = driver.create(device, size_bytes); descriptor = driver.export(handle)

No package and no torch is needed, so the sidecar can make memory without either. Every refusal
becomes an error that names the call, the code and what to do. tests/gpu/driver has a simulated
driver with the same symbols; `simulated` tells them apart.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, Final

from paramd.errors import ExhaustedError, UnreachableError

VARIABLE = "PARAMD_CUDA_DRIVER"
"""Environment variable: the driver's library, if it is not where the loader finds it."""

_DEFAULT = "libcuda.so.1"

_POSIX_DESCRIPTOR, _PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3
_HAS_VIRTUAL_MEMORY, _HAS_POSIX_DESCRIPTORS = 102, 103
_NON_BLOCKING = 1
_DISABLE_TIMING, _INTERPROCESS = 2, 4
_OUT_OF_MEMORY, _NOT_READY, _CAPTURE_IMPLICIT = 2, 600, 906

EVENT_HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16

CURES: Final = {
    2: "free device memory, or use a smaller model or a larger device",
    3: "this is a bug in paramd: it did not initialize the driver first",
    100: "start it where a device is visible (CUDA_VISIBLE_DEVICES, the container's devices)",
    101: "give trainer and sidecar the same devices (CUDA_VISIBLE_DEVICES)",
    304: "raise the limit of open files (ulimit -n), or let the container share descriptors",
    800: "the driver or container forbids it; attach with arena='mirror'",
    801: "this driver cannot do it; update it, or attach with arena='mirror'",
    999: "see the kernel's log for the device (dmesg); a reset of the device may be needed",
}
"""By CUresult, what to do about it."""

_OTHERWISE = "attach with arena='mirror', which needs none of this, and report the code"


class DeviceError(UnreachableError):
    """The CUDA driver is missing, or refused a call."""

    def __init__(self, text: str, *, call: str = "", code: int = 0) -> None:
        super().__init__(text)
        self.call = call
        """The driver's function; empty if there is no driver."""
        self.code = code
        """Its CUresult."""


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Prop(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", c_int)]


class _EventHandle(ctypes.Structure):
    _fields_ = [("reserved", c_char * EVENT_HANDLE_BYTES)]


_address, _size, _flags = c_uint64, c_size_t, ctypes.c_ulonglong
_out = c_void_p

SYMBOLS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, _out),
    "cuDeviceGetCount": (_out,),
    "cuDeviceGet": (_out, c_int),
    "cuDeviceGetUuid_v2": (_out, c_int),
    "cuDeviceGetAttribute": (_out, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_out, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxGetCurrent": (_out,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetAllocationGranularity": (_out, _out, c_int),
    "cuMemCreate": (_out, _size, _out, _flags),
    "cuMemRelease": (_address,),
    "cuMemExportToShareableHandle": (_out, _address, c_int, _flags),
    "cuMemImportFromShareableHandle": (_out, c_void_p, c_int),
    "cuMemAddressReserve": (_out, _size, _size, _address, _flags),
    "cuMemAddressFree": (_address, _size),
    "cuMemMap": (_address, _size, _size, _address, _flags),
    "cuMemUnmap": (_address, _size),
    "cuMemSetAccess": (_address, _size, _out, _size),
    "cuMemAllocHost_v2": (_out, _size),
    "cuMemFreeHost": (c_void_p,),
    "cuMemsetD32Async": (_address, c_uint, _size, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _address, _size, c_void_p),
    "cuMemcpyHtoDAsync_v2": (_address, c_void_p, _size, c_void_p),
    "cuStreamCreate": (_out, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamIsCapturing": (c_void_p, _out),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (_out, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuIpcGetEventHandle": (_out, c_void_p),
    "cuIpcOpenEventHandle": (_out, _EventHandle),
}
"""The driver's functions and the types of their arguments; each returns a CUresult."""


class Driver:
    """One loaded driver, initialized. Methods may be called from any thread.

    Those below "with a context" need the device's primary context to be current on the calling
    thread (`enter`).
    """

    def __init__(self, path: str) -> None:
        """Raises DeviceError: it cannot be loaded, or finds no device."""
        try:
            self._library = ctypes.CDLL(path)
            for name, types in SYMBOLS.items():
                getattr(self._library, name).argtypes = types
        except (OSError, AttributeError) as error:
            raise DeviceError(
                f"the CUDA driver {path!r} cannot be used ({error}); install one, or name its "
                f"library in {VARIABLE}"
            ) from None
        self.path = path
        self.simulated = hasattr(self._library, "paramd_standin")
        """Whether it is the simulated driver of the tests, whose device memory is the host's."""
        self._call("cuInit", 0)

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
            "(CUDA_VISIBLE_DEVICES, the container's devices)"
        )

    def device_at(self, ordinal: int) -> int:
        """The device with that number in this process."""
        device = c_int()
        self._call("cuDeviceGet", byref(device), ordinal)
        return device.value

    def uuid(self, device: int) -> bytes:
        """What identifies the device on this host."""
        found = (c_ubyte * UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", byref(found), device)
        return bytes(found)

    def why_not(self, device: int) -> str:
        """Why its memory cannot be shared by descriptors; empty if it can, as far as it says."""
        value = c_int()
        for attribute, what in (
            (_HAS_VIRTUAL_MEMORY, "virtual memory management"),
            (_HAS_POSIX_DESCRIPTORS, "sharing memory by file descriptors"),
        ):
            self._call("cuDeviceGetAttribute", byref(value), attribute, device)
            if not value.value:
                return f"the device does not support {what}"
        return ""

    def granularity(self, device: int) -> int:
        """Sizes and addresses of memory are multiples of this many bytes."""
        found = c_size_t()
        recommended = 1
        self._call("cuMemGetAllocationGranularity", byref(found), byref(_prop(device)), recommended)
        return found.value

    def create(self, device: int, size_bytes: int) -> int:
        """Allocate memory; return its handle. Needs no context.

        Raises:
            ExhaustedError: the device does not have that much memory.
        """
        handle = c_uint64()
        try:
            self._call("cuMemCreate", byref(handle), size_bytes, byref(_prop(device)), 0)
        except DeviceError as error:
            if error.code == _OUT_OF_MEMORY:
                raise ExhaustedError(f"{size_bytes:,} bytes of device memory: {error}") from None
            raise
        return handle.value

    def export(self, handle: int) -> int:
        """A new descriptor of the memory, which keeps it alive. Needs no context."""
        descriptor = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(descriptor), handle, _POSIX_DESCRIPTOR, 0)
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def import_(self, descriptor: int) -> int:
        """A handle of the memory behind a descriptor, which stays the caller's."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), descriptor, _POSIX_DESCRIPTOR)
        return handle.value

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
            access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
            self._call("cuMemSetAccess", at, size_bytes, byref(access), 1)
        except BaseException:
            self.unmap(at, size_bytes)
            raise

    def unmap(self, at: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", at, size_bytes)

    def retain(self, device: int) -> int:
        """The device's primary context, which torch uses too; made if there is none yet."""
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        return _number(context)

    def let_go(self, device: int) -> None:
        """Undo one `retain`."""
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    def enter(self, context: int) -> None:
        """Make the context current on this thread, unless one is."""
        found = c_void_p()
        self._call("cuCtxGetCurrent", byref(found))
        if not found.value:
            self._call("cuCtxSetCurrent", context)

    # With a context:

    def pinned(self, size_bytes: int) -> int:
        """The address of new page-locked host memory."""
        found = c_void_p()
        self._call("cuMemAllocHost_v2", byref(found), size_bytes)
        return _number(found)

    def free_pinned(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def stream(self) -> int:
        """A stream that does not wait for the default one."""
        made = c_void_p()
        self._call("cuStreamCreate", byref(made), _NON_BLOCKING)
        return _number(made)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int) -> None:
        """Wait until all work queued on this stream is done."""
        self._call("cuStreamSynchronize", stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether work queued on the stream is recorded into a graph now, instead of done."""
        status = c_int()
        code = self._library.cuStreamIsCapturing(stream, byref(status))
        if code not in (0, _CAPTURE_IMPLICIT):
            raise self._refused("cuStreamIsCapturing", code)
        return bool(code or status.value)

    def fill(self, at: int, value: int, count: int, stream: int) -> None:
        """Queue the writing of `count` 32-bit words."""
        self._call("cuMemsetD32Async", at, value, count, stream)

    def to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy from the device."""
        self._call("cuMemcpyDtoHAsync_v2", target, source, size_bytes, stream)

    def to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy to the device."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, size_bytes, stream)

    def event(self, *, shared: bool = False) -> int:
        """An event without times; `shared`: other processes may open it."""
        made = c_void_p()
        flags = _DISABLE_TIMING | (_INTERPROCESS if shared else 0)
        self._call("cuEventCreate", byref(made), flags)
        return _number(made)

    def event_handle(self, event: int) -> bytes:
        """With what another process opens a shared event."""
        handle = _EventHandle()
        self._call("cuIpcGetEventHandle", byref(handle), event)
        return bytes(handle)

    def open_event(self, handle: bytes) -> int:
        """The event of another process."""
        event = c_void_p()
        packed = _EventHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenEventHandle", byref(event), packed)
        return _number(event)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """Have the event stand for all work queued on the stream so far."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Have the stream's later work wait for what the event stands for now."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: int) -> bool:
        """Whether all that the event stands for is done."""
        code = self._library.cuEventQuery(event)
        if code not in (0, _NOT_READY):
            raise self._refused("cuEventQuery", code)
        return bool(code == 0)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise self._refused(name, code)

    def _refused(self, name: str, code: int) -> DeviceError:
        text = c_void_p()
        self._library.cuGetErrorName(code, byref(text))
        known = ctypes.string_at(text.value).decode() if text.value else "unknown to the driver"
        cure = CURES.get(code, _OTHERWISE)
        return DeviceError(
            f"the CUDA driver refused {name} with {code} ({known}): {cure}", call=name, code=code
        )


@cache
def _loaded(path: str) -> Driver:
    return Driver(path)


def load() -> Driver:
    """This process's driver. Raises DeviceError."""
    named = os.environ.get(VARIABLE)
    return _loaded(named if named else _DEFAULT)


def _prop(device: int) -> _Prop:
    return _Prop(_PINNED, _POSIX_DESCRIPTOR, _Location(_ON_DEVICE, device))


def _number(pointer: c_void_p) -> int:
    return pointer.value if pointer.value is not None else 0


def rounded(size_bytes: int, granularity: int) -> int:
    """`size_bytes` as a multiple of the granularity, at least one."""
    return max(-(-size_bytes // granularity), 1) * granularity
