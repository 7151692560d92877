"""Statistics that merge: every rank reduces what it holds, and the parts add up.

`Stats` carries exactly the fields of `paramd.v1.Stats`. `Summary` is what users see.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import product

from paramd.errors import UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.landings import Landing
from paramd.layout.plan import ReadPlan

MAX_RUNS = 100_000
"""More runs of memory than this, beside whole pieces, are refused in one plan: naming them
would cost more than reading them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Statistics of some elements; those of other elements may be merged in."""

    count: int = 0
    zero_count: int = 0
    nan_count: int = 0
    inf_count: int = 0
    mean: float = 0.0
    """Of the finite elements; 0 when there are none."""
    m2: float = 0.0
    """Sum of squared distances of the finite elements from their mean."""
    sum_squares: float = 0.0
    """Of the finite elements."""
    min: float = math.inf
    """Smallest finite element; +inf when there is none."""
    max: float = -math.inf
    """Largest finite element; -inf when there is none."""
    exponent_counts: tuple[int, ...] = ()
    """Bin i counts finite nonzero x with floor(log2(|x|)) == exponent_begin + i; the first and
    the last also take what lies beyond."""
    exponent_begin: int = 0
    edge_counts: tuple[int, ...] = ()
    """Finite elements below the first of some edges, between them, and from the last one on."""

    @property
    def finite_count(self) -> int:
        return self.count - self.nan_count - self.inf_count


EMPTY = Stats()
"""Statistics of no element; merging it changes nothing."""


def merge(a: Stats, b: Stats) -> Stats:
    """The statistics of the elements of both.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979, for `mean` and `m2`.
    """
    begin, counts = _merge_exponents(a, b)
    total = a.finite_count + b.finite_count
    mean, m2 = 0.0, 0.0
    if total:
        delta = b.mean - a.mean
        share = b.finite_count / total
        mean = a.mean + delta * share
        m2 = a.m2 + b.m2 + delta * delta * a.finite_count * share
    return Stats(
        count=a.count + b.count,
        zero_count=a.zero_count + b.zero_count,
        nan_count=a.nan_count + b.nan_count,
        inf_count=a.inf_count + b.inf_count,
        mean=mean,
        m2=m2,
        sum_squares=a.sum_squares + b.sum_squares,
        min=min(a.min, b.min),
        max=max(a.max, b.max),
        exponent_counts=counts,
        exponent_begin=begin,
        edge_counts=_added(a.edge_counts, b.edge_counts),
    )


def merge_all(parts: Iterable[Stats]) -> Stats:
    """The statistics of the elements of all parts; `EMPTY` when there is none."""
    return reduce(merge, parts, EMPTY)


def _added(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Counts between the same edges; empty ones were not asked for, or are of no element."""
    if not a or not b:
        return a if a else b
    return tuple(one + other for one, other in zip(a, b, strict=True))


def _merge_exponents(a: Stats, b: Stats) -> tuple[int, tuple[int, ...]]:
    if not a.exponent_counts:
        return b.exponent_begin, b.exponent_counts
    if not b.exponent_counts:
        return a.exponent_begin, a.exponent_counts
    begin = min(a.exponent_begin, b.exponent_begin)
    end = max(part.exponent_begin + len(part.exponent_counts) for part in (a, b))
    counts = [0] * (end - begin)
    for part in (a, b):
        for at, count in enumerate(part.exponent_counts, part.exponent_begin - begin):
            counts[at] += count
    return begin, tuple(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Finished numbers. All but the counts are over the finite elements alone."""

    count: int
    zero_count: int
    nan_count: int
    inf_count: int
    norm: float
    """Square root of the sum of squares; 0 without finite elements."""
    mean: float
    """NaN without finite elements."""
    std: float
    """Unbiased, as `torch.Tensor.std()`; NaN with fewer than two finite elements."""
    min: float
    """NaN without finite elements."""
    max: float
    """NaN without finite elements."""
    exponents: tuple[tuple[int, int], ...]
    """(e, count) of 2**e <= |x| < 2**(e+1), rising, from the first to the last bin in use."""
    edge_counts: tuple[int, ...] = ()
    """As in `Stats`."""


def summarize(stats: Stats) -> Summary:
    """The numbers that users see."""
    finite = stats.finite_count
    bins = list(enumerate(stats.exponent_counts, stats.exponent_begin))
    used = [at for at, (_, count) in enumerate(bins) if count]
    return Summary(
        count=stats.count,
        zero_count=stats.zero_count,
        nan_count=stats.nan_count,
        inf_count=stats.inf_count,
        norm=math.sqrt(stats.sum_squares),
        mean=stats.mean if finite else math.nan,
        std=math.sqrt(max(stats.m2, 0.0) / (finite - 1)) if finite > 1 else math.nan,
        min=stats.min if finite else math.nan,
        max=stats.max if finite else math.nan,
        exponents=tuple(bins[used[0] : used[-1] + 1]) if used else (),
        edge_counts=stats.edge_counts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsItem:
    """One run of elements of a rank's snapshot that belongs to one tensor of a plan."""

    tensor: int
    """Index into the plan's tensors."""
    begin_bytes: int
    """Offset within the snapshot."""
    numel: int
    dtype: str


def stats_items(plan: ReadPlan) -> dict[int, tuple[StatsItem, ...]]:
    """What each rank reduces, so that every element wanted is counted exactly once.

    The order of elements does not matter here, so a piece whose memory is dense is one
    item whatever its strides; a slice of it is one item for each run of memory.

    Raises:
        UsageError: the slices consist of more than `MAX_RUNS` runs.
    """
    items: dict[int, tuple[StatsItem, ...]] = {}
    run_count = 0
    for read in plan.ranks:
        found: list[StatsItem] = []
        for landing in read.landings:
            run, outer = _shape_of_runs(landing)
            run_count += math.prod(size for _, size in outer) if outer else 0
            if run_count > MAX_RUNS:
                raise UsageError(
                    f"statistics of these slices need more than {MAX_RUNS} runs of memory; "
                    "slice the first dim only, or summon the slice and reduce it yourself"
                )
            found.extend(_runs(landing, plan.tensors[landing.tensor].dtype, run, outer))
        items[read.rank] = tuple(found)
    return items


def _shape_of_runs(landing: Landing) -> tuple[int, list[tuple[int, int]]]:
    """Elements in a run, and (stride, size) of the dims that repeat it, fastest first."""
    run = 1
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(zip(landing.strides, landing.sizes, strict=True)):
        if size > 1:
            # The fastest dims that follow each other without a gap form one run.
            if stride == run:
                run *= size
            else:
                outer.append((stride, size))
    return run, outer


def _runs(
    landing: Landing, dtype: str, run: int, outer: list[tuple[int, int]]
) -> Iterator[StatsItem]:
    size_bytes = item_bytes(dtype)
    for index in product(*(range(size) for _, size in reversed(outer))):
        offset = sum(i * stride for i, (stride, _) in zip(index, reversed(outer), strict=True))
        yield StatsItem(
            tensor=landing.tensor,
            begin_bytes=landing.begin_bytes + offset * size_bytes,
            numel=run,
            dtype=dtype,
        )
