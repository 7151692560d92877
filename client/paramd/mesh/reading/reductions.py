"""Statistics, heat maps and values of full tensors: each rank's sidecar reduces its shards, and the
results are merged here. No torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from paramd.errors import ConflictError, UsageError
from paramd.layout.heatmaps import (
    MAX_CELLS,
    MODES,
    Heatmap,
    Matrix,
    element_texts,
    heatmap_items,
    matrix_of,
    merge_parts,
    place_elements,
)
from paramd.layout.plan import ReadPlan
from paramd.layout.stats import (
    COLUMNS,
    Columns,
    Part,
    Runs,
    StatsItem,
    by_dtype,
    merge_all,
    stats_items,
    summarize,
)
from paramd.mesh.peers.sidecars import Pinned
from paramd.mesh.reading.stream import Reading, read_bytes
from paramd.mesh.results import StatsTable, TensorStats
from paramd.v1 import sidecar_pb2 as pb

ITEMS_PER_CALL = 2_000
"""Keeps messages far below gRPC's size limit."""

MAX_VALUES = 16_384
"""Most elements in one response of values."""

MAX_VALUES_BYTES = 64 << 20
"""Most bytes read for them: a slice of columns reads its whole rows."""

_POOL_MODES = {
    "mean": pb.POOL_MODE_SUM,
    "absmax": pb.POOL_MODE_ABSMAX,
    "min": pb.POOL_MODE_MIN,
    "max": pb.POOL_MODE_MAX,
}


async def compute_stats(
    reading: Reading,
    plan: ReadPlan,
    *,
    with_exponents: bool = False,
    edges: Sequence[float] = (),
    before: Pinned | None = None,
) -> StatsTable:
    """Reduce each rank's share of the plan on its sidecar, and merge.

    `edges` (finite, rising) add counts of the elements between them. With `before`, pins of the
    same plan, the statistics are those of the differences.
    """
    items = stats_items(plan)
    if with_exponents or edges or before is not None:
        asked = pb.ComputeStatsRequest(with_exponents=with_exponents, edges=edges)
        of_tensor: list[list[Part]] = [[] for _ in plan.tensors]
        for item, part in await compute_parts(reading, items, asked, before):
            of_tensor[item.tensor].append(part)
        merged = [merge_all(parts) for parts in of_tensor]
    else:
        runs = {rank: by_dtype(of) for rank, of in items.items()}
        merged = list(await compute_columns(reading, runs, len(plan.tensors)))
    rows = [
        TensorStats(
            name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, whole=summarize(stats)
        )
        for tensor, stats in zip(plan.tensors, merged, strict=True)
    ]
    whole = merge_all(merged)
    dtypes = {tensor.dtype for tensor in plan.tensors}
    total = TensorStats(
        name="total",
        dtype=dtypes.pop() if len(dtypes) == 1 else "",
        shape=(whole.count,),
        whole=summarize(whole),
    )
    state = reading.pinned.state
    return StatsTable(
        rows,
        total=total,
        replica=plan.replica,
        job=reading.sidecars.document.job,
        incarnation=state.incarnation,
        step=state.step,
        history=state.history,
        unsettled=reading.pinned.unsettled,
        label=state.label,
    )


async def compute_columns(
    reading: Reading, runs: Mapping[int, Sequence[Runs]], count: int
) -> Columns:
    """The statistics of `count` tensors, of which each rank's sidecar reduces runs."""

    async def of(rank: int) -> list[list[Sequence[float]]]:
        return [await _columns(reading, rank, one) for one in runs[rank]]

    found = await asyncio.gather(*map(of, runs))

    def merged() -> Columns:
        result = Columns(count)
        for one, columns in zip(chain(*runs.values()), chain(*found), strict=True):
            result.add(one.tensors, columns)
        return result

    return await asyncio.to_thread(merged)


async def _columns(reading: Reading, rank: int, runs: Runs) -> list[Sequence[float]]:
    dtype, _, begins, numels = runs
    asked = pb.StatsRuns(dtype=dtype, begin_bytes=begins, numels=numels)
    request = pb.ComputeStatsRequest(runs=asked)
    answer = await reading.ask(rank, request, pb.ComputeStatsResponse)
    columns: list[Sequence[float]] = [getattr(answer.columns, name) for name in COLUMNS]
    _check_counts(reading, rank, columns[0] if _can_be_true(columns) else (), numels)
    return columns


def _can_be_true(columns: Sequence[Sequence[float]]) -> bool:
    """Whether there are as many of each number, and no count or sum of squares that cannot be."""
    if len({len(column) for column in columns}) != 1:
        return False
    for count, zeros, nans, infs, _, _, squares, *_ in zip(*columns, strict=True):
        if min(zeros, nans, infs, squares) < 0 or nans + infs > count:
            return False
    return True


async def compute_parts(
    reading: Reading,
    items: Mapping[int, Sequence[StatsItem]],
    asked: pb.ComputeStatsRequest,
    before: Pinned | None = None,
) -> list[tuple[StatsItem, Part]]:
    """Reduce each rank's items on its sidecar, as `asked` says; `before` as in `compute_stats`."""

    async def of(rank: int) -> list[tuple[StatsItem, Part]]:
        found: list[tuple[StatsItem, Part]] = []
        for begin in range(0, len(items[rank]), ITEMS_PER_CALL):
            batch = items[rank][begin : begin + ITEMS_PER_CALL]
            request = pb.ComputeStatsRequest(
                items=map(stats_message, batch),
                before_snapshot_id=before.pins[rank].snapshot_id if before is not None else "",
            )
            request.MergeFrom(asked)
            answer = await reading.ask(rank, request, pb.ComputeStatsResponse)
            counts = [stats.count for stats in answer.stats]
            _check_counts(reading, rank, counts, [item.numel for item in batch])
            found.extend(zip(batch, answer.stats, strict=True))
        return found

    found = await asyncio.gather(*(of(rank) for rank in items if items[rank]))
    return [one for of_rank in found for one in of_rank]


