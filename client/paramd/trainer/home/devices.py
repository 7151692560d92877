"""Copies from CUDA devices into a host arena; the only module that talks to CUDA directly.

    copies = DeviceCopies(address, size_bytes)    # registers the arena as pinned, if possible
    copies.to_host(targets, sources)              # returns when the bytes have arrived
    copies.close()

A side stream per device waits for the training's current stream, copies, and records one event;
the host waits for those events only. Unused when all tensors are in host memory.
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
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._pinned = size_bytes > 0 and _register(address, size_bytes)

    def to_host(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Fill each target, in host memory, from its source on any device.

        Ordered after everything the training has queued on its current streams.
        """
        used: dict[torch.device, torch.cuda.Stream] = {}
        for target, source in zip(targets, sources, strict=True):
            if source.device.type != "cuda":
                target.copy_(source)
                continue
            stream = used.get(source.device)
            if stream is None:
                stream = used[source.device] = self._behind_training(source.device)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for device, stream in used.items():
            self._events[device].record(stream)
        for device in used:
            self._events[device].synchronize()

    def close(self) -> None:
        """Unregister the memory. Idempotent."""
        if self._pinned:
            self._pinned = False
            _runtime().cudaHostUnregister(self._address)

    def _behind_training(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
            self._events[device] = torch.cuda.Event(blocking=True)
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream


def finish_copies(devices: Sequence[torch.device]) -> None:
    """Wait for everything queued on these devices' current streams."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _register(address: int, size_bytes: int) -> bool:
    """Register host memory with CUDA, so that copies run at link speed."""
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
    return torch.cuda.cudart()
