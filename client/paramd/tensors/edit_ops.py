"""Executes records of an edit program on torch tensors, for edits and their dry runs."""

from __future__ import annotations

import torch

from paramd.layout.edits.kinds import KINDS, EditKind
from paramd.layout.types import row_major
from paramd.memory.edit_program import NO_DATA, Record

CHUNK_BYTES = 256 << 10
"""Bytes swapped at a time, so that three chunks fit in a core's cache."""


class Views:
    """Tensor views of one mapped memory; making them touches no page."""

    def __init__(self, memory: memoryview | torch.Tensor) -> None:
        """`memory`: a map, or its bytes as a tensor."""
        self._memory = memory
        self._whole: dict[str, torch.Tensor] = {}

    def at(
        self, dtype: str, begin: int, sizes: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        """A strided view from byte `begin` on; strides count elements."""
        whole = self._whole.get(dtype)
        if whole is None:
            kind = getattr(torch, dtype)
            count = self._memory.nbytes // kind.itemsize
            if isinstance(self._memory, torch.Tensor):
                whole = self._memory[: count * kind.itemsize].view(kind)
            else:
                whole = torch.frombuffer(self._memory, dtype=kind, count=count)
            self._whole[dtype] = whole
        return whole.as_strided(sizes, strides, begin // whole.itemsize)

    def dense(self, record: Record, begin: int) -> torch.Tensor | None:
        """A row-major view with the record's shape; None for NO_DATA."""
        if begin == NO_DATA:
            return None
        return self.at(record.dtype, begin, record.sizes, row_major(record.sizes))


def run(
    record: Record, target: torch.Tensor, data: torch.Tensor | None, preimage: torch.Tensor | None
) -> None:
    """Apply a record to `target` in its own dtype, saving the old values in `preimage`.

    All tensors have the record's dtype and shape. Call under `torch.no_grad`.
    """
    if (
        record.op is EditKind.SET
        and data is not None
        and record.data_begin == record.preimage_begin
    ):
        _swap(target, data)
        return
    if preimage is not None:
        preimage.copy_(target)
    KINDS[record.op].apply(target, record, data)


def _swap(target: torch.Tensor, data: torch.Tensor) -> None:
    if not target.is_contiguous():
        before = target.clone()
        target.copy_(data)
        data.copy_(before)
        return
    flat, other = target.view(-1), data.view(-1)
    chunk = max(1, CHUNK_BYTES // target.itemsize)
    room = torch.empty(min(chunk, flat.numel()), dtype=target.dtype, device=target.device)
    for begin in range(0, flat.numel(), chunk):
        mine, its = flat[begin : begin + chunk], other[begin : begin + chunk]
        kept = room[: mine.numel()]
        kept.copy_(mine)
        mine.copy_(its)
        its.copy_(kept)