def _check_counts(
    reading: Reading, rank: int, counts: Sequence[float], numels: Sequence[int]
) -> None:
    if [*counts] != [*numels]:
        raise ConflictError(
            f"{reading.sidecars.who(rank)} returned {len(counts)} statistics of {sum(counts):,} "
            f"elements; expected {len(numels)} of {sum(numels):,}; try again"
        )


def stats_message(item: StatsItem) -> pb.StatsItem:
    return pb.StatsItem(begin_bytes=item.begin_bytes, numel=item.numel, dtype=item.dtype)


@dataclass(frozen=True, slots=True)
class TensorHeatmap:
    """A heat map and the matrix it shows."""

    heatmap: Heatmap
    matrix: Matrix


async def compute_heatmap(
    reading: Reading,
    plan: ReadPlan,
    *,
    mode: str,
    max_rows: int,
    max_columns: int,
    row_dims: int | None = None,
) -> TensorHeatmap:
    """Pool each rank's share of the plan's only tensor on its sidecar, and merge.

    `mode` is one of `MODES`; sizes are at least 1, and clamped to `MAX_CELLS`; `row_dims` leading
    dims form rows, None as in `matrix_of`.

    Raises:
        UsageError: Not exactly one tensor, or an argument is out of range.
    """
    _check_one(plan)
    if mode not in MODES or min(max_rows, max_columns) < 1:
        raise UsageError(
            f"mode, cells: {mode!r}; expected one of {', '.join(MODES)}; at least 1 cell"
        )
    matrix = matrix_of(plan.tensors[0].shape, row_dims)
    rows = min(max_rows, matrix.rows, MAX_CELLS)
    columns = min(max_columns, matrix.columns, MAX_CELLS)
    if rows == 0 or columns == 0:
        nothing = Heatmap(rows=rows, columns=columns, values=[], nonfinite=[], count=0)
        return TensorHeatmap(nothing, matrix)
    items = heatmap_items(plan, matrix)
    asked = pb.PoolSnapshotRequest(
        dtype=plan.tensors[0].dtype,
        mode=_POOL_MODES[mode],
        row_count=matrix.rows,
        col_count=matrix.columns,
        cell_row_count=rows,
        cell_col_count=columns,
    )
    answers = await asyncio.gather(
        *(_part(reading, rank, of, asked) for rank, of in items.items() if of)
    )
    heatmap = await asyncio.to_thread(merge_parts, answers, mode=mode, rows=rows, columns=columns)
    numel = matrix.rows * matrix.columns
    if heatmap.count != numel:
        raise ConflictError(f"the ranks pooled {heatmap.count:,} of {numel:,} elements; try again")
    return TensorHeatmap(heatmap, matrix)


async def read_texts(reading: Reading, plan: ReadPlan) -> list[str]:
    """The elements of the plan's only tensor as exact text, row-major.

    Raises:
        UsageError: If it has not exactly one tensor, or too many elements or bytes.
    """
    check_values(plan)
    tensor = plan.tensors[0]
    result = bytearray(tensor.size_bytes)
    snapshots = await asyncio.gather(
        *(read_bytes(reading, read.rank, 0, read.size_bytes) for read in plan.ranks)
    )
    for read, snapshot in zip(plan.ranks, snapshots, strict=True):
        for landing in read.landings:
            place_elements(landing, snapshot, result, tensor.shape, tensor.dtype)
    return element_texts(result, tensor.dtype)


def check_values(plan: ReadPlan) -> None:
    """Raise UsageError if a plan exceeds the limits of `read_texts`."""
    _check_one(plan)
    numel = sum(tensor.box.numel for tensor in plan.tensors)
    if numel > MAX_VALUES:
        raise UsageError(
            f"name: {numel:,} elements; at most {MAX_VALUES:,} at once, ask for a slice such as "
            "'w[0:4, 0:8]'"
        )
    if plan.size_bytes > MAX_VALUES_BYTES:
        raise UsageError(
            f"name: the slice lies within {plan.size_bytes:,} bytes; at most "
            f"{MAX_VALUES_BYTES:,}, ask for fewer rows"
        )


def _check_one(plan: ReadPlan) -> None:
    if len(plan.tensors) != 1:
        raise UsageError(f"name: {len(plan.tensors)} tensors match; name exactly one")


async def _part(
    reading: Reading, rank: int, items: Sequence[pb.PoolItem], asked: pb.PoolSnapshotRequest
) -> pb.PoolSnapshotResponse:
    request = pb.PoolSnapshotRequest(items=items)
    request.MergeFrom(asked)
    found = await reading.ask(rank, request, pb.PoolSnapshotResponse)
    cells = found.cell_row_count * found.cell_col_count
    if not (
        0 <= found.cell_row_begin <= asked.cell_row_count - found.cell_row_count
        and 0 <= found.cell_col_begin <= asked.cell_col_count - found.cell_col_count
        and len(found.values) == len(found.counts) == cells
        and len(found.nonfinite_counts) in (0, cells)
    ):
        raise ConflictError(
            f"{reading.sidecars.who(rank)} returned a part that does not fit the heat map; try "
            "again"
        )
    return found
