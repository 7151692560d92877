"""Statistics of many runs of elements at once: small tensors cost calls, not bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.statistics import reduce
from paramd_service.sidecar.statistics.reduce import EXPONENT_BEGIN, count_biased_rows, folded

SMALL_NUMEL = 8192
"""Runs up to this long are reduced together, those of one length as rows of a matrix."""

_LEAST_ROWS = 4

Read = Callable[[int, int], memoryview]
"""Bytes [begin, end) of a room."""

Items = Sequence[tuple[int, pb.StatsItem]]
"""First byte of each, and what it is."""


def reduce_items(read: Read, items: Items, *, with_exponents: bool) -> list[pb.Stats]:
    """One answer for each item, in order."""
    found: dict[int, pb.Stats] = {}
    for numbers in _alike(items).values():
        found |= _reduce_rows(read, items, numbers, with_exponents=with_exponents)
    for number, (begin, item) in enumerate(items):
        if number not in found:
            run = read(begin, begin + item.numel * reduce.item_bytes(item.dtype))
            reduced = reduce.reduce_run(run, item.dtype, with_exponents=with_exponents)
            found[number] = reduce.stats_message(reduced)
    return [found[number] for number in range(len(items))]


def _alike(items: Items) -> Mapping[tuple[str, int], list[int]]:
    """Small items by dtype and length, where there are enough of them."""
    found: dict[tuple[str, int], list[int]] = {}
    for number, (_, item) in enumerate(items):
        if 1 <= item.numel <= SMALL_NUMEL:
            found.setdefault((item.dtype, item.numel), []).append(number)
    return {alike: numbers for alike, numbers in found.items() if len(numbers) >= _LEAST_ROWS}


def _reduce_rows(
    read: Read, items: Items, numbers: Sequence[int], *, with_exponents: bool
) -> dict[int, pb.Stats]:
    """Answers of items of one length; nothing of those with an element that is not finite."""
    first = items[numbers[0]][1]
    kind, size_bytes = getattr(torch, first.dtype), reduce.item_bytes(first.dtype)
    runs = [read(items[n][0], items[n][0] + first.numel * size_bytes) for n in numbers]
    raw = torch.frombuffer(bytearray(b"".join(runs)), dtype=torch.uint8)
    rows = raw.view(kind).view(len(runs), first.numel).double()
    low, high = torch.amin(rows, dim=1), torch.amax(rows, dim=1)
    mean = rows.mean(dim=1)
    finite = torch.isfinite(low) & torch.isfinite(high)
    biased: Iterable[torch.Tensor | None] = itertools.repeat(None, len(runs))
    if with_exponents:
        biased = count_biased_rows(torch.where(finite[:, None], rows, 0.0))
    columns = zip(
        numbers,
        low.tolist(),
        high.tolist(),
        mean.tolist(),
        (rows - mean[:, None]).square_().sum(dim=1).tolist(),
        torch.linalg.vector_norm(rows, dim=1).square_().tolist(),
        torch.count_nonzero(rows, dim=1).tolist(),
        finite.tolist(),
        biased,
        strict=True,
    )
    return {
        number: pb.Stats(
            count=first.numel,
            zero_count=first.numel - nonzero,
            mean=average,
            m2=m2,
            sum_squares=squares,
            min=least,
            max=most,
            exponent_counts=folded(counts) if counts is not None else (),
            exponent_begin=EXPONENT_BEGIN,
        )
        for number, least, most, average, m2, squares, nonzero, is_finite, counts in columns
        if is_finite
    }


def warm_up() -> None:
    """The first reduction of a process takes tens of milliseconds."""
    reduce.reduce_run(memoryview(bytearray(4096)), "float32", with_exponents=True)
