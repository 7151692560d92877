"""Apply a record of an edit to a copy of its elements: the torch part of PreviewEdit.

Works block by block to bound temporary memory, with the code that the trainer runs on the arena.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from paramd.memory.edit_program import NO_DATA, Record
from paramd.tensors.edit_ops import run
from paramd_service.sidecar.statistics import reduce

BLOCK_NUMEL = 1 << 18


def try_record(
    snapshot: memoryview,
    begin_bytes: int,
    memory: memoryview,
    record: Record,
    dtype: str,
    before: reduce.Reduced,
    after: reduce.Reduced,
) -> None:
    """Add a record's elements, before and after, to statistics. The view's first element lies at
    `begin_bytes` of the snapshot; `dtype`: the parameter's; the record's is of its size."""
    reduce.item_bytes(dtype)
    kind = getattr(torch, record.dtype)
    end_bytes = begin_bytes + record.arena_end - record.arena_begin
    raw = torch.frombuffer(snapshot[begin_bytes:end_bytes], dtype=kind)
    view = raw.as_strided(record.sizes, record.strides)
    data = None
    # Keep no pre-image: it could overwrite the data.
    record = replace(record, preimage_begin=NO_DATA)
    if record.data_begin != NO_DATA:
        end = record.data_begin + record.size_bytes
        data = torch.frombuffer(memory[record.data_begin : end], dtype=kind).view(record.sizes)
    for now, operand in _blocks(view, data):
        block = now.contiguous()
        reduce.add_elements(before, block.view(getattr(torch, dtype)), dtype)
        changed = block.clone()
        run(record, changed, operand, None)
        reduce.add_elements(after, changed.view(getattr(torch, dtype)), dtype)


def _blocks(
    view: torch.Tensor, data: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Matching parts of both, at most `BLOCK_NUMEL` elements each, in the same order."""
    if view.numel() <= BLOCK_NUMEL or view.dim() == 0:
        yield view, data
        return
    rows = max(1, BLOCK_NUMEL * view.shape[0] // view.numel())
    for begin in range(0, view.shape[0], rows):
        end = min(begin + rows, view.shape[0])
        part = data[begin:end] if data is not None else None
        if rows > 1 or view.dim() == 1:
            yield view[begin:end], part
        else:
            yield from _blocks(view[begin], part[0] if part is not None else None)
