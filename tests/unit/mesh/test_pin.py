"""One step on all ranks, or nothing pinned."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from paramd.errors import AbortedError, ConflictError, DeadlineError, ParamdError, UnreachableError
from paramd.layout.replicas import Sample
from paramd.mesh.peers.sidecars import Captured, PinKind, RankPin, one_step
from paramd.mesh.reading.pin import Pinner
from paramd.state import Settling, StateName

SPANS = {0: [(0, 8)], 1: [(0, 8)]}


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 0.001)
        await asyncio.sleep(0)


def captured(step: int, *, edits: int = -1, reason: str = "", incarnation: int = 1) -> Captured:
    return Captured(step >= 0, StateName(incarnation, 0, step, edits), reason)


class Ranks:
    """A transport whose answers are scripted; counts what is pinned."""

    def __init__(self, steps: Callable[[int, int], int | ParamdError]) -> None:
        self.steps = steps
        """(rank, how often it was asked) -> step, or an error."""
        self.asked: dict[int, int] = {}
        self.held: set[str] = set()
        self.kinds: list[PinKind] = []
        self.captures: list[Captured | ParamdError] = []
        self.schedule_count = 0
        self.renewed = self.renewals_before_boundary = 0
        self.boundary_never_comes = self.second_pin_never_comes = False
        self.lease_s = 30.0
        self.edits: Callable[[int, int], int] = lambda rank, count: -1

    async def pin(
        self, rank: int, spans: Sequence[tuple[int, int]], how: PinKind, timeout_s: float
    ) -> RankPin:
        count = self.asked[rank] = self.asked.get(rank, -1) + 1
        self.kinds.append(how)
        await asyncio.sleep(0)
        if count and self.second_pin_never_comes:
            await asyncio.Event().wait()
        step = self.steps(rank, count) if not how.at_boundary else -1
        if isinstance(step, ParamdError):
            raise step
        name = f"{rank}/{count}"
        self.held.add(name)
        state = StateName(1, 0, step, self.edits(rank, count))
        return RankPin(rank, name, state, 8, self.lease_s)

    async def schedule(self, pins: Sequence[RankPin], timeout_s: float) -> Captured:
        self.schedule_count += 1
        while self.renewed < self.renewals_before_boundary:
            await asyncio.sleep(0.005)
        if self.boundary_never_comes:
            await asyncio.Event().wait()
        answer = self.captures.pop(0)
        if isinstance(answer, ParamdError):
            raise answer
        return answer

    async def renew(self, pin: RankPin) -> float:
        self.renewed += 1
        return self.lease_s

    def release(self, pin: RankPin) -> None:
        self.held.remove(pin.snapshot_id)


def pinner(ranks: Ranks, clock: Clock | None = None, **options: object) -> Pinner:
    clock = clock if clock is not None else Clock()
    return Pinner(ranks, clock=clock, sleep=clock.sleep, **options)  # type: ignore[arg-type]


async def test_different_steps_go_to_the_boundary_and_release_the_first_try() -> None:
    ranks = Ranks(lambda rank, count: 7 + rank)
    ranks.captures = [captured(-1, reason="overtaken"), captured(9)]
    async with pinner(ranks).pinned(SPANS, deadline_s=110) as pinned:
        assert pinned.state.step == 9
        assert len(ranks.held) == 2
    assert ranks.schedule_count == 2
    assert not ranks.held


async def test_one_step_before_and_after_an_edit_is_not_one_state() -> None:
    ranks = Ranks(lambda rank, count: 7)
    ranks.edits = lambda rank, count: 2 + (rank == 1 and count == 0)
    ranks.captures = [captured(7, edits=3)]
    async with pinner(ranks).pinned(SPANS, deadline_s=110) as pinned:
        assert (pinned.state.step, pinned.state.edits) == (7, 3)
        assert ranks.held == {"0/1", "1/1"}
    assert ranks.schedule_count == 1


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (Settling.LEFT, Settling.LEFT, True),
        (Settling.LEFT, Settling.KEPT, True),
        (Settling.KEPT, Settling.CHANGED, True),
        (Settling.UNKNOWN, Settling.CHANGED, True),
        (Settling.CHANGING, Settling.CHANGING, True),
        (Settling.LEFT, Settling.CHANGED, False),
        (Settling.LEFT, Settling.UNKNOWN, False),
        (Settling.LEFT, Settling.CHANGING, False),
        (Settling.KEPT, Settling.CHANGING, False),
    ],
)
def test_before_and_after_a_change_of_the_scripts_is_not_one_state(
    first: Settling, second: Settling, alike: bool
) -> None:
    pins = [
        RankPin(rank, "", StateName(1, 0, 7, 0), 8, 30.0, settling=settling)
        for rank, settling in enumerate((first, second))
    ]
    assert (one_step(pins) is not None) is alike
    assert (one_step(pins[::-1]) is not None) is alike


async def test_a_boundary_that_never_comes_is_given_up_when_training_comes_to_rest() -> None:
    ranks = Ranks(lambda rank, count: 7 + rank * (count == 0))
    ranks.boundary_never_comes = True
    async with pinner(ranks, patience_s=0.01).pinned(SPANS, deadline_s=110) as pinned:
        assert pinned.state.step == 7
        assert len(ranks.held) == 2
    assert not ranks.held


async def test_partial_failure_releases_what_was_pinned() -> None:
    ranks = Ranks(lambda rank, count: UnreachableError("rank 1 is gone") if rank else 7)
    with pytest.raises(UnreachableError, match="rank 1"):
        async with pinner(ranks).pinned(SPANS, deadline_s=110):
            pass
    assert not ranks.held


async def test_no_common_step_in_time_names_the_steps() -> None:
    ranks = Ranks(lambda rank, count: 7 + rank)
    ranks.captures = [captured(-1, reason="rank 1: overtaken")] * 1000
    with pytest.raises(DeadlineError, match="rank 1"):
        async with pinner(ranks).pinned(SPANS, deadline_s=102):
            pass
    assert not ranks.held


async def test_another_incarnation_at_the_boundary_is_refused() -> None:
    ranks = Ranks(lambda rank, count: 7 + rank)
    ranks.captures = [captured(9, incarnation=2)]
    with pytest.raises(ConflictError, match="new run"):
        async with pinner(ranks).pinned(SPANS, deadline_s=110):
            pass
    assert not ranks.held


@pytest.mark.parametrize("samples", [[], [Sample("one", ((0, 8),), {0: 0, 1: 0})]])
async def test_cancelling_releases_and_leaves_no_task(samples: list[Sample]) -> None:
    ranks = Ranks(lambda rank, count: 7)
    ranks.boundary_never_comes = ranks.second_pin_never_comes = True
    before = asyncio.all_tasks()

    async def use() -> None:
        async with pinner(ranks, samples=samples).pinned(SPANS, deadline_s=110, with_buffers=True):
            pass

    using = asyncio.create_task(use())
    while not ranks.schedule_count and not ranks.asked.get(1):
        await asyncio.sleep(0)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert not ranks.held
    assert asyncio.all_tasks() == before


async def test_leases_are_renewed_while_they_are_used() -> None:
    ranks = Ranks(lambda rank, count: 7)
    ranks.lease_s = 0.03
    async with asyncio.timeout(60), pinner(ranks).pinned(SPANS, deadline_s=110):
        while ranks.renewed < 4:
            await asyncio.sleep(0.005)


async def test_leases_are_renewed_while_their_boundary_is_waited_for() -> None:
    ranks = Ranks(lambda rank, count: 7)
    ranks.lease_s, ranks.renewals_before_boundary = 0.03, 4
    ranks.captures = [captured(9)]
    async with asyncio.timeout(60):
        async with pinner(ranks).pinned(SPANS, deadline_s=110, with_buffers=True) as found:
            assert found.state.step == 9


async def test_the_reason_of_earlier_tries_outlives_a_last_one_without_any() -> None:
    answers = {0: AbortedError("rank 0 is inside an update"), 1: DeadlineError("too late")}
    ranks = Ranks(lambda rank, count: answers[count])
    with pytest.raises(DeadlineError, match="rank 0 is inside an update"):
        async with pinner(ranks).pinned({0: SPANS[0]}, deadline_s=101):
            pass
