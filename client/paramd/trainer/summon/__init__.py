"""`summon_full_params`: the full parameters, inside the training processes.

One call, in order, and the file of each part:

    summon.py     the context manager, and one call, step by step
    guards.py     its arguments; may this rank summon now? what FSDP and DDP modules must know
    meeting.py    which ranks take part, what each holds, gradients too; do all arrive?
    wire.py       which rank sends which elements; gather, scatter and broadcast
    full.py       the full tensors of one call: filled, swapped in and back, written back
"""

from __future__ import annotations

from paramd.trainer.summon.summon import summon_full_params

__all__ = ["summon_full_params"]
