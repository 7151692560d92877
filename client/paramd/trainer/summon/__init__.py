"""`summon_full_params`: the training's own parameters, whole, inside the training processes.

The way of one call, and the file of each part of it:

    summon.py      the context manager; arguments.py its arguments
    call.py        one call, step by step
    guards.py      may this rank summon now?
    parties.py     which ranks take part, over which process group
    meeting.py     do all ranks come, with the same question?
    holdings.py    what this rank holds of each tensor, and where the module tree has it
    gradients.py   the same for gradients
    streams.py     which rank sends which elements (pure)
    wire.py        moves them: gather, and for writing back scatter and broadcast
    full.py        the full tensors of one call: filled, and written back
    swap.py        puts full tensors in the place of the registered ones, and back
    wrappers.py    what FSDP and DDP modules must know of it
"""

from __future__ import annotations

from paramd.trainer.summon.summon import summon_full_params

__all__ = ["summon_full_params"]
