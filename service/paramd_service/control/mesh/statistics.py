"""Statistics, heatmaps, values and gradients for REST, read from sidecars as clients read them.

`HeldSnapshots` are pinned on all ranks at one step until a lease of their REST caller ends. This
control plane renews the sidecars' own leases; if it dies, they expire within half a minute.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from paramd.errors import (
    ConflictError,
    DeadlineError,
    DeniedError,
    NotFoundError,
    ParamdError,
    UsageError,
    asked_by,
)
from paramd_service.admission import CALLER, Shares, Who
from paramd_service.aio import kept, stopped

if TYPE_CHECKING:
    from paramd.layout.plan import Costs, ReadPlan
    from paramd.layout.select import SelectedTensor
    from paramd.layout.stats import Columns, StatsPlan
    from paramd.layout.types import Layout, TensorLayout
    from paramd.mesh.frames.frames import GradFrame, Kind
    from paramd.mesh.insight.spectrum import Spectrum
    from paramd.mesh.insight.updates import Updates
    from paramd.mesh.peers.discovery import SidecarFinder
    from paramd.mesh.peers.sidecars import Pinned, Sidecars
    from paramd.mesh.reading.reductions import TensorHeatmap
    from paramd.mesh.reading.stream import Reading
    from paramd.mesh.reading.transfer import Chosen
    from paramd.mesh.results import StatsTable
    from paramd.state import StateName

MAX_HELD = 16
"""Most snapshots held at a time."""

Result = TypeVar("Result")
FindSidecars = Callable[[], Awaitable["SidecarFinder"]]
"""Returns the connections to the sidecars, opened on first use."""
Choosing: TypeAlias = "Sequence[str] | Callable[[Sidecars], Awaitable[Chosen]]"
Work = Callable[["Reading", "ReadPlan"], Awaitable[Result]]
"""A read of pinned tensors."""

TIMEOUT_S, TOLD_S, SEEN_S = 30.0, 10.0, 0.3
MAX_CONCURRENT = 8
"""Most concurrent queries; each takes a thread and some memory on every rank."""

MAX_STREAMS = 32
"""Most concurrent gradient streams."""


@dataclass(eq=False, slots=True)
class LeasedSnapshot:
    id: str
    filter: str
    incarnation: int
    step: int
    unsettled: bool
    expires_s: float
    """On the monotonic clock."""
    pins: Mapping[int, tuple[str, int]]
    """Snapshot id and size in bytes, by rank."""
    who: Who = None
    """The token that pinned it; None for the owner."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    released: bool = False

    @property
    def left_s(self) -> float:
        return max(self.expires_s - time.monotonic(), 0.0)


