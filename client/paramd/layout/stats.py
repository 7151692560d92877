"""Mergeable statistics: every rank reduces its shard, and the reader merges the parts.

`Stats` has exactly the fields of `paramd.v1.Stats`; `Summary` is for users.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from paramd.errors import UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.plan import (
    MAX_GAP_BYTES,
    Costs,
    Landing,
    RankRead,
    ReadPlan,
    Replica,
    cheapest,
    plan_read,
)
from paramd.layout.select import SelectedTensor
from paramd.layout.types import Layout, TensorLayout, joined, offsets_in

if TYPE_CHECKING:
    from paramd.v1 import sidecar_pb2

MOST_RUNS = 20_000
"""In one message: far below gRPC's size limit."""

MAX_RUNS = 100_000
"""Most runs of memory in one plan, not counting whole pieces: listing more of them would cost
more than reading the elements."""


class Stats(NamedTuple):
    """Mergeable statistics of some elements."""

    count: int = 0  # type: ignore[assignment]
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


COLUMNS = Stats._fields[:9]
"""Names of the fields that are one number, the same as in messages."""

EMPTY = Stats()
"""Statistics of no element; merging it changes nothing."""


Part: TypeAlias = "Stats | sidecar_pb2.Stats"
"""Anything mergeable: the message has the same fields."""


def stats_of(message: Part) -> Stats:
    return Stats(
        count=message.count,
        zero_count=message.zero_count,
        nan_count=message.nan_count,
        inf_count=message.inf_count,
        mean=message.mean,
        m2=message.m2,
        sum_squares=message.sum_squares,
        min=message.min,
        max=message.max,
        exponent_counts=tuple(message.exponent_counts),
        exponent_begin=message.exponent_begin,
        edge_counts=tuple(message.edge_counts),
    )


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


class Summary(NamedTuple):
    """Finished numbers. All but the counts are over the finite elements alone."""

    count: int  # type: ignore[assignment]
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
        """The statistics by name, in column order."""
        return {
            "count": self.count,
            "norm": self.norm,
            "mean": self.mean,
            "std": self.std,
            "min": self.min,
            "max": self.max,
            "zero_count": self.zero_count,
            "nan_count": self.nan_count,
            "inf_count": self.inf_count,
        }

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
    found = _finished(*stats[:9])
    *_, counts, begin, edges = stats
    if not (counts or edges):
        return found
    used = [at for at, count in enumerate(counts) if count]
    bins = ((begin + at, counts[at]) for at in range(used[0], used[-1] + 1)) if used else ()
    return found._replace(exponents=tuple(bins), edge_counts=edges)


def _finished(*stats: Any) -> Summary:
    count, zeros, nans, infs, mean, m2, squares, low, high = stats
    norm, std, none = math.sqrt(squares), math.nan, math.nan
    finite = count - nans - infs
    if not finite:
        norm, mean, low, high = none if count else norm, none, none, none
    elif finite > 1:
        std = math.sqrt(max(m2, 0.0) / (finite - 1))
    return Summary(count, zeros, nans, infs, norm, mean, std, low, high, ())


class Columns:
    """Statistics of many tensors, 72 bytes each."""

    def __init__(self, count: int) -> None:
        none: tuple[Any, ...] = EMPTY[: len(COLUMNS)]
        self._columns = [array("q" if isinstance(one, int) else "d", [one]) * count for one in none]

    def add(self, tensors: Iterable[int], parts: Iterable[Iterable[float]]) -> None:
        """Merge columns of parts, as `merge_all` does, with those of their tensors."""
        counts, zeros, nans, infs, means, m2s, squares, lows, highs = self._columns
        for at, count, zero, nan, inf, mean, m2, square, low, high in zip(
            tensors, *parts, strict=True
        ):
            before = counts[at] - nans[at] - infs[at]
            counts[at] += count
            zeros[at] += zero
            bad = nan + inf
            if bad:
                nans[at] += nan
                infs[at] += inf
            if more := count - bad:
                delta = mean - means[at]
                share = more / (before + more)
                means[at] += delta * share
                m2s[at] += m2 + delta * delta * before * share
                squares[at] += square
                lows[at], highs[at] = min(lows[at], low), max(highs[at], high)

    def __iter__(self) -> Iterator[Stats]:
        return starmap(Stats, zip(*self._columns, strict=True))

    def summaries(self) -> Iterator[Summary]:
        return starmap(_finished, zip(*self._columns, strict=True))


