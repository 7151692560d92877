"""Gloo groups with one worker thread each, for ranks that run many of DTensor's collectives; and
one of what ranks ask each other.

Torch 2.13 gives each group two. Both write the name of the collective that they have completed
into one `std::string`, without a lock (`ProcessGroupGloo::runLoop`). The name of DTensor's
all-gather, ALLGATHER_COALESCED, is too long to be kept in the string itself. So two writes at once
free its memory twice, or write into it when it is free, and the process dies of that in some later
malloc. What paramd itself starts in a training has short names (docs/decisions.md).
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class OneThread(dist.ProcessGroupGloo):
    """What `init_process_group` makes, which takes no options for gloo, with one worker thread."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


def use_one_thread() -> None:
    """From now on this process makes its gloo groups so."""
    distributed_c10d.ProcessGroupGloo = OneThread


def all_see(path: Path) -> bool:
    """Whether that file is there for every rank, asked at once."""
    seen = torch.tensor([int(path.exists())])
    if dist.is_initialized():
        dist.all_reduce(seen, op=dist.ReduceOp.MIN)
    return bool(seen.item())
