"""Copies from an accelerator into a host arena, through torch's streams of any device.

    copies = DeviceCopies(address, size_bytes)    # registers the arena as pinned, if possible
    copies.to_host(targets, sources)              # returns when the bytes have arrived
    copies.close()

A side stream per device waits for the training's current stream, copies, and records one event;
the host waits for those events only. Unused when all tensors are in host memory. CUDA and HIP can
register memory that was made elsewhere; torch has no such call for other accelerators, whose copies
therefore wait one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

log = logging.getLogger("paramd")


class DeviceCopies:
    """Copies into one arena. Training thread only."""

    def __init__(self, address: int, size_bytes: int) -> None:
        """The memory must stay mapped until `close`."""
        self._address = address
        self._streams: dict[torch.device, torch.Stream] = {}
        self._events: dict[torch.device, torch.Event] = {}
        self._pinned = size_bytes > 0 and _register(address, size_bytes)

    def to_host(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Fill each target, in host memory, from its source on any device.

        Ordered after everything the training has queued on its current streams.
        """
        used: dict[torch.device, torch.Stream] = {}
        for target, source in zip(targets, sources, strict=True):
            if source.device.type == "cpu":
                target.copy_(source)
                continue
            stream = used.get(source.device)
            if stream is None:
                stream = used[source.device] = self._behind_training(source.device)
            with stream:
                # What "non-blocking" means for memory that is not pinned differs between backends.
                target.copy_(source, non_blocking=self._pinned)
        for device, stream in used.items():
            self._events[device].record(stream)
        for device in used:
            self._events[device].synchronize()

    def close(self) -> None:
        """Unregister the memory. Idempotent."""
        if self._pinned:
            self._pinned = False
            _runtime().cudaHostUnregister(self._address)

    def _behind_training(self, device: torch.device) -> torch.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
            self._events[device] = torch.Event(device, blocking=True)
        stream.wait_stream(torch.accelerator.current_stream(device))
        return stream


def finish_copies(devices: Sequence[torch.device]) -> None:
    """Wait for everything queued on these devices' current streams."""
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def _register(address: int, size_bytes: int) -> bool:
    """Register host memory with the accelerator's runtime, so that copies run at link speed."""
    try:
        found = _runtime().cudaHostRegister(address, size_bytes, 0)
    except (AttributeError, RuntimeError, TypeError) as error:
        found = error
    if isinstance(found, Exception) or int(found) != 0:
        log.warning(
            "paramd: %s bytes of host memory could not be pinned (%s); copies from the device "
            "take longer",
            f"{size_bytes:,}",
            found,
        )
        return False
    return True


def _runtime() -> Any:
    """CUDA's runtime or HIP's; AttributeError where the accelerator has neither."""
    return torch.get_device_module().cudart()
