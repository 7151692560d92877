"""The functions of the CUDA driver that device arenas need, and the same of HIP's runtime.

One table of CUDA's names and the types of their arguments; HIP's follow from it by a rule, but for
those listed here. Shared numbers and layouts have no name of HIP's: the codes of refusals, flags,
allocation properties, access descriptors and event handles (checked against hip_runtime_api.h of
HIP 6.3 and 7).
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, Final

POSIX_DESCRIPTOR, PINNED, ON_DEVICE, READ_WRITE = 1, 1, 1, 3
NON_BLOCKING = 1
DISABLE_TIMING, INTERPROCESS = 2, 4
OUT_OF_MEMORY, NOT_READY, CAPTURE_IMPLICIT = 2, 600, 906

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
"""By CUresult or hipError_t, what to do about it."""


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Prop(ctypes.Structure):
    """CUmemAllocationProp, hipMemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc, hipMemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


class EventHandle(ctypes.Structure):
    """CUipcEventHandle, hipIpcEventHandle_t; passed by value."""

    _fields_ = [("reserved", c_char * EVENT_HANDLE_BYTES)]


_address, _size, _flags = c_uint64, c_size_t, ctypes.c_ulonglong
_out = c_void_p

CONTEXTS: Final[dict[str, tuple[Any, ...]]] = {
    "cuDevicePrimaryCtxRetain": (_out, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxGetCurrent": (_out,),
    "cuCtxSetCurrent": (c_void_p,),
}
"""CUDA's alone: HIP's threads have a current device, and the runtime keeps contexts to itself."""

SHARED: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, _out),
    "cuDeviceGetCount": (_out,),
    "cuDeviceGet": (_out, c_int),
    "cuDeviceGetUuid_v2": (_out, c_int),
    "cuDeviceGetAttribute": (_out, c_int, c_int),
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
    "cuMemHostRegister_v2": (c_void_p, _size, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemsetD32Async": (_address, c_uint, _size, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _address, _size, c_void_p),
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
    "cuIpcOpenEventHandle": (_out, EventHandle),
}
"""Functions of both, by CUDA's name; each returns a CUresult or hipError_t."""

_HIP_NAMES: Final = {
    "cuGetErrorName": "hipDrvGetErrorName",
    "cuDeviceGetCount": "hipGetDeviceCount",
    "cuMemAllocHost_v2": "hipHostMalloc",
    "cuMemFreeHost": "hipHostFree",
    "cuMemHostRegister_v2": "hipHostRegister",
    "cuMemHostUnregister": "hipHostUnregister",
    "cuStreamCreate": "hipStreamCreateWithFlags",
    "cuEventCreate": "hipEventCreateWithFlags",
}

_HIP_TYPES: Final[dict[str, tuple[Any, ...]]] = {
    "hipHostMalloc": (_out, _size, c_uint),
    "hipGetDevice": (_out,),
    "hipSetDevice": (c_int,),
    "hipRuntimeGetVersion": (_out,),
}

HIP_VALUE_VERSION: Final = 7_01_00000
"""From this version of HIP on, imported descriptors are passed by value, not by address."""


def hip_name(name: str) -> str:
    """HIP's name of a function of `SHARED`."""
    return _HIP_NAMES.get(name, "hip" + name.removeprefix("cu").removesuffix("_v2"))


CUDA_SYMBOLS: Final = SHARED | CONTEXTS
HIP_SYMBOLS: Final = {hip_name(name): types for name, types in SHARED.items()} | _HIP_TYPES
"""The functions of each, and the types of their arguments."""
