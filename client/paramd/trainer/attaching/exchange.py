"""All-gather of small byte strings between the trainers, without pickle."""

from __future__ import annotations

import ctypes
import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paramd.trainer import exit


class Exchange:
    """The trainers' own gloo group, used to attach and later to agree.

    Creating one is collective over the default process group. Without a process group the
    world is this process alone.
    """

    def __init__(self, *, timeout_s: float) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        self.group: dist.ProcessGroup | None = None
        if self.world_size > 1:
            self.group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="paramd"
            )
            exit.register_at_exit(self)

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """All ranks' JSON messages, indexed by rank. Collective."""
        if self.group is None:
            return [message]
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([data.numel()], device="cpu"))
        # Padded to the longest message, since all-gather wants equal parts.
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        return [
            json.loads(ctypes.string_at(part.data_ptr(), int(size)))
            for part, size in zip(self._all_gather(padded), sizes, strict=True)
        ]

    def scatter(self, texts: list[str] | None) -> str:
        """Return rank 0's text for this rank; other ranks pass None. Collective."""
        if self.group is None:
            assert texts is not None
            return texts[0]
        # This group spans the world, so its ranks are the global ones.
        parts = [bytearray(text.encode()) for text in texts] if texts is not None else []
        size = torch.tensor([max((len(part) for part in parts), default=0)], device="cpu")
        dist.broadcast(size, src=0, group=self.group)
        mine = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        padded = [torch.frombuffer(part.ljust(int(size)), dtype=torch.uint8) for part in parts]
        dist.scatter(mine, padded if parts else None, src=0, group=self.group)
        return ctypes.string_at(mine.data_ptr(), int(size)).decode().rstrip(" ")

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor, group=self.group)
        return parts

    def close(self) -> None:
        """Destroy the group. Local; other ranks may still hold theirs."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    def leave(self) -> None:
        """Process exit; an unfinished round keeps the group alive (see agreement.py)."""
        self.close()


def collective_timeout_s() -> float | None:
    """The shortest timeout of the training's collectives; None when unknown."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: Any = dist.group.WORLD
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return float(min(b.options._timeout.total_seconds() for b in backends))
    except (AttributeError, RuntimeError, ValueError):
        # Another torch, or a backend without options.
        return None
