"""Bytes of some tensors of a pinned snapshot, read from all ranks and put together."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from paramd.layout.landings import Landing
from paramd.layout.plan import RankRead, ReadPlan, ResultTensor
from paramd.layout.types import Box
from paramd.mesh.peers.pins import Pinned
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.stream import Expected, Reader

if TYPE_CHECKING:
    import torch

GAP_BYTES: Final = 256 << 10
"""Bytes of nobody that are read along rather than skipped."""


async def read_batch(
    sidecars: Sidecars,
    plan: ReadPlan,
    batch: Sequence[int],
    pinned: Pinned,
    deadline_s: float,
) -> dict[int, bytearray]:
    """The row-major bytes of some tensors, read from all ranks at once."""
    found = {index: bytearray(plan.tensors[index].size_bytes) for index in batch}
    wanted = set(batch)

    async def one_rank(read: RankRead) -> None:
        landings = [one for one in read.landings if one.tensor in wanted]
        for run in _runs(landings):
            begin, end = run[0].begin_bytes, max(one.end_bytes for one in run)
            data = await _range(sidecars, pinned, read.rank, begin, end, deadline_s)
            for one in run:
                part = memoryview(data)[one.begin_bytes - begin : one.end_bytes - begin]
                await asyncio.to_thread(
                    _place, part, one, plan.tensors[one.tensor], found[one.tensor]
                )

    tasks = [asyncio.ensure_future(one_rank(read)) for read in plan.ranks]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
    return found


def _runs(landings: Sequence[Landing]) -> Iterator[list[Landing]]:
    """Landings that lie close together in a snapshot, to be read at once."""
    run: list[Landing] = []
    end = 0
    for one in sorted(landings, key=lambda landing: landing.begin_bytes):
        if run and one.begin_bytes > end + GAP_BYTES:
            yield run
            run = []
        end = max(end, one.end_bytes) if run else one.end_bytes
        run.append(one)
    if run:
        yield run


class _Buffer:
    """A sink for [begin, end) of a snapshot."""

    def __init__(self, begin: int, end: int) -> None:
        self.data = bytearray(end - begin)
        self._begin = begin
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    def write(self, offset_bytes: int, address: int, size_bytes: int) -> None:
        ctypes.memmove(self._address + offset_bytes - self._begin, address, size_bytes)


async def _range(
    sidecars: Sidecars, pinned: Pinned, rank: int, begin: int, end: int, deadline_s: float
) -> bytearray:
    buffer = _Buffer(begin, end)
    expected = Expected(pinned.epoch, pinned.step, end)
    reader = Reader(sidecars.source(pinned.pins[rank], end_bytes=end), buffer, expected)
    reader.offset_bytes = begin
    await reader.run(deadline_s)
    return buffer.data


def _place(data: memoryview, landing: Landing, tensor: ResultTensor, result: bytearray) -> None:
    """Puts a piece where it belongs in its tensor."""
    if landing.target_begin_bytes is not None:
        begin = landing.target_begin_bytes
        result[begin : begin + landing.size_bytes] = data
        return
    import torch

    from paramd.mesh.reading.assemble import torch_dtype

    assert isinstance(landing.target, Box), "an interval is always direct"
    dtype = torch_dtype(tensor.dtype)
    source = torch.frombuffer(data, dtype=dtype).as_strided(landing.sizes, landing.strides)
    target = torch.frombuffer(result, dtype=dtype).view(tensor.shape)
    box = landing.target
    target[tuple(slice(b, e) for b, e in zip(box.begin, box.end, strict=True))] = source


def in_file(tensor: ResultTensor, data: bytearray, dtype: torch.dtype | None) -> bytearray:
    """The bytes of a tensor in the file's dtype."""
    if dtype is None or not data:
        return data
    import torch

    from paramd.mesh.reading.assemble import torch_dtype

    cast = torch.frombuffer(data, dtype=torch_dtype(tensor.dtype)).to(dtype)
    size_bytes = cast.numel() * cast.element_size()
    out = bytearray(size_bytes)
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(out)), cast.data_ptr(), size_bytes)
    return out
