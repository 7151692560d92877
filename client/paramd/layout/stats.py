"""Statistics that merge: every rank reduces what it holds, and the parts add up.

`Stats` carries exactly the fields of `paramd.v1.Stats`. `Summary` is what users see.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from paramd.errors import UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.plan import Landing, ReadPlan

if TYPE_CHECKING:
    from paramd.v1 import sidecar_pb2

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


FIELDS = tuple(one.name for one in fields(Stats))
"""As messages name them."""

EMPTY = Stats()
"""Statistics of no element; merging it changes nothing."""


Part: TypeAlias = "Stats | sidecar_pb2.Stats"
"""What can be merged: the message has the same fields."""


def stats_of(message: Part) -> Stats:
    """Statistics as they were sent."""
    found = {name: getattr(message, name) for name in FIELDS}
    for name in ("exponent_counts", "edge_counts"):
        found[name] = tuple(found[name])
    return Stats(**found)


def merge(a: Part, b: Part) -> Stats:
    """The statistics of the elements of both."""
    return merge_all((a, b))


def merge_all(parts: Iterable[Part]) -> Stats:
    """The statistics of the elements of all parts; `EMPTY` when there is none.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979, for `mean` and `m2`.
    """
    count = zero_count = nan_count = inf_count = finite = 0
    mean = m2 = sum_squares = 0.0
    low, high = math.inf, -math.inf
    exponents: list[Part] = []
    edges: list[Sequence[int]] = []
    # One pass with plain numbers: a frame of gradients has hundreds of parts.
    for part in parts:
        bad = part.nan_count + part.inf_count
        part_count = part.count
        count += part_count
        zero_count += part.zero_count
        if bad:
            nan_count += part.nan_count
            inf_count += part.inf_count
        more = part_count - bad
        if more:
            delta = part.mean - mean
            share = more / (finite + more)
            mean += delta * share
            m2 += part.m2 + delta * delta * finite * share
            finite += more
            sum_squares += part.sum_squares
            low, high = min(low, part.min), max(high, part.max)
        if part.exponent_counts:
            exponents.append(part)
        if part.edge_counts:
            edges.append(part.edge_counts)
    begin, counts = _added_exponents(exponents)
    return Stats(
        count=count,
        zero_count=zero_count,
        nan_count=nan_count,
        inf_count=inf_count,
        mean=mean,
        m2=m2,
        sum_squares=sum_squares,
        min=low,
        max=high,
        exponent_counts=counts,
        exponent_begin=begin,
        # Empty ones were not asked for, or are of no element.
        edge_counts=_added(edges),
    )


def _added(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Sums of what stands at the same places."""
    return tuple(map(sum, zip(*counts, strict=True)))


def _added_exponents(parts: Sequence[Part]) -> tuple[int, tuple[int, ...]]:
    spans = {(part.exponent_begin, len(part.exponent_counts)) for part in parts}
    if not spans:
        return 0, ()
    begin = min(first for first, _ in spans)
    if len(spans) == 1:
        return begin, _added(part.exponent_counts for part in parts)
    counts = [0] * (max(first + size for first, size in spans) - begin)
    for part in parts:
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

    def numbers(self) -> dict[str, float]:
        """The count and all `STATISTICS`."""
        return {"count": self.count, **{one.name: getattr(self, one.name) for one in STATISTICS}}

    def document(self) -> dict[str, float | None]:
        """The same for JSON, where what is not finite is None."""
        numbers = self.numbers().items()
        return {name: value if math.isfinite(value) else None for name, value in numbers}


@dataclass(frozen=True, slots=True)
class Statistic:
    """A number of a `Summary` that is shown and asked for wherever statistics are."""

    name: str
    """In `Summary`, REST and JSON."""
    title: str
    """Of its column."""
    form: str
    """How results print it; "," for counts."""
    about: str = ""

    @property
    def kind(self) -> type:
        """int; or float, which is NaN when there are too few finite elements."""
        return int if self.form == "," else float

    @property
    def key(self) -> str:
        """In filters."""
        return self.name.removesuffix("_count")


STATISTICS = (
    Statistic("norm", "norm", ".6g", "Of the finite elements, like all that follow"),
    Statistic("mean", "mean", ".4g"),
    Statistic("std", "std", ".4g", "Unbiased"),
    Statistic("min", "min", ".4g"),
    Statistic("max", "max", ".4g"),
    Statistic("zero_count", "zeros", ","),
    Statistic("nan_count", "nan", ","),
    Statistic("inf_count", "inf", ","),
)
"""In the order of columns."""


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
