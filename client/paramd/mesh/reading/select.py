"""What patterns choose in a job, and pinning just that at one step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from paramd.layout.plan import ReadPlan, plan_read
from paramd.layout.select import select
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.pins import Pinned
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.pin import Pinner
from paramd.mesh.reading.transfer import Chosen

Result = TypeVar("Result")

Work = Callable[[Sidecars, ReadPlan, Pinned, float], Awaitable[Result]]
"""What is done with what is pinned, until the deadline that is the last argument."""


async def choose(
    reach: SidecarFinder, sidecars: Sidecars, patterns: Sequence[str], *, buffers: bool
) -> Chosen:
    """Names and a read plan that spares ranks which lately did not answer.

    Raises:
        NotFoundError: a pattern matches nothing.
        RankUnreachableError: a needed rank was found stopped a moment ago.
    """
    index = await reach.index(sidecars)
    selection = select(index, patterns, with_buffers=buffers)
    plan = plan_read(index.layout, selection, prefer=reach.costs())
    sidecars.check_not_stopped(read.rank for read in plan.ranks)
    return Chosen(
        names=[item.names for item in selection],
        plan=plan,
        at_boundary=selection.at_boundary,
    )


@asynccontextmanager
async def pinned(
    reach: SidecarFinder,
    sidecars: Sidecars,
    chosen: Chosen,
    deadline_s: float,
    *,
    unsettled: bool = False,
) -> AsyncIterator[Pinned]:
    """Snapshots of what was chosen. Args, Raises: as `Pinner.pinned`."""
    spans: dict[int, Sequence[tuple[int, int]]] = {
        read.rank: read.spans for read in chosen.plan.ranks
    }
    if not spans:
        # Nothing to read, but still something to say: which step it is.
        spans = {min(sidecars.document.peers, default=0): ()}
    async with Pinner(sidecars, backoff=reach.backoff).pinned(
        spans,
        deadline_s=deadline_s,
        with_buffers=chosen.at_boundary,
        unsettled=unsettled,
    ) as found:
        yield found


async def while_pinned(
    reach: SidecarFinder,
    patterns: Sequence[str],
    work: Work[Result],
    deadline_s: float,
    *,
    buffers: bool = False,
    unsettled: bool = False,
) -> Result:
    """Runs `work` while what the patterns choose is pinned at one step.

    It may run again, with new pins, when a sidecar was lost meanwhile.

    Raises: as `AsyncMesh.summon`, and what `work` raises.
    """

    async def attempt(sidecars: Sidecars) -> Result:
        chosen = await choose(reach, sidecars, patterns, buffers=buffers)
        async with pinned(reach, sidecars, chosen, deadline_s, unsettled=unsettled) as pins:
            return await work(sidecars, chosen.plan, pins, deadline_s)

    return await reach.attempts(attempt, deadline_s)
