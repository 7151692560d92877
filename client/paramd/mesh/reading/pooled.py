"""Heat maps and values of one pinned tensor. No torch."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from paramd.errors import ConflictError, UsageError
from paramd.layout.elements import element_texts, place_elements
from paramd.layout.heatmaps import (
    MAX_CELLS,
    MODES,
    Heatmap,
    HeatmapItem,
    HeatmapPart,
    Matrix,
    heatmap_items,
    matrix_of,
    merge_parts,
)
from paramd.layout.plan import ReadPlan
from paramd.mesh.peers.sidecars import Pinned, Sidecars
from paramd.mesh.reading.stream import read_bytes
from paramd.v1 import sidecar_pb2

MAX_VALUES = 16_384
"""Most elements in one response of values."""

MAX_VALUES_BYTES = 64 << 20
"""Most bytes read for them: a slice of columns reads its whole rows."""

_POOL_MODES = {
    "mean": sidecar_pb2.POOL_MODE_SUM,
    "absmax": sidecar_pb2.POOL_MODE_ABSMAX,
    "min": sidecar_pb2.POOL_MODE_MIN,
    "max": sidecar_pb2.POOL_MODE_MAX,
}


@dataclass(frozen=True, slots=True)
class TensorHeatmap:
    """A heat map and the matrix it shows."""

    heatmap: Heatmap
    matrix: Matrix


async def compute_heatmap(
    sidecars: Sidecars,
    plan: ReadPlan,
    pinned: Pinned,
    deadline_s: float,
    *,
    mode: str,
    max_rows: int,
    max_columns: int,
    row_dims: int | None = None,
) -> TensorHeatmap:
    """Pool each rank's share of the plan's only tensor on its sidecar, and merge.

    Args:
        mode: One of `MODES`.
        max_rows, max_columns: Size limit, at least 1; values above `MAX_CELLS` are clamped.
        row_dims: Number of leading dims that form rows; None as in `matrix_of`.

    Raises:
        UsageError: not exactly one tensor, or an argument is out of range.
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
    answers = await asyncio.gather(
        *(
            _part(
                sidecars, plan, pinned, rank, items[rank], deadline_s, mode, matrix, rows, columns
            )
            for rank in items
            if items[rank]
        )
    )
    heatmap = await asyncio.to_thread(merge_parts, answers, mode=mode, rows=rows, columns=columns)
    numel = matrix.rows * matrix.columns
    if heatmap.count != numel:
        raise ConflictError(f"the ranks pooled {heatmap.count:,} of {numel:,} elements; try again")
    return TensorHeatmap(heatmap, matrix)


async def read_texts(
    sidecars: Sidecars, plan: ReadPlan, pinned: Pinned, deadline_s: float
) -> list[str]:
    """The elements of the plan's only tensor as exact text, row-major.

    Raises:
        UsageError: not exactly one tensor, or too many elements or bytes.
    """
    check_values(plan)
    tensor = plan.tensors[0]
    result = bytearray(tensor.size_bytes)
    snapshots = await asyncio.gather(
        *(
            read_bytes(sidecars, pinned, read.rank, 0, read.size_bytes, deadline_s)
            for read in plan.ranks
        )
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
    sidecars: Sidecars,
    plan: ReadPlan,
    pinned: Pinned,
    rank: int,
    items: tuple[HeatmapItem, ...],
    deadline_s: float,
    mode: str,
    matrix: Matrix,
    rows: int,
    columns: int,
) -> HeatmapPart:
    request = sidecar_pb2.PoolSnapshotRequest(
        snapshot_id=pinned.pins[rank].snapshot_id,
        dtype=plan.tensors[0].dtype,
        mode=_POOL_MODES[mode],
        row_count=matrix.rows,
        col_count=matrix.columns,
        cell_row_count=rows,
        cell_col_count=columns,
        items=[
            sidecar_pb2.PoolItem(
                begin_bytes=item.begin_bytes,
                sizes=item.sizes,
                strides=item.strides,
                steps=item.steps,
                row_dims=item.row_dims,
                row_begin=item.row_begin,
                col_begin=item.col_begin,
            )
            for item in items
        ],
    )
    left_s = deadline_s - time.monotonic()
    found = await sidecars.ask(rank, request, sidecar_pb2.PoolSnapshotResponse, left_s)
    cells = found.cell_row_count * found.cell_col_count
    fits = (
        0 <= found.cell_row_begin <= rows - found.cell_row_count
        and 0 <= found.cell_col_begin <= columns - found.cell_col_count
        and len(found.values) == len(found.counts) == cells
        and len(found.nonfinite_counts) in (0, cells)
    )
    if (found.header.incarnation, found.header.step) != (
        pinned.incarnation,
        pinned.step,
    ) or not fits:
        raise ConflictError(
            f"{sidecars.who(rank)} returned a part that does not fit the heat map; try again"
        )
    return HeatmapPart(
        row_begin=found.cell_row_begin,
        col_begin=found.cell_col_begin,
        rows=found.cell_row_count,
        columns=found.cell_col_count,
        values=found.values,
        counts=found.counts,
        nonfinite=found.nonfinite_counts,
    )
