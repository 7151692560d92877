"""All-gather of small byte strings between the trainers, without pickle."""

from __future__ import annotations

import ctypes
import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Exchange:
    """The trainers' own gloo group: used to attach, and later to agree.

    Making one is collective over all ranks of the default process group. Without a
    process group the world is this process alone.
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

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Everybody's JSON message, indexed by rank. Collective."""
        if self.group is None:
            return [message]
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        sizes = torch.empty(self.world_size, dtype=torch.int64)
        dist.all_gather_into_tensor(sizes, torch.tensor([data.numel()]), group=self.group)
        # Every rank's message is padded to the longest, as all-gather wants equal parts.
        longest = int(sizes.max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: data.numel()] = data
        everybody = torch.empty(self.world_size * longest, dtype=torch.uint8)
        dist.all_gather_into_tensor(everybody, mine, group=self.group)
        raw = ctypes.string_at(everybody.data_ptr(), everybody.numel())
        return [
            json.loads(raw[rank * longest : rank * longest + int(size)])
            for rank, size in enumerate(sizes)
        ]

    def close(self) -> None:
        """Gives the group back. Local; other ranks may still hold theirs."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None
