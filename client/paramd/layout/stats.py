"""Mergeable statistics: every rank reduces its shard, and the reader merges the parts.

`Stats` has exactly the fields of `paramd.v1.Stats`; `Summary` is for users.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from paramd.errors import UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.plan import Landing, ReadPlan

if TYPE_CHECKING:
    from paramd.v1 import sidecar_pb2

MAX_RUNS = 100_000
"""Most runs of memory in one plan, not counting whole pieces: listing more of them would cost
more than reading the elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Mergeable statistics of some elements."""

    count: int = 0
    zero_count: int = 0
    nan_count: int = 0
    inf_count: int = 0
    mean: float = 0.0
    """Mean of the finite elements; 0 if there are none."""
    m2: float = 0.0
    """Sum of squared deviations of the finite elements from their mean."""
    sum_squares: float = 0.0
    """Sum over the finite elements."""
    min: float = math.inf
    """Smallest finite element; +inf if there is none."""
    max: float = -math.inf
    """Largest finite element; -inf if there is none."""
    exponent_counts: tuple[int, ...] = ()
    """Bin i counts finite nonzero x with floor(log2(|x|)) == exponent_begin + i; the first and
    last bin also count everything beyond."""
    exponent_begin: int = 0
    edge_counts: tuple[int, ...] = ()
    """Finite elements below the first edge, between edges, and at or above the last."""

    @property
    def finite_count(self) -> int:
        return self.count - self.nan_count - self.inf_count


FIELDS = tuple(one.name for one in fields(Stats))
"""Field names, the same as in messages."""

EMPTY = Stats()
"""Statistics of no element; merging it changes nothing."""


Part: TypeAlias = "Stats | sidecar_pb2.Stats"
"""Anything mergeable: the message has the same fields."""


def stats_of(message: Part) -> Stats:
    found = {name: getattr(message, name) for name in FIELDS}
    for name in ("exponent_counts", "edge_counts"):
        found[name] = tuple(found[name])
    return Stats(**found)


def merge(a: Part, b: Part) -> Stats:
    """The statistics of both sets of elements together."""
    return merge_all((a, b))


def merge_all(parts: Iterable[Part]) -> Stats:
    """The statistics of all parts together; `EMPTY` if there are none.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979, for `mean` and `m2`.
    """
    count = zero_count = nan_count = inf_count = finite = 0
    mean = m2 = sum_squares = 0.0
    low, high = math.inf, -math.inf
    exponents: list[Part] = []
    edges: list[Sequence[int]] = []
    # One pass over plain numbers, for speed: a frame of gradients has hundreds of parts.
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
        # A part without them was not asked for them, or has no element.
        edge_counts=_added(edges),
    )


def _added(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
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
    """Square root of the sum of squares; NaN if there are elements and none is finite."""
    mean: float
    """NaN without finite elements."""
    std: float
    """Unbiased, as `torch.Tensor.std()`; NaN with fewer than two finite elements."""
    min: float
    """NaN without finite elements."""
    max: float
    """NaN without finite elements."""
    exponents: tuple[tuple[int, int], ...]
    """(e, count) of 2**e <= |x| < 2**(e+1), ascending, from the first to the last used bin."""
    edge_counts: tuple[int, ...] = ()
    """As in `Stats`."""

    def numbers(self) -> dict[str, float]:
        return {"count": self.count, **{one.name: getattr(self, one.name) for one in STATISTICS}}

    def document(self) -> dict[str, float | None]:
        """The same for JSON: NaN and infinities become None."""
        return dict(finite(self.numbers()))


@dataclass(frozen=True, slots=True)
class Statistic:
    """A field of `Summary`, as the CLI, REST, filters and tables show it."""

    name: str
    """Name in `Summary`, REST and JSON."""
    title: str
    """Column title."""
    form: str
    """Format spec; "," for counts."""
    about: str = ""

    @property
    def kind(self) -> type:
        """int; or float, NaN if there are too few finite elements."""
        return int if self.form == "," else float

    @property
    def key(self) -> str:
        """Name in filters."""
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
"""In column order."""


def summarize(stats: Stats) -> Summary:
    """The numbers shown to users."""
    finite = stats.finite_count
    bins = list(enumerate(stats.exponent_counts, stats.exponent_begin))
    used = [at for at, (_, count) in enumerate(bins) if count]
    return Summary(
        count=stats.count,
        zero_count=stats.zero_count,
        nan_count=stats.nan_count,
        inf_count=stats.inf_count,
        norm=math.sqrt(stats.sum_squares) if finite or not stats.count else math.nan,
        mean=stats.mean if finite else math.nan,
        std=math.sqrt(max(stats.m2, 0.0) / (finite - 1)) if finite > 1 else math.nan,
        min=stats.min if finite else math.nan,
        max=stats.max if finite else math.nan,
        exponents=tuple(bins[used[0] : used[-1] + 1]) if used else (),
        edge_counts=stats.edge_counts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsItem:
    """A run of contiguous elements in a rank's snapshot, of one tensor of a plan."""

    tensor: int
    """Index into the plan's tensors."""
    begin_bytes: int
    """Offset within the snapshot."""
    numel: int
    dtype: str


def stats_items(plan: ReadPlan) -> dict[int, tuple[StatsItem, ...]]:
    """Each rank's items to reduce, so that every element of the plan counts exactly once.

    The order of elements does not matter, so a piece with dense memory is one item whatever its
    strides; a slice of it is one item per run of memory. Raises UsageError for more than `MAX_RUNS`
    runs.
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
                    "slice only the first dim, or summon the slice and compute them yourself"
                )
            found.extend(_runs(landing, plan.tensors[landing.tensor].dtype, run, outer))
        items[read.rank] = tuple(found)
    return items


def _shape_of_runs(landing: Landing) -> tuple[int, list[tuple[int, int]]]:
    """Elements per run, and (stride, size) of the dims that repeat it, fastest first."""
    run = 1
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(zip(landing.strides, landing.sizes, strict=True)):
        if size > 1:
            # The fastest dims merge into one run as long as there is no gap between them.
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


def finite(value: Any) -> Any:
    """The value, which may be nested, with NaN and infinities as None, for JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value