Pin = Callable[[Callable[["Pinned"], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]]
"""Runs its argument while the tensors are pinned."""


class HeldSnapshots:
    """Snapshots by id. Event loop only."""

    def __init__(self) -> None:
        self._held: dict[str, LeasedSnapshot] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._shares = Shares(MAX_HELD, "snapshots held")

    def all(self) -> Sequence[LeasedSnapshot]:
        """Live snapshots, earliest expiry first."""
        return sorted(self._held.values(), key=lambda held: held.expires_s)

    def get(self, held_id: str) -> LeasedSnapshot:
        """The live snapshot of an id. Raises NotFoundError."""
        held = self._held.get(held_id)
        if held is None:
            raise NotFoundError("snapshot: none has that id, or its lease has ended; pin it again")
        return held

    async def pin(self, pin: Pin, *, filter_text: str, lease_s: float) -> LeasedSnapshot:
        """Pin, and hold until the lease ends, `release` or `close`. Raises what `pin` raises, and
        ExhaustedError when too many are held."""
        who = CALLER.get()
        self._shares.take(who)
        pinned_now: asyncio.Future[LeasedSnapshot] = asyncio.get_running_loop().create_future()

        async def hold(pinned: Pinned) -> None:
            held = LeasedSnapshot(
                id=secrets.token_hex(16),
                filter=filter_text,
                incarnation=pinned.state.incarnation,
                step=pinned.state.step,
                unsettled=pinned.unsettled,
                expires_s=time.monotonic() + lease_s,
                pins={r: (p.snapshot_id, p.size_bytes) for r, p in pinned.pins.items()},
                who=who,
            )
            # The caller gave up while the ranks were pinning; returning releases the pins.
            if pinned_now.cancelled():
                return
            pinned_now.set_result(held)
            self._held[held.id] = held
            try:
                await _until_over(held)
            finally:
                del self._held[held.id]

        task = kept(self._tasks, pin(hold), "paramd-held-snapshot")
        task.add_done_callback(lambda _: self._shares.give_back(who))
        try:
            both: set[asyncio.Future[Any]] = {task, pinned_now}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not pinned_now.done():
                task.result()  # raises: the pin has failed
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            pinned_now.cancel()
        return pinned_now.result()

    def renew(self, held_id: str, lease_s: float, *, by_admin: bool = False) -> LeasedSnapshot:
        """Restart a lease from now. Raises NotFoundError; DeniedError for another token's."""
        held = self.get(held_id)
        _check_holder(held, by_admin=by_admin)
        held.expires_s = time.monotonic() + lease_s
        held.moved.set()
        return held

    def release(self, held_id: str, *, by_admin: bool = False) -> LeasedSnapshot | None:
        """End a lease; None if it has ended.

        Raises:
            DeniedError: For another token's.
        """
        held = self._held.get(held_id)
        if held is not None:
            _check_holder(held, by_admin=by_admin)
            held.released = True
            held.moved.set()
        return held

    async def close(self) -> None:
        await stopped(*self._tasks)


def _check_holder(held: LeasedSnapshot, *, by_admin: bool) -> None:
    if not by_admin and held.who != CALLER.get():
        raise DeniedError(
            "snapshot: another token pinned it; ask its holder or an admin to release it"
        )


async def _until_over(held: LeasedSnapshot) -> None:
    while not held.released and held.left_s:
        held.moved.clear()
        try:
            async with asyncio.timeout(held.left_s):
                await held.moved.wait()
        except TimeoutError:
            continue  # `renew` may have moved the expiry meanwhile: check it again


class Ready(NamedTuple):
    """How to read the statistics of many tensors of a layout: in any state of it."""

    choice: Sequence[object]
    """What chose the tensors, and for whom; then ranks that cost something."""
    tensors: Sequence[TensorLayout]
    missing: Sequence[Any]
    """What `Pick` says is missing."""
    plan: StatsPlan


class Rows(NamedTuple):
    """Statistics of many tensors."""

    ready: Ready
    columns: Columns
    state: tuple[StateName, bool]
    """Its whole name, and whether it was unsettled."""
    ranks: Sequence[int]
    """Those that were read: of one replica."""


Pick = Callable[[], tuple[Sequence["SelectedTensor"], Sequence[Any]]]
"""Chooses tensors, of one layout each time alike, and says what is missing. On a thread."""


class StatsSource:
    """Queries that the sidecars reduce. Single event loop; connects on first use."""

    def __init__(self, reaching: FindSidecars) -> None:
        self._reaching = reaching
        self._queries = Shares(MAX_CONCURRENT, "concurrent queries")
        self._spectra = asyncio.Lock()
        self._streams = Shares(MAX_STREAMS, "gradient streams")
        self._kept: Rows | None = None
        self._ready: Ready | None = None
        self._planning = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.held = HeldSnapshots()
        """Snapshots leased by REST callers."""

    async def get(
        self, patterns: str | Sequence[str], *, with_buffers: bool, with_histogram: bool = False
    ) -> StatsTable:
        """Statistics of all matching tensors, at one step.

        Raises:
            ExhaustedError: If too many queries run.
            ParamdError: As `AsyncMesh.stats` does.
        """
        from paramd.mesh.reading.reductions import compute_stats

        work = partial(compute_stats, with_exponents=with_histogram)
        wanted = [patterns] if isinstance(patterns, str) else patterns
        return await self._reading(wanted or ["*"], work, buffers=with_buffers)

    async def rows(self, choice: object, digest: str, layout: Layout, pick: Pick) -> Rows:
        """Statistics of the parameters that are picked of a layout. Raises as `get` and `pick`."""
        from paramd.mesh.reading.reductions import compute_columns
        from paramd.mesh.reading.transfer import Chosen

        reach = await self._reaching()
        # First: what cannot be chosen is no outage. In the share: what is refused needs no plan.
        with self._queries.one(CALLER.get()):
            ready = await self._planned(choice, layout, pick, reach.costs())

        async def choosing(sidecars: Sidecars) -> Chosen:
            if sidecars.document.layout_digest != digest:
                raise ConflictError("the layout has changed; try again")
            nonlocal ready
            if ready.choice != (choice, *(costs := reach.costs())):
                ready = await self._planned(choice, layout, pick, costs)
            sidecars.check_not_stopped(one.rank for one in ready.plan.ranks)
            return Chosen((), ready.plan, layout.mirrored)

        async def work(reading: Reading, _: object) -> Rows:
            columns = await compute_columns(reading, ready.plan.runs, len(ready.tensors))
            pinned = reading.pinned
            state = pinned.state, pinned.unsettled
            return Rows(ready, columns, state, [*pinned.pins])

        found = await self._reading(choosing, work)
        # What rests may be changed by its script under the same name: read again each time.
        self._kept = None if found.state[1] or ready.missing else found
        return found

    def prepare(self, choice: object, layout: Layout, pick: Pick) -> None:
        """Plan in the background what `rows` is likely to read; one at a time."""

        async def plan() -> None:
            with suppress(ParamdError):
                await self._planned(choice, layout, pick)

        if not self._planning.locked():
            kept(self._tasks, plan(), "paramd-stats-plan")

    async def _planned(
        self, choice: object, layout: Layout, pick: Pick, costs: Costs | None = None
    ) -> Ready:
        from paramd.layout.stats import plan_stats

        def planned() -> Ready:
            chosen, missing = pick()
            plan = plan_stats(layout, chosen, costs)
            return Ready(choosing, [one.tensor for one in chosen], missing, plan)

        choosing = choice, *(costs or ())
        async with self._planning:
            if (ready := self._ready) is None or ready.choice != choosing:
                ready = await asyncio.to_thread(planned)
                # What is missing, and why, is told anew each time, and may be much.
                self._ready = None if ready.missing else ready
            return ready

    async def kept(self, choice: object) -> Rows | None:
        """The last `rows`, if their ranks are still at that state, without copying anything."""
        from paramd.mesh.reading.pin import Pinner

        found = self._kept
        if found is None or found.ready.choice[0] != choice:
            return None

        async def look(sidecars: Sidecars) -> Rows | None:
            now, _ = await Pinner(sidecars).try_now(dict.fromkeys(found.ranks, ()), SEEN_S)
            if now is None:
                return None
            for pin in now.pins.values():
                sidecars.release(pin)
            return found if (now.state, now.unsettled) == found.state else None

        with self._queries.one(CALLER.get()), suppress(ParamdError):
            asked_by.set(CALLER.get() or "")
            return await (await self._reaching()).attempts(look, time.monotonic() + SEEN_S)
        return None

    async def histogram(
        self, pattern: str, *, bins: int, low: float | None, high: float | None
    ) -> tuple[StatsTable, list[float]]:
        """Histogram of one tensor with `bins` equal bins: (table with the counts, bin edges).

        A bound left out is the smallest or largest finite element at that step; the last bin then
        includes the largest one. Raises as `get`."""
        from paramd.mesh.reading.reductions import compute_stats

        async def work(reading: Reading, plan: ReadPlan) -> tuple[StatsTable, list[float]]:
            least, most = low, high
            if low is None or high is None:
                table = await compute_stats(reading, plan)
                found = table.total.summary
                least = low if low is not None else found.min
                most = high if high is not None else math.nextafter(found.max, math.inf)
            assert least is not None
            assert most is not None
            edges = bin_edges(least, most, bins)
            return await compute_stats(reading, plan, edges=edges), edges

        return await self._reading([pattern], work)

    async def heatmap(
        self, pattern: str, *, mode: str, rows: int, columns: int, row_dims: int | None
    ) -> tuple[Pinned, TensorHeatmap]:
        """(snapshots read, heatmap) of the tensor. Raises as `get` and `compute_heatmap`."""
        from paramd.mesh.reading.reductions import compute_heatmap

        work = partial(
            compute_heatmap, mode=mode, max_rows=rows, max_columns=columns, row_dims=row_dims
        )
        return await self._stated(pattern, work)

    async def values(self, pattern: str) -> tuple[Pinned, list[str]]:
        """(snapshots read, elements as text) of one tensor. Raises as `get` and `read_texts`."""
        from paramd.mesh.reading.reductions import read_texts

        return await self._stated(pattern, read_texts)

    async def updates(self, patterns: Sequence[str], steps: int) -> Updates:
        """What the next updates change in each matching parameter. Raises as `get`, and
        ConflictError if they do not come within `TIMEOUT_S`."""
        from paramd.mesh.insight.updates import compute_updates

        with self._queries.one(CALLER.get()):
            reach = await self._reaching()
            asked_by.set(CALLER.get() or "")
            deadline_s = time.monotonic() + TIMEOUT_S
            try:
                return await compute_updates(reach, patterns, deadline_s, steps)
            except DeadlineError as error:
                raise ConflictError(
                    f"steps: {steps:,} were not compared within {TIMEOUT_S:.0f} s: {error}; "
                    "ask for fewer, or use mesh.updates with a longer timeout"
                ) from error

    async def optimizer_groups(self) -> tuple[int, Sequence[Sequence[Mapping[str, Any]]]]:
        """(step, parameter groups of each optimizer of rank 0). Raises as `get`."""
        from paramd.mesh.exports.pins import optimizer_groups

        with self._queries.one(CALLER.get()):
            reach = await self._reaching()
            deadline_s = time.monotonic() + TOLD_S
            return await reach.attempts(lambda of: optimizer_groups(of, deadline_s), deadline_s)

    async def spectrum(self, pattern: str, k: int) -> Spectrum:
        """The spectrum of the one matching parameter. Raises as `get` and `spectrum_of`."""
        from paramd.mesh.insight.spectrum import spectrum_of

        # Its matrices are in this process; one at a time bounds them.
        async with self._spectra:
            return await self._reading([pattern], partial(spectrum_of, k=k), buffers=False)

    async def pin(
        self, patterns: Sequence[str], *, with_buffers: bool, filter_text: str, lease_s: float
    ) -> LeasedSnapshot:
        """Pin and lease a snapshot of all matching tensors: `HeldSnapshots`. Raises as `get`."""
        from paramd.mesh.reading.pin import while_pinned

        reach = await self._reaching()
        asked_by.set(CALLER.get() or "")

        async def pin(hold: Callable[[Pinned], Awaitable[None]]) -> None:
            began = False

            async def work(reading: Reading, _plan: ReadPlan) -> None:
                # `while_pinned` may retry `work`; the snapshot must not be held twice.
                nonlocal began
                if not began:
                    began = True
                    await hold(reading.pinned)

            deadline_s = time.monotonic() + TIMEOUT_S
            await while_pinned(reach, patterns, work, deadline_s, buffers=with_buffers)

        return await self.held.pin(pin, filter_text=filter_text, lease_s=lease_s)

    async def gradients(
        self, patterns: Sequence[str], *, every: int, kind: Kind
    ) -> AsyncGenerator[GradFrame[Any], None]:
        """Gradient statistics. Raises as `AsyncMesh.grads`; ExhaustedError: too many streams."""
        from paramd.mesh.frames.grads import GradRequest, open_stream
        from paramd.mesh.reading.transfer import Transfer

        with self._streams.one(CALLER.get()):
            reach = await self._reaching()
            asked_by.set(CALLER.get() or "")
            wanted = GradRequest(patterns=tuple(patterns), every=every, kind=kind, transport="auto")
            with closing(Transfer()) as transfer:
                stream = await open_stream(reach, transfer, wanted)
                async with aclosing(stream.frames()) as frames:
                    async for frame in frames:
                        yield frame

    async def close(self) -> None:
        """Release all held snapshots."""
        await stopped(*self._tasks)
        await self.held.close()
        self._kept = self._ready = None

    async def _stated(self, pattern: str, work: Work[Result]) -> tuple[Pinned, Result]:
        """`work` on the one matching tensor, with the snapshots it read."""

        async def stated(reading: Reading, plan: ReadPlan) -> tuple[Pinned, Result]:
            result = await work(reading, plan)
            return reading.pinned, result

        return await self._reading([pattern], stated)

    async def _reading(
        self, patterns: Choosing, work: Work[Result], *, buffers: bool = True
    ) -> Result:
        """Run `work` on a pinned read of the matching tensors."""
        from paramd.mesh.reading.pin import while_pinned

        with self._queries.one(CALLER.get()):
            reach = await self._reaching()
            # Sidecars divide their capacity among callers, so name the user, not this process.
            asked_by.set(CALLER.get() or "")
            deadline_s = time.monotonic() + TIMEOUT_S
            return await while_pinned(reach, patterns, work, deadline_s, buffers=buffers)


def bin_edges(low: float, high: float, bins: int) -> list[float]:
    """`bins + 1` increasing edges from `low` to `high`; fewer if the range has too few floats.

    Raises:
        UsageError: If a bound is not finite, or `low` is not below `high`.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UsageError("low, high: there is no finite element to take the range from; set both")
    if not low < high or not math.isfinite(high - low):
        raise UsageError(f"low, high: {low} and {high}; expected low below high")
    edges = [low + (high - low) * i / bins for i in range(bins)] + [high]
    # Where bins are narrower than the spacing of floats, edges coincide: drop the duplicates.
    return list(dict.fromkeys(edges))