class StatsItem(NamedTuple):
    """A run of contiguous elements in a rank's snapshot, of one tensor of a plan."""

    dtype: str
    tensor: int
    """Index into the plan's tensors."""
    begin_bytes: int
    """Offset within the snapshot."""
    numel: int


def stats_items(plan: ReadPlan) -> dict[int, tuple[StatsItem, ...]]:
    """Each rank's items to reduce, so that every element of the plan counts exactly once.

    The order of elements does not matter, so a piece with dense memory is one item whatever its
    strides; a slice of it is one item per run of memory.

    Raises:
        UsageError: For more than `MAX_RUNS` runs.
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


class Runs(NamedTuple):
    """Items of one dtype, at most `MOST_RUNS`, by column."""

    dtype: str
    tensors: array[int]
    begin_bytes: array[int]
    numels: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsPlan(ReadPlan):
    """A plan of statistics alone, without landings: 24 bytes a run."""

    runs: Mapping[int, Sequence[Runs]]
    """By rank."""


def plan_stats(
    layout: Layout, selection: Sequence[SelectedTensor], costs: Costs | None = None
) -> StatsPlan:
    """Plan statistics of each tensor of `selection`. Raises as `plan_read` and `stats_items`."""
    if all(one.box.end == one.tensor.shape and not any(one.box.begin) for one in selection):
        tensors = [one.tensor for one in selection]
        return cheapest(layout, lambda replica: _plan_whole(tensors, replica), costs)
    plan = plan_read(layout, selection, costs=costs)
    runs = {rank: by_dtype(items) for rank, items in stats_items(plan).items()}
    return StatsPlan(tensors=(), ranks=plan.ranks, replica=plan.replica, runs=runs)


def _plan_whole(tensors: Sequence[TensorLayout], replica: Replica) -> StatsPlan:
    """The same for whole tensors, a tenth of the time: a piece is a run, however it is strided."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for number, tensor in enumerate(tensors):
        for piece in replica.pieces(tensor):
            row = piece.arena_begin, number, piece.region.numel
            found.setdefault(piece.rank, []).append(row)
    ranks, runs = [], {}
    for rank, rows in sorted(found.items()):
        rows.sort()
        sizes = (item_bytes(tensors[number].dtype) * numel for _, number, numel in rows)
        ends = ((row[0], row[0] + size) for row, size in zip(rows, sizes, strict=True))
        spans = tuple(joined(ends, MAX_GAP_BYTES))
        offset, size_bytes = offsets_in(spans), sum(end - begin for begin, end in spans)
        runs[rank] = by_dtype((tensors[of].dtype, of, offset(at), numel) for at, of, numel in rows)
        ranks.append(RankRead(rank=rank, spans=spans, size_bytes=size_bytes, landings=()))
    return StatsPlan(tensors=(), ranks=tuple(ranks), replica=replica.rank, runs=runs)


def by_dtype(items: Iterable[tuple[str, int, int, int]]) -> list[Runs]:
    """Items by column."""
    found: dict[str, list[Runs]] = {}
    for dtype, tensor, begin_bytes, numel in items:
        of = found.setdefault(dtype, [])
        if not of or len(of[-1].tensors) == MOST_RUNS:
            of.append(Runs(dtype, array("q"), array("q"), array("q")))
        of[-1].tensors.append(tensor)
        of[-1].begin_bytes.append(begin_bytes)
        of[-1].numels.append(numel)
    return [runs for of in found.values() for runs in of]


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
