"""Full gradients as tensors, in memory that is reused once the reader has dropped it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from paramd.layout.plan import ReadPlan
from paramd.layout.stats import Stats
from paramd.memory.left import check_client
from paramd.mesh.frames.frames import GradSelection
from paramd.mesh.reading.assemble import HUGE_BYTES, Targets, allocate, torch_dtype
from paramd.mesh.reading.stream import Reading
from paramd.mesh.reading.transfer import Transfer

_KEPT = 4
"""Most tensors kept per shape and dtype."""

EXPONENT_BEGIN = -64
EXPONENT_BINS = 128


class TensorPool:
    """Reusable memory for results: faulting in fresh pages costs more than the copies.

    Hands out aliases of kept tensors; a tensor is free again once no other alias of its storage
    is alive.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = defaultdict(
            list
        )

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with undefined contents."""
        kept = self._kept[shape, dtype]
        for tensor in kept:
            # 2: the tensor's reference, and that of the storage object made here.
            if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2:
                return tensor.detach()
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes >= HUGE_BYTES:
            check_client(size_bytes)
        tensor = allocate(shape, dtype)
        if len(kept) >= _KEPT:
            kept.pop(0)
        kept.append(tensor)
        return tensor.detach()


class Sums:
    """Sums of tensors, by index, in float32 at least."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}
        self._own: dict[int, torch.dtype] = {}

    def add(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Add one summand of each; takes them over."""
        for index, tensor in tensors.items():
            wide = tensor.to(torch.float32) if tensor.dtype.itemsize < 4 else tensor
            if index in self._sums:
                self._sums[index].add_(wide)
            else:
                self._own[index], self._sums[index] = tensor.dtype, wide

    def rounded(self, dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
        """The sums in `dtype`; None: each in that of its summands."""
        return {
            index: one.to(dtype if dtype is not None else self._own[index])
            for index, one in self._sums.items()
        }


async def read_tensors(
    reading: Reading,
    transfer: Transfer,
    pool: TensorPool,
    plan: ReadPlan,
    asked: Sequence[GradSelection],
    numbers: Sequence[range],
    *,
    dtype: torch.dtype | None = None,
    zeroed: bool = False,
) -> dict[int, torch.Tensor]:
    """Read, for each `asked[i]`, the plan's tensors `numbers[i]` into one; by `i`.

    `zeroed`: parts that no rank holds become 0; otherwise there must be none. Raises as
    `Transfer.read`.
    """
    results: dict[int, torch.Tensor] = {}
    into: dict[str, torch.Tensor] = {}
    names = [(f"#{number}",) for number in range(len(plan.tensors))]
    for index, (one, of) in enumerate(zip(asked, numbers, strict=True)):
        if not len(of):
            continue
        whole = pool.take(one.shape, dtype if dtype is not None else torch_dtype(one.tensor.dtype))
        results[index] = whole.zero_() if zeroed else whole
        if len(of) == 1:
            into[f"#{of[0]}"] = whole
            continue
        for row, number in enumerate(of):
            into[f"#{number}"] = whole[row : row + 1]
    targets = Targets(_part_of(plan, numbers), names, dtype=dtype, device=None, into=into)
    await transfer.read(reading, targets.plan, targets)
    return results


def _part_of(plan: ReadPlan, numbers: Sequence[range]) -> ReadPlan:
    """The plan restricted to these tensors' landings, over the same snapshots."""
    wanted = {number for of in numbers for number in of}
    if len(wanted) == len(plan.tensors):
        return plan
    reads = tuple(
        replace(read, landings=tuple(one for one in read.landings if one.tensor in wanted))
        for read in plan.ranks
    )
    return replace(plan, ranks=reads)


def tensor_stats(tensor: torch.Tensor, *, with_exponents: bool) -> Stats:
    """Statistics of a local tensor, as the sidecars compute them."""
    values = tensor.detach().double().flatten()
    finite = values[torch.isfinite(values)]
    count = finite.numel()
    nan_count = int(torch.isnan(values).sum())
    mean = float(finite.mean()) if count else 0.0
    exponents: tuple[int, ...] = ()
    if with_exponents:
        powers = torch.frexp(finite[finite != 0]).exponent - 1 - EXPONENT_BEGIN
        bins = torch.bincount(powers.clamp(0, EXPONENT_BINS - 1).long(), minlength=EXPONENT_BINS)
        exponents = tuple(bins.tolist())
    return Stats(
        count=values.numel(),
        zero_count=int((finite == 0).sum()),
        nan_count=nan_count,
        inf_count=values.numel() - nan_count - count,
        mean=mean,
        m2=float((finite - mean).square().sum()),
        sum_squares=float(finite.square().sum()),
        min=float(finite.min()) if count else math.inf,
        max=float(finite.max()) if count else -math.inf,
        exponent_counts=exponents,
        exponent_begin=EXPONENT_BEGIN,
    )
