"""`summon_full_params`: the full parameters, inside the training processes.

One call, in order, and the file of each part:

    summon.py      the context manager; arguments.py its arguments
    call.py        one call, step by step
    guards.py      may this rank summon now?
    parties.py     which ranks take part, over which process group
    meeting.py     do all ranks arrive, asking the same?
    holdings.py    what this rank holds of each tensor, and where the module tree has it
    gradients.py   the same for gradients
    streams.py     which rank sends which elements (pure)
    wire.py        moves them: gather; for writing back, scatter and broadcast
    full.py        the full tensors of one call: filled, and written back
    swap.py        swaps full tensors in for the registered ones, and back
    wrappers.py    what FSDP and DDP modules must know about it
"""

from __future__ import annotations

from paramd.trainer.summon.summon import summon_full_params

__all__ = ["summon_full_params"]
