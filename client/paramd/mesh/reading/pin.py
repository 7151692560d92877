"""Pins a selection at one step on all ranks: the latest if equal, else at a boundary.

Either way the pins count only if every rank's response names the same state.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from paramd.errors import AbortedError, ConflictError, DeadlineError, ExhaustedError, ParamdError
from paramd.inside import own_wait
from paramd.layout.plan import ReadPlan, plan_read
from paramd.layout.replicas import Sample, differing, ranges_in, sample_spans, samples_of
from paramd.layout.select import Pattern, select
from paramd.layout.types import TensorLayout
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.grpc import MORE_TIME, all_ended, cancelled
from paramd.mesh.peers.sidecars import (
    READ_INSTEAD,
    Captured,
    FastPathBackoff,
    PinKind,
    Pinned,
    PinTransport,
    RankPin,
    Sidecars,
    Spans,
    no_step_in_time,
    one_step,
    pinned_at,
    told_step,
)
from paramd.mesh.reading.stream import Reading
from paramd.mesh.reading.transfer import Chosen

_FIRST_BACKOFF_S = 0.005
_LAST_BACKOFF_S = 0.25
_LAST_PATIENCE_S = 8.0
# With less than this left, a call's DeadlineError counts as the caller's own deadline.
_ANOTHER_CALL_S = 2.0
# Other readers' snapshots end soon; a request larger than the budget never fits.
_BUDGET_PATIENCE_S = 3.0
# Other ranks may still end the update after which the caller reads.
_ITSELF_S = 5.0
# An answer does not wait for what is only compared with it.
_BESIDE_S, _COMPARE_S = 0.1, 2.0


NOW = PinKind()


class Pinner:
    """Pins one step on several ranks."""

    def __init__(
        self,
        transport: PinTransport,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        backoff: FastPathBackoff | None = None,
        patience_s: float = 1.0,
        samples: Sequence[Sample] = (),
        waits_for_itself: Callable[[], bool] = lambda: False,
    ) -> None:
        """`samples` are pinned beside what only a boundary can copy; `compared` pins others.
        `waits_for_itself`: whether the caller is what a boundary would wait for."""
        self._transport = transport
        self._samples = samples
        self._waits_for_itself = waits_for_itself
        self._clock = clock
        self._sleep = sleep
        self._patience_s = patience_s
        self._backoff = backoff if backoff is not None else FastPathBackoff()

    @asynccontextmanager
    async def pinned(
        self,
        spans: Spans,
        *,
        deadline_s: float,
        with_buffers: bool = False,
        unsettled: bool = False,
        mark: str = "",
    ) -> AsyncIterator[Pinned]:
        """As `pin`, with leases renewed until the block ends, which releases them."""
        found = await self.pin(
            spans,
            deadline_s=deadline_s,
            with_buffers=with_buffers,
            unsettled=unsettled,
            mark=mark,
        )
        pins = list(found.pins.values())
        renewing = asyncio.create_task(self._renew(pins), name="paramd-leases")
        try:
            yield found
        finally:
            renewing.cancel()
            self._release(pins)
            await asyncio.wait({renewing})

    async def pin(
        self,
        spans: Spans,
        *,
        deadline_s: float,
        with_buffers: bool = False,
        unsettled: bool = False,
        mark: str = "",
    ) -> Pinned:
        """Snapshots of `spans` at one step, leased until the caller releases them.

        Args:
            spans: bytes of each rank's arena, by rank.
            deadline_s: on the pinner's clock, by default `time.monotonic()`.
            with_buffers, unsettled, mark: as in `PinKind`.

        Raises:
            AbortedError: no step was common to all ranks until the deadline.
            ExhaustedError: the ranks have no room for the snapshots.
            ConflictError: the state is unsettled, one step has several iterations, or the caller
                is what a boundary would wait for.
            UnreachableError: a rank does not respond.
        """
        how = PinKind(with_buffers=with_buffers, unsettled=unsettled, mark=mark)
        reason = ""
        backoff_s = _FIRST_BACKOFF_S
        patience_until_s = self._clock() + _BUDGET_PATIENCE_S
        itself_until_s = self._clock() + _ITSELF_S
        while True:
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                raise no_step_in_time(spans, reason if reason else "no attempt was made")
            try:
                found, why = await self._try_once(spans, left_s, how)
                if not reason or left_s >= _ANOTHER_CALL_S:
                    reason = why
            except AbortedError as error:
                # An attempt that had hardly any time left is less informative than an earlier one.
                if not reason or left_s >= _ANOTHER_CALL_S:
                    reason = str(error)
                found = None
            except DeadlineError as error:
                if deadline_s - self._clock() < _ANOTHER_CALL_S:
                    if not reason:
                        raise
                    # The last attempt only ran out of time; an earlier one's reason is more
                    # informative.
                    raise no_step_in_time(spans, reason) from error
                found, reason = None, str(error)
            except ExhaustedError as error:
                if self._clock() > patience_until_s:
                    raise
                found, reason = None, str(error)
            if found is not None:
                return found
            self._check_outside(itself_until_s, reason)
            left_s = max(deadline_s - self._clock(), 0.0)
            await self._sleep(min(backoff_s * random.uniform(0.5, 1.0), left_s))
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    def _check_outside(self, until_s: float, reason: str) -> None:
        if self._clock() > until_s and self._waits_for_itself():
            raise own_wait(f"a common step of the ranks ({reason})", READ_INSTEAD)

    async def _try_once(
        self, spans: Spans, left_s: float, how: PinKind
    ) -> tuple[Pinned | None, str]:
        if how.with_buffers:
            return await self._at_boundary(spans, left_s, True)
        if how.unsettled or how.mark:
            return await self.try_now(spans, left_s, how)
        alone = len(spans) == 1 or self._waits_for_itself()
        if alone or self._backoff.tries(self._clock()):
            return await self.try_now(spans, left_s)
        return await self._boundary_or_now(spans, left_s)

    async def try_now(
        self, spans: Spans, left_s: float, how: PinKind = NOW
    ) -> tuple[Pinned | None, str]:
        """Pin the latest step of each rank; None if they differ, and why. Raises as `pinned`."""
        pins = await self._pin_all(spans, how, left_s)
        try:
            common = one_step(pins)
        except ConflictError:
            self._release(pins)
            raise
        if common is not None:
            self._backoff.agreed()
            return pinned_at(common, pins), ""
        self._release(pins)
        self._backoff.differed(self._clock())
        return None, "the ranks were at different steps: " + ", ".join(
            f"rank {pin.rank} at {told_step(pin)}" for pin in pins
        )

    async def _boundary_or_now(self, spans: Spans, left_s: float) -> tuple[Pinned | None, str]:
        """Pin at a boundary; meanwhile retry the fast path, in case training has stopped."""
        boundary = asyncio.create_task(self._at_boundary(spans, left_s, False))
        patience_s = self._patience_s
        wanted = False
        try:
            while not (await asyncio.wait({boundary}, timeout=patience_s))[0]:
                patience_s = min(2 * patience_s, _LAST_PATIENCE_S)
                try:
                    found, _ = await self.try_now(spans, left_s)
                except (AbortedError, ExhaustedError, DeadlineError):
                    continue
                if found is not None:
                    return found, ""
            wanted = True
            return boundary.result()
        finally:
            if not wanted:
                await self._withdraw(boundary)

    async def _withdraw(self, boundary: asyncio.Task[tuple[Pinned | None, str]]) -> None:
        """Cancel a boundary that is no longer needed; release its pins if it came anyway."""
        boundary.cancel()
        await asyncio.wait({boundary})
        if not boundary.cancelled() and boundary.exception() is None:
            late, _ = boundary.result()
            if late is not None:
                self._release([*late.pins.values(), *late.beside.values()])

    async def _at_boundary(
        self, spans: Spans, left_s: float, with_buffers: bool
    ) -> tuple[Pinned | None, str]:
        began_s = self._clock()
        how = PinKind(True, with_buffers)
        pins = await self._pin_all(spans, how, left_s)
        beside: list[RankPin] = []
        every, kept = [*pins], False
        # Here already: a boundary may be further away than a lease is long.
        renewing = asyncio.create_task(self._renew(every), name="paramd-leases")
        try:
            with suppress(ParamdError):
                beside = await self._pin_all(sample_spans(self._samples), how, left_s)
            every += beside
            left_s -= self._clock() - began_s
            answer = await self._schedule(every, left_s)
            kept = answer.captured and answer.state.step >= 0
        finally:
            await cancelled(renewing)
            if not kept:
                self._release(every)
        if not kept:
            return None, answer.reason or "the boundary was missed"
        # Whatever is read of them has to be of this boundary of this agreement.
        pins, beside = (
            [replace(p, state=answer.state, boundary_token=answer.boundary_token) for p in some]
            for some in (pins, beside)
        )
        return pinned_at(answer.state, pins, beside), ""

    async def _schedule(self, pins: Sequence[RankPin], left_s: float) -> Captured:
        try:
            answer = await self._transport.schedule(pins, left_s)
        except DeadlineError as error:
            raise DeadlineError(
                f"the trainers reached no common boundary within {max(left_s, 0.0):.1f} s: "
                f"{error}; training has stopped or ended, or a rank is slower than that; "
                f"{MORE_TIME}, or read only parameters (buffers=False), which needs no boundary "
                "while training has stopped, unless they are mirrored"
            ) from error
        if any(pin.state.incarnation != answer.state.incarnation for pin in pins):
            raise ConflictError("a new run began before the boundary; try again")
        return answer

    async def _pin_all(self, spans: Spans, how: PinKind, left_s: float) -> list[RankPin]:
        # A pin cancelled in flight may still be granted; the transport takes it back.
        return await all_ended(
            [self._transport.pin(rank, of, how, left_s) for rank, of in spans.items()],
            self._transport.release,
        )

    def _release(self, pins: Iterable[RankPin]) -> None:
        for pin in pins:
            self._transport.release(pin)

    async def _renew(self, pins: Sequence[RankPin]) -> None:
        lease_s = min(pin.lease_s for pin in pins)
        while True:
            await asyncio.sleep(lease_s / 3)
            # A failed renewal surfaces as NOT_FOUND at the next read.
            await asyncio.gather(
                *(self._transport.renew(pin) for pin in pins), return_exceptions=True
            )


Result = TypeVar("Result")

Work = Callable[[Reading, ReadPlan], Awaitable[Result]]
"""Called while the plan is pinned."""


async def choose(
    reach: SidecarFinder,
    sidecars: Sidecars,
    patterns: Sequence[Pattern],
    *,
    buffers: bool,
    replica: int | None = None,
) -> Chosen:
    """The matching names and a read plan of this replica, or of one that lately responded.

    Raises:
        NotFoundError: If a pattern matches nothing.
        UsageError: If there is no such replica.
        RankUnreachableError: If a needed rank was just found stopped.
    """
    index = await reach.index(sidecars)
    selection = select(index, patterns, with_buffers=buffers)
    plan = plan_read(index.layout, selection, costs=reach.costs(), replica=replica)
    sidecars.check_not_stopped(read.rank for read in plan.ranks)
    names = [item.names for item in selection]
    return Chosen(names, plan, selection.at_boundary, selection.tensors)


def spans_of(sidecars: Sidecars, plan: ReadPlan) -> Spans:
    """The spans of each rank for a plan; of one rank at least, as every result needs a step."""
    if not plan.ranks:
        return {min(sidecars.document.peers, default=0): ()}
    return {read.rank: read.spans for read in plan.ranks}


def samples_for(
    reach: SidecarFinder, sidecars: Sidecars, tensors: Iterable[TensorLayout]
) -> list[Sample]:
    """What of these tensors can be compared between ranks that lately responded."""
    ranks = sidecars.document.peers.keys() - reach.costs().keys()
    return samples_of(tensors, ranks, random.randrange(1 << 16))


async def compared(
    reach: SidecarFinder, sidecars: Sidecars, pinned: Pinned, samples: Sequence[Sample]
) -> tuple[str, ...] | None:
    """The tensors that differ between replicas at the pinned state; None: not compared, or alike
    where one did not respond lately.

    Without samples `beside` it pins those that are there at once. Never fails: no answer depends
    on it.
    """
    if pinned.unsettled:
        return None
    spans = sample_spans(samples)
    state, beside = pinned.state, dict(pinned.beside)

    async def pin(rank: int) -> None:
        request = sidecars.pin_request(spans[rank], at_step=state.step, at_history=state.history)
        with suppress(ParamdError):
            found = RankPin.of(rank, await sidecars.pin_step(rank, request, _BESIDE_S))
            if found.state == state:
                beside[rank] = found
            else:  # the same step before or after an edit, say
                sidecars.release(found)

    async def digests(rank: int) -> list[bytes]:
        return await reading.digests(rank, ranges_in(samples, rank, spans[rank]))

    try:
        if not beside and state.step:
            await all_ended(map(pin, spans))
        reading = Reading(sidecars, replace(pinned, pins=beside), time.monotonic() + _COMPARE_S)
        seen = dict(zip(beside, await all_ended(map(digests, beside)), strict=True))
    except ParamdError:
        return None
    finally:
        for one in beside.values():
            sidecars.release(one)
    if len(seen) < 2 and samples:
        return None
    return differing(samples, seen) or (None if reach.costs() else ())


@asynccontextmanager
async def pinned(
    reach: SidecarFinder,
    sidecars: Sidecars,
    chosen: Chosen,
    deadline_s: float,
    *,
    unsettled: bool = False,
    mark: str = "",
    samples: Sequence[Sample] = (),
) -> AsyncIterator[Pinned]:
    """Snapshots of `chosen`. Args, Raises: as `Pinner.pinned`."""
    pinner = Pinner(
        sidecars,
        backoff=reach.backoff,
        samples=samples,
        waits_for_itself=sidecars.waits_for_itself,
    )
    async with pinner.pinned(
        spans_of(sidecars, chosen.plan),
        deadline_s=deadline_s,
        with_buffers=chosen.at_boundary and not mark,
        unsettled=unsettled,
        mark=mark,
    ) as found:
        yield found


async def while_pinned(
    reach: SidecarFinder,
    patterns: Sequence[Pattern] | Callable[[Sidecars], Awaitable[Chosen]],
    work: Work[Result],
    deadline_s: float,
    *,
    buffers: bool = False,
    unsettled: bool = False,
) -> Result:
    """Run `work` while the tensors that match, or that a function chooses, are pinned at one step.

    Runs it again, with new pins, if a sidecar is lost meanwhile. Raises as `AsyncMesh.summon`, and
    as `work`.
    """

    async def attempt(sidecars: Sidecars) -> Result:
        if callable(patterns):
            chosen = await patterns(sidecars)
        else:
            chosen = await choose(reach, sidecars, patterns, buffers=buffers)
        async with pinned(reach, sidecars, chosen, deadline_s, unsettled=unsettled) as pins:
            return await work(Reading(sidecars, pins, deadline_s), chosen.plan)

    return await reach.attempts(attempt, deadline_s)
