"""A hold's steps are done when every rank has shown so, and not before."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from paramd.errors import ConflictError, UnreachableError
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.access.authority import Principal
from paramd_service.control.access.roles import UserRole
from paramd_service.control.mesh.coordinator import BoundaryAction, BoundaryRequest, Turn, Verdict
from paramd_service.edits.marks import Marks
from paramd_service.edits.pauses import Pause
from tests.unit.control.reports import mesh, report, view

BY = Principal("operator", UserRole.EDITOR, token_id="t")


class Ranks:
    """Two held ranks, and the coordinator that asks them."""

    def __init__(self, step: int, *, told_step: int) -> None:
        self.steps = {0: step, 1: step}
        self.silent: set[int] = set()
        self.told_step = told_step
        self.held, self.refuses, self.marked = True, False, {0}
        self.agree = asyncio.Event()
        self.agree.set()

    async def ask(self, rank: int, _: str, request: object) -> Any:
        if isinstance(request, pb.WithdrawBoundaryRequest):
            fate = pb.BOUNDARY_FATE_WITHDRAWN if self.refuses else pb.BOUNDARY_FATE_AGREED
            return pb.WithdrawBoundaryResponse(fate=fate)
        if isinstance(request, pb.ListKeptStatesRequest):
            kept = [pb.KeptState(mark="a", whole=True)] if rank in self.marked else []
            return pb.ListKeptStatesResponse(states=kept)
        if isinstance(request, pb.DropMarkRequest):
            return pb.DropMarkResponse(dropped=True)
        if rank in self.silent:
            raise UnreachableError(f"rank {rank} does not answer")
        held = {"phase": common_pb2.PHASE_HELD, "hold_left_ms": 9_000} if self.held else {}
        state = common_pb2.RankState(rank=rank, **held)
        return pb.GetStateResponse(header=common_pb2.Header(step=self.steps[rank]), state=state)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        yield Turn(7, mesh(0, 1))

    def joined(self) -> Any:
        return mesh(0, 1)

    async def round(self, request: BoundaryRequest, *_: object, **__: object) -> Verdict:
        await self.agree.wait()
        if self.refuses:
            raise ConflictError("a rank is late")
        self.held = request.action is not BoundaryAction.RESUME
        if self.told_step < 0:
            raise UnreachableError("a sidecar was lost while it was asked")
        return Verdict(True, self.told_step, "")


def hold(ranks: Ranks) -> Pause:
    @asynccontextmanager
    async def recorded(*_: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(outcome=lambda **_: None)

    served: Any = SimpleNamespace(
        job="run",
        check=lambda: None,
        registry=SimpleNamespace(view=lambda: mesh(0, 1)),
        bootstrap=SimpleNamespace(world_size=2),
        coordinator=ranks,
        calls=ranks,
        terms=SimpleNamespace(generation=1),
    )
    records: Any = SimpleNamespace(recorded=recorded, happened=AsyncMock())
    return Pause(served, records, agree_s=lambda _: 5.0, on_change=lambda *_: None)


@pytest.mark.parametrize("told_step", [40, -1], ids=["answered", "answer lost"])
async def test_ranks_that_have_not_begun_their_steps_are_stepping(told_step: int) -> None:
    ranks = Ranks(40, told_step=told_step)
    one = hold(ranks)
    found = await one.step(BY, 2, "")
    assert (found.state, found.step, found.steps_left) == ("stepping", 40, 2)
    ranks.steps = {0: 42, 1: 41}
    assert (await one.view()).state == "stepping"
    ranks.steps, ranks.silent = {0: 42, 1: 42}, {1}  # who does not answer has shown nothing
    assert (await one.view()).state == "stepping"
    ranks.silent = set()
    assert ((await one.view()).state, (await one.view()).step) == ("paused", 42)


async def test_a_hold_is_at_the_step_agreed_though_its_ranks_fall_silent() -> None:
    ranks = Ranks(40, told_step=40)
    one = hold(ranks)
    # What they told last is of before the hold, and of an earlier step.
    ranks.silent = {0, 1}
    found = await one.begin(BY, 20.0, "")
    assert (found.state, found.step) == ("paused", 40)
    assert found.holder.startswith("operator/")


async def test_a_pause_that_no_rank_tells_of_is_not_ended_and_keeps_its_holder() -> None:
    pause = hold(ranks := Ranks(40, told_step=40))
    served: Any = pause.mesh
    ranks.held = False
    begun = await pause.begin(BY, 20.0, "")
    served.registry.view = mesh  # the sidecars are on their way back
    assert (await pause.view()).step == -1
    with pytest.raises(UnreachableError, match="rank 0: its sidecar has not joined"):
        await pause.end(BY, "")
    with pytest.raises(UnreachableError, match="reports whether training is paused"):
        await pause.renew(BY, 20.0, begun.holder)
    served.registry.view = lambda: mesh(0, 1)
    assert (await pause.view()).holder == begun.holder
    assert (await pause.end(BY, "")).state == "running"


async def test_a_pause_is_told_by_any_rank_and_outlives_another_that_does_not_begin() -> None:
    pause = hold(ranks := Ranks(40, told_step=40))
    served: Any = pause.mesh
    ranks.held = False
    begun = await pause.begin(BY, 20.0, "")
    ranks.silent = {0}
    assert (await pause.view()).state == "paused"
    served.registry.view, ranks.refuses = mesh, True
    with pytest.raises(ConflictError, match="late"):
        await pause.begin(BY, 20.0, "")
    ranks.silent, served.registry.view = set(), lambda: mesh(0, 1)
    assert (await pause.view()).holder == begun.holder


async def test_a_control_plane_that_nobody_has_joined_yet_claims_no_resume() -> None:
    again = hold(Ranks(40, told_step=40))
    served: Any = again.mesh
    served.registry.view = mesh
    with pytest.raises(UnreachableError, match="has not joined"):
        await again.end(BY, "")
    served.registry.view = lambda: view(report(0, leaving=True), report(1, leaving=True))
    assert (await again.end(BY, "")).state == "running"


async def test_an_interrupted_pause_ends_alone_and_does_not_begin() -> None:
    ranks, by = Ranks(40, told_step=40), replace(BY, role=UserRole.ADMIN)
    one, ranks.held = hold(ranks), False
    async with one.during(BY):  # a mark is made; the pause waits for its end
        waiting = asyncio.create_task(one.begin(by, 300.0, "", pause_id="a"))
        await asyncio.sleep(0)
        assert (await one.end(by, "", "a")).state == "paused"
    with pytest.raises(ConflictError, match="ended before it began"):
        await waiting
    assert not ranks.held
    ranks.agree.clear()
    begun = asyncio.create_task(one.begin(by, 300.0, "", pause_id="b"))
    await asyncio.sleep(0)
    assert (await one.end(by, "", "c")).state == "pausing"
    ending = asyncio.create_task(one.end(by, "", "b"))
    await asyncio.sleep(0)
    ranks.agree.set()
    assert ((await begun).state, (await ending).state) == ("paused", "running")


async def test_a_lost_mark_is_told_until_it_is_dropped_or_another_sidecar_has_it() -> None:
    pause = hold(ranks := Ranks(40, told_step=40))
    served: Any = pause.mesh
    marks = Marks(served, pause, pause.records, lambda *_: None)
    other = report(1, peer=common_pb2.Peer(rank=1, address="127.0.0.2:9001"))  # with the same pid
    ranks.marked, served.registry.view = {0, 1}, lambda: mesh(0, 1)
    await marks.all()
    for marked, now, told in (
        ({0}, mesh(0, 1), ["a"]),
        ({0, 1}, view(report(0), other), []),
        ({0}, mesh(0, 1), ["a"]),
    ):
        ranks.marked, served.registry.view = marked, lambda now=now: now
        assert [one.name for one in await marks.lost()] == told
    await marks.drop(BY, "a")
    served.registry.view = lambda: mesh(0)
    assert not await marks.lost()
