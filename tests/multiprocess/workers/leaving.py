"""Trainings that are attached and simply end, right after an update; 2 ranks, many exits.

Each exit is a process of its own, forked by a parent that has imported what it needs. On rank
1 the last update comes `late_s` after rank 0's, so that rank 0 leaves with a round under way.

    leaving.py late_s...
"""

import gc
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from paramd.trainer.attaching.exchange import Exchange
from paramd.trainer.boundary.agreement import NOTHING, Agreement
from tests.ending import end

LASTS: list[object] = []
"""What lives until the interpreter clears its modules, as attachments do."""


def leave_after_an_update(rank: int, store: Path, *, late_s: float, destroys: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    exchange = Exchange(timeout_s=30.0)
    agreement = Agreement(exchange.group, timeout_s=10.0)
    LASTS.extend((exchange, agreement))
    for last in (False, True):
        if last and rank == 1:
            time.sleep(late_s)
        agreement.collect()
        agreement.launch(NOTHING, pending=True, stay=False, step_time_ns=0)
    if destroys:
        dist.destroy_process_group()


def leaves(lates_s: list[float]) -> bool:
    """Forks two ranks for each. Returns True in a child, which is to end by itself."""
    folder = Path(tempfile.mkdtemp())
    for number, late_s in enumerate(lates_s):
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                store = folder / str(number)
                leave_after_an_update(rank, store, late_s=late_s, destroys=number % 2 == 1)
                return True
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(f"exit {statuses}", flush=True)
    shutil.rmtree(folder)
    return False


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The interpreters of the children need not look at all of PyTorch's objects.
    gc.freeze()
    # The parent holds no group; its children end as a training script does.
    if not leaves([float(late_s) for late_s in sys.argv[1:]]):
        end(lambda: None)
