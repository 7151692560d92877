"""The coordinator: one number a round, shared rounds, and answers only when all agree."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from paramd.errors import (
    ConflictError,
    DeadlineError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd_service.control.mesh.coordinator import (
    BoundaryAction,
    BoundaryRequest,
    Coordinator,
    RankAnswer,
    Verdict,
    decide,
    token_of,
    worst,
)
from paramd_service.control.mesh.registry import MeshView
from tests.unit.control.reports import mesh


def answer(rank: int, step: int = 5, **changed: object) -> RankAnswer:
    fields: dict[str, object] = {"incarnation": 1, "captured": True, "reason": ""}
    return RankAnswer(rank=rank, step=step, **(fields | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([answer(0), answer(1, 6)], "different steps: rank 0 at 5, rank 1 at 6"),
        ([answer(0), answer(1, captured=False, reason="overtaken")], "rank 1: overtaken"),
        ([answer(0), answer(1, -1)], "rank 1: no reason given"),
        ([answer(0), answer(1, edits=1)], "different edits: rank 0 after 0 edits, 0 of"),
        ([answer(0), answer(1, incarnation=2)], "ranks 1 answered for another run than 1"),
        ([answer(0)], "ranks 1 have not answered"),
    ],
)
def test_anything_less_is_refused_naming_ranks(answers: list[RankAnswer], reason: str) -> None:
    verdict = decide(1, 2, answers)
    assert (verdict.captured, verdict.step) == (False, -1)
    assert reason in verdict.reason


def test_snapshots_that_were_filled_for_another_request_are_refused() -> None:
    verdict = decide(1, 2, [answer(0, token=7), answer(1, token=8)], token=7)
    assert (verdict.captured, verdict.token) == (False, 0)
    assert verdict.reason == "ranks 1 filled their snapshots for another request"
    assert decide(1, 2, [answer(0, token=7), answer(1, token=7)], token=7).token == 7


@dataclass
class Sidecars:
    """Two ranks whose answers the test gives, round by round."""

    calls: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    errors: dict[int, ParamdError] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    refused: dict[str, ParamdError] = field(default_factory=dict)
    """What a sidecar says to a round with that snapshot."""
    tokens: dict[int, set[int]] = field(default_factory=dict)

    async def reach(
        self,
        rank: int,
        address: str,
        request: BoundaryRequest,
        snapshot_ids: Sequence[str],
        timeout_s: float,
    ) -> RankAnswer:
        boundary = request.number
        self.tokens.setdefault(boundary, set()).add(request.token)
        self.calls.append((rank, boundary, tuple(snapshot_ids)))
        if rank in self.errors:
            raise self.errors[rank]
        for name in self.refused.keys() & set(snapshot_ids):
            raise self.refused[name]
        try:
            if rank in self.gates:
                await self.gates[rank].wait()
        except asyncio.CancelledError:
            self.cancelled.append(rank)
            raise
        copies = request.action is BoundaryAction.CAPTURE
        return answer(rank, step=10 + boundary, token=request.token if copies else 0)

    @property
    def boundaries(self) -> list[int]:
        return sorted({boundary for _, boundary, _ in self.calls})


def coordinator(sidecars: Sidecars, view: MeshView | None = None) -> Coordinator:
    view = view if view is not None else mesh(0, 1)
    return Coordinator(sidecars, lambda: view, incarnation=1)


async def until(condition: object) -> None:
    """Waits for a callable to be true, with a deadline."""
    assert callable(condition)
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_numbers_are_never_lowered() -> None:
    """By what an older control plane used, nor by ranks that were respawned and know of none."""
    sidecars, ready = Sidecars(), iter([41, 41, 0, 3])
    rounds = Coordinator(sidecars, lambda: mesh(0, 1, ready=next(ready)), incarnation=1)
    await rounds.schedule({}, timeout_s=5.0)
    rounds.used(50)
    rounds.used(7)
    for _ in range(3):
        await rounds.schedule({}, timeout_s=5.0)
    assert sidecars.boundaries == [42, 51, 52, 53]


async def test_requests_during_a_round_share_the_next_one() -> None:
    sidecars = Sidecars(gates={0: asyncio.Event()})
    rounds = coordinator(sidecars)
    first = asyncio.create_task(rounds.schedule({0: ["a"]}, timeout_s=5.0))
    await until(lambda: len(sidecars.calls) == 2)
    others = [
        asyncio.create_task(rounds.schedule({0: [name], 1: [name]}, timeout_s=5.0))
        for name in "bcd"
    ]
    await asyncio.sleep(0)
    sidecars.gates[0].set()
    assert (await first).step == 11
    assert [v.step for v in await asyncio.gather(*others)] == [12, 12, 12]
    assert sorted(sidecars.calls)[1:] == [
        (0, 2, ("b", "c", "d")),
        (1, 1, ()),
        (1, 2, ("b", "c", "d")),
    ]
    assert (rounds.round_count, rounds.captured_count) == (2, 2)


async def crowd(rounds: Coordinator, sidecars: Sidecars) -> list[Verdict | BaseException]:
    """What "a", and those who come for "b", "c" and "d" while its round goes on, are told."""
    first = asyncio.create_task(rounds.schedule({0: ["a"]}, timeout_s=5.0))
    await until(lambda: len(sidecars.calls) == 2)
    others = [asyncio.create_task(rounds.schedule({1: [name]}, timeout_s=5.0)) for name in "bcd"]
    await asyncio.sleep(0)
    sidecars.gates[0].set()
    return await asyncio.gather(first, *others, return_exceptions=True)


@pytest.mark.parametrize(
    "error",
    [
        NotFoundError("the lease has ended"),
        ConflictError("a snapshot is in use by another request"),
        UsageError("snapshot_ids: a snapshot is listed twice"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_one_callers_mistake_is_nobody_elses_error(error: ParamdError) -> None:
    sidecars = Sidecars(gates={0: asyncio.Event()}, refused={"c": error})
    found = await crowd(coordinator(sidecars), sidecars)
    mistaken = found.pop(2)
    assert type(mistaken) is type(error)
    assert str(mistaken) == str(error)
    assert [verdict.captured for verdict in found if isinstance(verdict, Verdict)] == [True] * 3
    assert sidecars.boundaries == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("error", [UnreachableError("rank 1 is away"), DeadlineError("too slow")])
async def test_a_rank_that_cannot_answer_is_asked_once_for_all_callers(error: ParamdError) -> None:
    """Request by request, each caller would wait for the same dead rank in turn."""
    sidecars = Sidecars(gates={0: asyncio.Event()}, refused={"c": error})
    found = await crowd(coordinator(sidecars), sidecars)
    assert [type(one) for one in found] == [Verdict] + [type(error)] * 3
    assert sidecars.boundaries == [1, 2]


async def test_absent_ranks_are_refused_by_name_and_nobody_is_called() -> None:
    sidecars = Sidecars()
    with pytest.raises(UnreachableError, match="all 2 ranks; rank 1: its sidecar has not joined"):
        await coordinator(sidecars, mesh(0)).schedule({0: ["a"]}, timeout_s=5.0)
    assert sidecars.calls == []


async def test_one_failed_rank_ends_the_round_for_all() -> None:
    sidecars = Sidecars(gates={0: asyncio.Event()}, errors={1: ConflictError("rank 1: torn")})
    with pytest.raises(ConflictError, match="rank 1: torn"):
        await coordinator(sidecars).schedule({0: ["a"]}, timeout_s=5.0)
    assert sidecars.cancelled == [0]


async def test_a_caller_gets_its_reason_before_its_deadline() -> None:
    sidecars = Sidecars(gates={0: asyncio.Event()})
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineError, match=r"within .*waiting for rank \d"):
        await coordinator(sidecars).schedule({0: ["a"]}, timeout_s=0.2)
    assert asyncio.get_running_loop().time() - began_s < 2.0
    await until(lambda: sidecars.cancelled == [0])


async def test_a_round_nobody_waits_for_is_withdrawn_and_the_next_one_runs() -> None:
    sidecars = Sidecars(gates={1: asyncio.Event()})
    rounds = coordinator(sidecars)
    first = asyncio.create_task(rounds.schedule({0: ["a"]}, timeout_s=5.0))
    await until(lambda: len(sidecars.calls) == 2)
    second = asyncio.create_task(rounds.schedule({0: ["b"]}, timeout_s=5.0))
    await asyncio.sleep(0)
    first.cancel()
    await until(lambda: sidecars.cancelled == [1])
    sidecars.gates[1].set()
    assert (await second).step == 12


async def test_all_ranks_get_one_token_that_differs_between_numbers_and_generations() -> None:
    sidecars = Sidecars()
    rounds = coordinator(sidecars)
    await rounds.schedule({}, timeout_s=5.0)
    await rounds.schedule({}, timeout_s=5.0)
    first, second = sidecars.tokens[1], sidecars.tokens[2]
    assert len(first) == len(second) == 1
    assert first != second
    digests = [(), (b"a",), (b"ab",), (b"a", b"b")]
    tokens = {
        token_of(generation, 1, action, digest)
        for generation in (1, 2)
        for action in BoundaryAction
        for digest in digests
    }
    assert len(tokens) == 2 * 5 * 4
    assert all(0 < token < 1 << 63 for token in tokens)


async def test_an_edit_has_a_number_of_its_own_and_captures_wait_for_its_turn() -> None:
    sidecars = Sidecars()
    rounds = coordinator(sidecars, mesh(0, 1, ready=7))
    rounds.used(20)
    async with rounds.turn() as turn:
        assert turn.number == 21
        capture = asyncio.create_task(rounds.schedule({}, timeout_s=5.0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert sidecars.calls == []
        request = BoundaryRequest(number=turn.number, token=9, action=BoundaryAction.EDIT)
        assert (await rounds.round(request, {}, turn.view, timeout_s=5.0)).step == 31
    assert (await capture).step == 32
    with pytest.raises(UnreachableError, match="all 2 ranks"):
        async with coordinator(sidecars, mesh(0)).turn():
            pass


def test_what_several_ranks_say_alike_is_said_once() -> None:
    failures: dict[int, ParamdError] = {
        0: ConflictError("rank 0 (127.0.0.1:1): it keeps no states"),
        1: UnreachableError("rank 1 (127.0.0.1:2): it is away"),
        2: ConflictError("rank 2 (127.0.0.1:3): it keeps no states"),
    }
    found = worst(failures)
    assert isinstance(found, ConflictError)
    said = "ranks 0, 2: it keeps no states; rank 1 (127.0.0.1:2): it is away"
    assert str(found) == said
