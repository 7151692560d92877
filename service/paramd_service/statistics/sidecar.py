"""ComputeStats, PoolSnapshot, DigestSnapshot, ReplayUpdate, and the calls of spectra, on a thread.

Torch is loaded on first use. Digests compare replicas: XXH3 detects accidents (a flipped bit, a
torn page, a stale shard), not deliberate forgery; only the trainer writes an arena. A replay checks
that its snapshots belong to one update, then computes the update again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.message import Message

from paramd import bounds
from paramd.answers import unpacked
from paramd.errors import AbortedError, UsageError
from paramd.layout.stats import Runs, by_dtype
from paramd.memory.control_page import UNCHANGED, Changes
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar import moments
from paramd_service.sidecar.calls import Call, CallTable
from paramd_service.sidecar.digests import digest_all
from paramd_service.sidecar.parts import SidecarHost, SidecarPart
from paramd_service.sidecar.ranges import place_in
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.snapshots.store import Key, Snapshot

if TYPE_CHECKING:
    from paramd_service.sidecar.statistics import pooling


MAX_RANGES = MAX_STATS_ITEMS = 100_000
SnapshotWork: TypeAlias = Callable[[SidecarHost, memoryview, Any, Sequence[bool]], Any]
"""(rank, the snapshot's bytes, request, stop) -> answer with an empty header.

Runs on a thread, should end early once `stop` is not empty, and raises UsageError when a part of
the request is out of range.
"""


class Statistics(SidecarPart):
    """Reduces snapshots, and replays an update from them."""

    name = "statistics"

    def calls(self) -> CallTable:
        return {
            "ComputeStats": Call(unary=self._stats, heavy=True),
            **{
                name: Call(unary=partial(self._on_thread, work), heavy=True)
                for name, work in _ON_THREAD.items()
            },
            "ReplayUpdate": Call(unary=self._replay, heavy=True),
        }

    async def _stats(self, request: pb.ComputeStatsRequest, timeout_s: float) -> Any:
        async with AsyncExitStack() as stack:
            before = None
            if request.before_snapshot_id:
                held = self.host.held(request.before_snapshot_id, timeout_s)
                before = (await stack.enter_async_context(held)).view()
            return await self._on_thread(partial(compute_stats, before), request, timeout_s)

    async def _on_thread(self, work: SnapshotWork, request: Any, timeout_s: float) -> Any:
        """The answer that `work` computes from a snapshot's bytes, with the header added."""
        async with self.host.held(request.snapshot_id, timeout_s) as snapshot:
            data, host = snapshot.view(), self.host
            answer = await host.reduced(lambda stop: work(host, data, request, stop))
        answer.header.CopyFrom(messages.header_of(host, snapshot))
        return answer

    async def _replay(self, request: pb.ReplayUpdateRequest, timeout_s: float) -> Message:
        async with AsyncExitStack() as stack:

            async def held(snapshot_id: str) -> Snapshot:
                return await stack.enter_async_context(self.host.held(snapshot_id, timeout_s))

            snapshots = ReplaySnapshots(
                before={one.state_key: await held(one.before_snapshot_id) for one in request.pairs},
                after={one.state_key: await held(one.after_snapshot_id) for one in request.pairs},
                gradients=await held(request.gradients_snapshot_id),
                facts=await held(request.facts_snapshot_id),
            )
            return await replay_update(self.host, snapshots)


def digest(
    _rank: SidecarHost, data: memoryview, request: pb.DigestSnapshotRequest, stop: Sequence[bool]
) -> pb.DigestSnapshotResponse:
    """One digest of 16 bytes per range."""
    parts = checked_ranges(request.ranges, len(data))
    return pb.DigestSnapshotResponse(digests=digest_all(data, parts, stop))


def checked_ranges(ranges: Sequence[pb.Span], size_bytes: int) -> list[tuple[int, int]]:
    """The ranges as pairs, all within [0, size_bytes).

    Raises:
        UsageError: If there are too many, or one leaves the snapshot.
    """
    if len(ranges) > MAX_RANGES:
        raise UsageError(f"ranges: {len(ranges):,}; expected at most {MAX_RANGES:,}")
    for part in ranges:
        if not 0 <= part.begin <= part.end <= size_bytes:
            raise UsageError(
                f"ranges: [{part.begin}, {part.end}); expected one within the snapshot's "
                f"{size_bytes} bytes"
            )
    return [(part.begin, part.end) for part in ranges]


MAX_POOL_ITEMS = 4096

_MODES = {
    pb.POOL_MODE_SUM: "sum",
    pb.POOL_MODE_MIN: "min",
    pb.POOL_MODE_MAX: "max",
    pb.POOL_MODE_ABSMAX: "absmax",
}


def compute_stats(
    before: memoryview | None,
    rank: SidecarHost,
    data: memoryview,
    request: pb.ComputeStatsRequest,
    stop: Sequence[bool],
) -> pb.ComputeStatsResponse:
    """One answer per item or run; with `before`, of the differences to those bytes."""
    if before is None and not request.with_exponents and not request.edges:
        runs = _runs_of(request)
        if moments.fits(runs):
            rank.faults.at("stats-item")
            few = moments.reduce_runs(data, runs, stop=stop)
            if request.HasField("runs"):
                return pb.ComputeStatsResponse(columns=few.columns())
            return pb.ComputeStatsResponse(stats=few.messages())
    from paramd_service.sidecar.statistics import reduce

    if before is not None and len(before) != len(data):
        raise UsageError(
            f"before_snapshot_id: a snapshot of {len(before)} bytes; expected one of the same "
            f"spans, {len(data)} bytes"
        )
    reduce.set_up()
    rank.faults.at("stats-item")
    found = reduce.reduce_runs(
        data,
        _runs_of(request),
        with_exponents=request.with_exponents,
        edges=reduce.make_edges(request.edges),
        before=before,
        stop=stop,
    )
    if request.HasField("runs"):
        return pb.ComputeStatsResponse(columns=found.columns())
    return pb.ComputeStatsResponse(stats=found.messages())


def _runs_of(request: pb.ComputeStatsRequest) -> list[Runs]:
    items, asked = enumerate(request.items), request.runs
    count = len(request.items) + len(asked.begin_bytes)
    if count > MAX_STATS_ITEMS:
        raise UsageError(f"items: {count:,}; expected at most {MAX_STATS_ITEMS:,}")
    if not request.HasField("runs"):
        return by_dtype((one.dtype, at, one.begin_bytes, one.numel) for at, one in items)
    if request.items or request.with_exponents or request.edges or count != len(asked.numels):
        raise UsageError(
            f"runs: {count:,} first bytes, {len(asked.numels):,} lengths; expected as many, and "
            "neither items nor exponents or edges beside them"
        )
    columns = range(count), asked.begin_bytes, asked.numels
    return [Runs(asked.dtype, *(array("q", one) for one in columns))]


def pool(
    rank: SidecarHost, data: memoryview, request: pb.PoolSnapshotRequest, stop: Sequence[bool]
) -> pb.PoolSnapshotResponse:
    """A heat map of the items."""
    if len(request.items) > MAX_POOL_ITEMS:
        raise UsageError(f"items: {len(request.items)}; expected at most {MAX_POOL_ITEMS}")
    from paramd_service.sidecar.statistics import pooling, reduce

    reduce.set_up()
    reduce.item_bytes(request.dtype)
    mode = _MODES.get(request.mode)
    if mode is None:
        raise UsageError(f"mode: {request.mode}; expected one of {', '.join(_MODES.values())}")
    grid = pooling.Grid(
        mode, request.row_count, request.col_count, request.cell_row_count, request.cell_col_count
    )
    views = _views(request.items, request.dtype, grid, len(data))
    rank.faults.at("pool")
    heatmap = pooling.pool(data, request.dtype, grid, views, lambda: bool(stop))
    height, width = heatmap.values.shape
    return pb.PoolSnapshotResponse(
        cell_row_begin=heatmap.begin[0],
        cell_col_begin=heatmap.begin[1],
        cell_row_count=height,
        cell_col_count=width,
        values=heatmap.values.flatten().tolist(),
        counts=heatmap.counts.flatten().tolist(),
        nonfinite_counts=heatmap.nonfinite.flatten().tolist() if heatmap.nonfinite.any() else (),
    )


def _views(
    items: Sequence[pb.PoolItem], dtype: str, grid: pooling.Grid, data_bytes: int
) -> list[pooling.View]:
    from paramd_service.sidecar.statistics import pooling

    return [
        pooling.make_view(
            item.begin_bytes,
            item.sizes,
            item.strides,
            item.steps,
            row_dims=item.row_dims,
            origin=(item.row_begin, item.col_begin),
            grid=grid,
            data_bytes=data_bytes,
            dtype=dtype,
        )
        for item in items
    ]


def _matrix_views(
    request: pb.ProfileSnapshotRequest | pb.MultiplySnapshotRequest, data_bytes: int
) -> list[pooling.View]:
    from paramd_service.sidecar.statistics import pooling, reduce

    reduce.set_up()
    if len(request.items) > MAX_POOL_ITEMS or any(item.row_dims != 1 for item in request.items):
        raise UsageError(
            f"items: {len(request.items)}; expected at most {MAX_POOL_ITEMS}, with row_dims 1"
        )
    if min(request.row_count, request.col_count) < 1:
        raise UsageError(
            f"row_count, col_count: {request.row_count}, {request.col_count}; expected 1 or more"
        )
    reduce.item_bytes(request.dtype)
    pooling.check_float(request.dtype)
    grid = pooling.Grid("sum", request.row_count, request.col_count, 1, 1)
    return _views(request.items, request.dtype, grid, data_bytes)


def profile(
    rank: SidecarHost, data: memoryview, request: pb.ProfileSnapshotRequest, stop: Sequence[bool]
) -> pb.ProfileSnapshotResponse:
    """Rows and columns of a matrix of floats."""
    views = _matrix_views(request, len(data))
    from paramd_service.sidecar.statistics import pooling

    rank.faults.at("pool")
    found = pooling.profile(data, request.dtype, views, lambda: bool(stop))
    return pb.ProfileSnapshotResponse(
        row_begin=found.row_begin,
        col_begin=found.col_begin,
        row_max=found.row_max.numpy().tobytes(),
        col_max=found.col_max.numpy().tobytes(),
        row_sums=found.row_sums.numpy().tobytes(),
        count=found.count,
        sum_squares=found.sum_squares,
        nonfinite_count=found.nonfinite,
        saturated_count=found.saturated,
        denormal_count=found.denormal,
        zero_count=found.zero,
    )


MAX_FACTOR_BYTES = 3 << 20


def multiply(
    rank: SidecarHost, data: memoryview, request: pb.MultiplySnapshotRequest, stop: Sequence[bool]
) -> pb.MultiplySnapshotResponse:
    """A matrix of floats times a narrow one."""
    views = _matrix_views(request, len(data))
    import numpy as np

    from paramd_service.sidecar.statistics import pooling

    width, size = request.factor_width, len(request.factor)
    fits = 1 <= width <= pooling.MAX_WIDTH and size <= MAX_FACTOR_BYTES
    if not fits or request.factor_begin < 0 or not size or size % (8 * width):
        raise UsageError(
            f"factor, factor_width: {size:,} bytes, {width} columns; expected whole rows of 1 to "
            f"{pooling.MAX_WIDTH} float64 numbers, at most {MAX_FACTOR_BYTES:,} bytes"
        )
    factor = pooling.matrix(np.frombuffer(request.factor, dtype="<f8").reshape(-1, width))
    rank.faults.at("pool")
    begin, product = pooling.multiply(
        data,
        request.dtype,
        views,
        factor,
        request.factor_begin,
        lambda: bool(stop),
        transposed=request.transposed,
    )
    return pb.MultiplySnapshotResponse(begin=begin, product=product.numpy().tobytes())


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySnapshots:
    """The state before an update, its gradients and the state after it, held by the caller."""

    before: Mapping[str, Snapshot]
    """By state key; "" is the parameters."""
    after: Mapping[str, Snapshot]
    gradients: Snapshot
    facts: Snapshot


async def replay_update(rank: SidecarHost, snapshots: ReplaySnapshots) -> pb.ReplayUpdateResponse:
    """Compute the update again.

    Raises:
        UsageError: If the snapshots are not of one update and the same spans.
        AbortedError: If it did more than the update; capture another one.
    """
    _check(snapshots)
    rows = await rank.reduced(lambda stop: _replay(snapshots, stop))
    header = messages.header_of(rank, snapshots.after[""])
    return pb.ReplayUpdateResponse(header=header, tensors=rows)


def _check(found: ReplaySnapshots) -> None:
    first = found.before.get("")
    if first is None:
        raise UsageError("pairs: expected one with an empty state_key, the parameters")
    wanted = [
        *((one, key, pb.SOURCE_MOMENTS if key else 0, 0) for key, one in found.before.items()),
        *((one, key, pb.SOURCE_MOMENTS if key else 0, 1) for key, one in found.after.items()),
        (found.gradients, "", pb.SOURCE_GRADIENTS, 1),
    ]
    for one, key, source, later in wanted:
        is_it = one.key == Key(first.key.incarnation, first.key.spans, source, key)
        if not is_it or one.step != first.step + later:
            raise UsageError(
                f"pairs, gradients_snapshot_id: a snapshot of step {one.step}; expected step "
                f"{first.step + later}, the same spans, and {key or 'what its place says'}"
            )
    facts = found.facts
    if not facts.optimizer or facts.step != first.step:
        raise UsageError(
            f"facts_snapshot_id: expected optimizer state of step {first.step}, read from memory"
        )
    before = [*found.before.values(), facts]
    after = list(found.after.values())
    _check_alike([*before, *after, found.gradients], before, [*after, found.gradients])


def _check_alike(
    snapshots: Sequence[Snapshot], before: Sequence[Snapshot], after: Sequence[Snapshot]
) -> None:
    """Check that the snapshots are of one history, with one update between them and nothing else.
    Raises AbortedError if they are not; another update may be.

    An edit changes parameters, optimizer state or hyper-parameters within a step. And a step that a
    rank made of another number of backward passes is not the step of its gradients.
    """
    if len({one.history for one in snapshots}) > 1:
        raise AbortedError("the training was rolled back within the update; try again")
    if len({one.edits for one in snapshots if one.edits >= 0}) > 1:
        raise AbortedError("an edit was applied within the update's step; try again")
    for some in (before, after):
        found = sorted({one.iteration for one in some if one.iteration >= 0})
        if len(found) > 1:
            raise AbortedError(
                f"what was captured is of iterations {found[0]} and {found[-1]}; try again"
            )


def _replay(found: ReplaySnapshots, stop: Sequence[bool]) -> list[pb.ReplayedTensor]:
    from paramd_service.sidecar.statistics import replay

    notes = found.gradients.notes.notes if found.gradients.notes is not None else ()
    without_gradient = frozenset(note.arena_begin for note in notes if note.none)
    partial_group = frozenset(note.arena_begin for note in notes if note.partial_group)
    captured = replay.Captured(
        facts=unpacked(found.facts.optimizer, bounds.FACTS),
        before={key: one.view() for key, one in found.before.items()},
        after={key: one.view() for key, one in found.after.items()},
        gradients=found.gradients.view(),
        without_gradient=without_gradient,
        partial=partial_group,
        place=place_in(found.before[""].key.spans),
        changes=changes_around(found),
    )
    return replay.replay(captured, lambda: bool(stop))


def changes_around(found: ReplaySnapshots) -> Changes:
    """What the script has changed before and after the update, as far as it shows in the
    parameters before it and after it."""
    known = found.after[""].changes
    if not found.before[""].unsettled:
        # Copied once it had settled, it has those changes.
        return known._replace(resting=UNCHANGED)
    return known


_ON_THREAD: dict[str, SnapshotWork] = {
    "PoolSnapshot": pool,
    "ProfileSnapshot": profile,
    "MultiplySnapshot": multiply,
    "DigestSnapshot": digest,
}
"""Methods that reduce a snapshot to one answer."""
