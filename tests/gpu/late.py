"""Updates of workers as a device makes them: queued, and done later than the host believes."""

import os
import struct
from itertools import count

import torch

from paramd.memory.device_driver import CUDA, HIP, HIP_VARIABLE, VARIABLE, DeviceError, load

QUEUE = "PARAMD_TESTS_QUEUE"
"""Environment variable: how many fills the device may be behind; without end it falls back."""

_queued = count(1)
_NOT_THERE = {1, 201}
"""CUresults for memory that is not the device's, and before there is a context."""


def finish() -> None:
    """Wait for the simulated device, as a training does that looks at its loss; else nothing."""
    if _simulated():
        load(_simulated()).synchronize(0)


def late_fill(part: torch.Tensor, value: float) -> None:
    """Write to all elements; of the simulated device's memory on its stream, so late."""
    whole = part.dtype is torch.float32 and part.is_contiguous()
    kind = _simulated()
    if kind and whole:
        (bits,) = struct.unpack("I", struct.pack("f", value))
        try:
            load(kind).fill(part.data_ptr(), bits, part.numel(), 0)
            if next(_queued) % int(os.environ.get(QUEUE, "32")) == 0:
                load(kind).synchronize(0)
            return
        except DeviceError as error:
            if error.code not in _NOT_THERE:
                raise
    part.fill_(value)


def _simulated() -> str:
    """Which kind of driver is simulated; empty if none is."""
    if HIP_VARIABLE in os.environ:
        return HIP
    return CUDA if VARIABLE in os.environ else ""
