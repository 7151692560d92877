"""What is compared, who is named, and where replicas differ."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paramd.errors import AbortedError
from paramd.layout.types import Box, Interval, Layout, Piece, TensorKind, TensorLayout
from paramd.state import At
from paramd_service.alerts.bits import BitRounds
from paramd_service.alerts.config import AlertConfig, Rule
from paramd_service.alerts.drift import (
    Difference,
    ReplicaGroup,
    ask_where,
    compare,
    drift_findings,
    next_sample,
    replica_groups,
)
from paramd_service.statistics.sidecar import digest_all


def tensor(
    fqn: str, numel: int, ranks: Sequence[int], kind: TensorKind = TensorKind.PARAMETER
) -> TensorLayout:
    pieces = tuple(Piece(rank, 64 * rank, Box((0,), (numel,))) for rank in ranks)
    return TensorLayout(fqn=fqn, dtype="float32", shape=(numel,), kind=kind, pieces=pieces)


def group(size: int = 1000, ranks: Sequence[int] = (0, 1), fqn: str = "w") -> ReplicaGroup:
    return ReplicaGroup(
        fqn=fqn,
        region=Interval(0, size // 4),
        size_bytes=size,
        item_bytes=4,
        begins={rank: 10 * rank for rank in ranks},
    )


def test_replicas_are_pieces_of_the_same_region_on_several_ranks() -> None:
    top, bottom, nothing = Box((0, 0), (4, 2)), Box((4, 0), (8, 2)), Box((8, 0), (8, 2))
    held = [(0, top), (0, bottom), (100, top), (200, bottom), (0, nothing), (0, nothing)]
    pieces = tuple(Piece(rank, begin, box) for rank, (begin, box) in enumerate(held))
    found = replica_groups(TensorLayout("w", "bfloat16", (8, 2), TensorKind.PARAMETER, pieces))
    assert [dict(g.begins) for g in found] == [{0: 0, 2: 100}, {1: 0, 3: 200}]
    assert {(g.size_bytes, g.item_bytes) for g in found} == {(16, 2)}


def test_another_order_of_elements_is_no_replica_and_neither_are_buffers() -> None:
    pieces = Piece(0, 0, Box((0, 0), (2, 3))), Piece(1, 0, Box((0, 0), (2, 3)), strides=(1, 2))
    mixed = TensorLayout("w", "float32", (2, 3), TensorKind.PARAMETER, pieces)
    assert replica_groups(mixed) == []
    assert replica_groups(tensor("w", 4, (0, 1), TensorKind.BUFFER)) == []
    assert replica_groups(tensor("w", 4, (0,))) == []


def test_rounds_go_through_all_parameters_within_their_bytes() -> None:
    tensors = tuple(tensor(f"w{n}", 10 * (n + 1), (0, 1)) for n in range(7))
    layout = Layout(world_size=2, arena_bytes=(9999, 9999), tensors=tensors)
    seen: list[str] = []
    begin = 0
    for _ in range(7):
        sample = next_sample(layout, begin, most_bytes=400)
        size = sum(4 * t.numel for t in sample.tensors)
        assert size <= 400 or len(sample.tensors) == 1
        seen += [t.fqn for t in sample.tensors]
        begin = sample.next_begin
    assert set(seen) == {t.fqn for t in tensors}
    whole = next_sample(layout, 3, most_bytes=1 << 20)
    assert len(whole.tensors) == 7


def test_the_minority_is_named_and_two_alone_are_named_both() -> None:
    three = group(ranks=(0, 1, 2))
    assert compare(three, {0: b"a", 1: b"a", 2: b"a"}) is None
    odd = compare(three, {0: b"a", 1: b"b", 2: b"a"})
    assert odd == Difference(group=three, ranks=(1,), majority=2)
    two = compare(group(), {0: b"a", 1: b"b"})
    assert two is not None
    assert (two.ranks, two.majority) == ((0, 1), 0)
    (named,) = drift_findings([odd], {0: "bit 3 of element 5"}, 9)
    assert (named.fqn, named.ranks, named.step) == ("w", (1,), 9)
    assert "rank 1 differs from 2 equal replicas; bit 3 of element 5" in named.reason
    (both,) = drift_findings([two], {}, 9)
    assert "two cannot show which is wrong" in both.reason


class Memory:
    """Arenas of ranks, digested as sidecars do."""

    def __init__(self, arenas: dict[int, bytearray]) -> None:
        self.arenas = arenas
        self.calls = 0

    async def ask(self, rank: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.calls += 1
        assert len(ranges) <= 64
        return digest_all(memoryview(self.arenas[rank]), ranges)


@pytest.mark.parametrize("size", [4, 64, 1000, 100_004])
async def test_a_flipped_bit_is_found_wherever_it_is(size: int) -> None:
    rng = random.Random(size)
    content = rng.randbytes(size)
    for _ in range(10):
        memory = Memory({rank: bytearray(10 * rank) + bytearray(content) for rank in (0, 1, 2)})
        byte, bit = rng.randrange(size), rng.randrange(8)
        memory.arenas[1][10 + byte] ^= 1 << bit
        difference = Difference(group=group(size, (0, 1, 2)), ranks=(1,), majority=2)
        said = await ask_where(memory, difference)
        expected = f"bit {8 * (byte % 4) + bit} of element {byte // 4} of its piece"
        assert said == f"the first difference of rank 1 from rank 0 is {expected}"
        assert memory.calls <= 10


async def test_after_a_rollback_replicas_are_compared_at_steps_that_come_again() -> None:
    """Not only once the training is past the step of the cycle that it left."""
    asked: list[At] = []
    covers: list[Any] = []
    header = SimpleNamespace(step=10_000, history=0)

    async def compared(_reach: object, _sidecars: object, _part: object, at: At) -> Any:
        asked.append(at)
        if len(asked) > 2:
            return SimpleNamespace(differences=(), places={}, step=at.step)
        raise AbortedError("missed")

    async def same(found: Any) -> Any:
        return found

    layout = Layout(2, (64, 128), (tensor("w", 4, (0, 1)),))
    reach: Any = SimpleNamespace(index=lambda _: same(SimpleNamespace(layout=layout)))
    sidecars: Any = SimpleNamespace(state=lambda *_: same(SimpleNamespace(header=header)))
    nothing: Any = None
    observe: Any = lambda _, covered: covers.append(covered)  # noqa: E731
    rounds = BitRounds(
        AlertConfig(compare_steps=5_000), reaching=nothing, joined=lambda: {0, 1}, observe=observe
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "_compared", compared)
        patch.setattr(rounds, "_keys", lambda *_: same([]))
        await rounds._one(reach, sidecars)
        header.step, header.history = 100, 1
        await rounds._one(reach, sidecars)
        await rounds._one(reach, sidecars)
    more: Any = SimpleNamespace(rule=Rule.REPLICA_DRIFT, subject="more tensors")
    assert covers[0](more), "they are over, too"
    assert asked[0] >= At(0, 10_000)
    assert At(1, 100) < asked[1] < At(1, 200)
