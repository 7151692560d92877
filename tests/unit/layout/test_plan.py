"""Plans gather the right bytes, for every way of sharding that torch has."""

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramd.errors import UnreachableError, UsageError
from paramd.layout.exports.plan import plan_export
from paramd.layout.exports.settings import ExportSettings
from paramd.layout.plan import ReadPlan, consecutive, plan_read
from paramd.layout.replicas import MOST_COMPARED, differing, samples_of
from paramd.layout.select import NameIndex, SelectedTensor, select
from paramd.layout.stats import by_dtype, plan_stats, stats_items
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout, full_box, row_major
from tests.unit.layout.simulate import BOXES, Held, Spec, World, build, cut, element, fsdp1, gather

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "bool", "int64", "complex128"]
KINDS = [*BOXES, "fsdp1"]


def check_stats_items(plan: ReadPlan, world: World) -> None:
    """The items hold exactly the wanted elements, in any order."""
    snapshots = world.snapshots(plan)
    found: list[list[bytes]] = [[] for _ in plan.tensors]
    for rank, items in stats_items(plan).items():
        for item in items:
            size = plan.tensors[item.tensor].size_bytes // math.prod(
                plan.tensors[item.tensor].shape
            )
            data = snapshots[rank][item.begin_bytes :]
            found[item.tensor].extend(element(data, at, size) for at in range(item.numel))
    for tensor, got, want in zip(plan.tensors, found, world.expected(plan), strict=True):
        numel = math.prod(tensor.shape)
        size = len(want) // numel if numel else 0
        assert sorted(got) == sorted(element(want, at, size) for at in range(numel))


@st.composite
def sharded_worlds(draw: st.DrawFn) -> World:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    spec = Spec("w", draw(st.sampled_from(DTYPES)), shape)
    boxes = [full_box(shape)]
    for dim in draw(st.lists(st.integers(0, max(len(shape) - 1, 0)), max_size=2)):
        parts = draw(st.integers(1, 3))
        boxes = [cut(box, dim, parts, part) for box in boxes for part in range(parts)]
    boxes = [box for box in dict.fromkeys(boxes) if box.numel]
    replicas = draw(st.integers(1, 2))
    held: Held = []
    for box in boxes * replicas:
        order = draw(st.permutations(range(len(shape))))
        dense = row_major([box.sizes[dim] for dim in order])
        strides = tuple(dense[order.index(dim)] for dim in range(len(shape)))
        held.append([(box, strides or None)])
    return build([spec], [held], seed=draw(st.integers(0, 9)))


def check_any_slice(world: World, tensor: TensorLayout, data: st.DataObject) -> ReadPlan:
    """Some slice of a tensor is gathered byte by byte, also in blocks of some size."""
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, s)] * 2))) for s in tensor.shape]
    box = Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))
    plan = plan_read(world.layout, [SelectedTensor(tensor, "w", box, ())])
    snapshots = world.snapshots(plan)
    limit = data.draw(st.integers(16, 200))
    assert gather(plan, snapshots) == world.expected(plan)
    assert gather(plan, snapshots, max_block_bytes=limit) == world.expected(plan)
    parts = list(consecutive(box.sizes, data.draw(st.integers(1, 40))))
    (expected,) = world.expected(plan)
    in_parts = [gather(plan.part(0, part), snapshots)[0] for part in parts]
    assert b"".join(in_parts) == expected
    check_stats_items(plan, world)
    whole = [SelectedTensor(tensor, "w", full_box(tensor.shape), ())]
    plain, quick = plan_read(world.layout, whole), plan_stats(world.layout, whole)
    assert [(one.rank, one.spans) for one in quick.ranks] == [
        (one.rank, one.spans) for one in plain.ranks
    ]
    assert quick.runs == {rank: by_dtype(items) for rank, items in stats_items(plain).items()}
    return plan


@settings(max_examples=300, deadline=None)
@given(world=sharded_worlds(), data=st.data())
def test_any_boxes_strides_and_slices_are_gathered_byte_exact(
    world: World, data: st.DataObject
) -> None:
    plan = check_any_slice(world, world.layout.tensors[0], data)
    for read in plan.ranks:
        begins = [landing.begin_bytes for landing in read.landings]
        assert begins == sorted(begins)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(read.spans))
        assert read.size_bytes == sum(end - begin for begin, end in read.spans)


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(st.integers(1, 4), max_size=4).map(tuple), data=st.data())
def test_any_intervals_and_slices_are_gathered_byte_exact(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    specs = [Spec("a", "int16", (3,)), Spec("w", "float32", shape), Spec("b", "int8", (2, 2))]
    world = build(specs, fsdp1(specs, data.draw(st.integers(1, 5))))
    check_any_slice(world, world.layout.tensors[1], data)


def test_tensors_that_share_memory_share_a_span() -> None:
    pieces = {64: Piece(0, 0, Box((0,), (64,))), 8: Piece(0, 16, Box((0,), (8,)))}
    tensors = tuple(
        TensorLayout(f"w{n}", "float32", (n,), TensorKind.PARAMETER, (piece,))
        for n, piece in pieces.items()
    )
    layout = Layout(1, (384,), tensors)
    arena = random.Random(1).randbytes(384)
    plan = plan_read(layout, select(NameIndex(layout), "*"))
    assert [read.spans for read in plan.ranks] == [((0, 256),)]
    assert gather(plan, {0: arena[:256]}) == [arena[:256], arena[16:48]]


def replicas(world_size: int) -> World:
    specs = [Spec(f"w{number}", "float32", (4, 4)) for number in range(12)]
    return build(specs, [BOXES["replicated"](spec, world_size) for spec in specs])


def test_one_answer_is_of_one_replica_whatever_a_rank_costs() -> None:
    world = replicas(3)
    selection = select(NameIndex(world.layout), "*")

    def read(**how: Any) -> tuple[int, list[int]]:
        plan = plan_read(world.layout, selection, **how)
        assert {len(one.landings) for one in plan.ranks} == {12}
        return plan.replica, [one.rank for one in plan.ranks]

    assert read() == (0, [0])
    assert read(costs={0: math.inf}) == (1, [1])
    assert read(costs={0: 3.0, 1: 1.0, 2: 2.0}) == (1, [1])
    assert read(replica=2, costs={2: math.inf}) == (2, [2])
    with pytest.raises(UnreachableError, match=r"ranks that are not available, \[0\]"):
        read(costs=dict.fromkeys(range(3), math.inf))
    with pytest.raises(UsageError, match="expected a rank from 0 to 2"):
        read(replica=3)


@pytest.mark.parametrize(("rank", "ranks"), [(0, {0, 1}), (1, {0, 1}), (2, {2, 3}), (3, {2, 3})])
def test_a_replica_of_hsdp_is_its_shards_and_its_own_of_what_all_hold(
    rank: int, ranks: set[int]
) -> None:
    halves = [Box((0, 0), (2, 4)), Box((2, 0), (4, 4))]
    sharded = tuple(Piece(one, 0, halves[one % 2]) for one in range(4))
    whole = tuple(Piece(one, 64, Box((0,), (4,))) for one in range(4))
    names = {"w": ((4, 4), sharded), "free": ((4,), whole)}
    tensors = tuple(
        TensorLayout(name, "float32", shape, TensorKind.PARAMETER, pieces)
        for name, (shape, pieces) in names.items()
    )
    layout = Layout(world_size=4, arena_bytes=(128,) * 4, tensors=tensors)
    plan = plan_read(layout, select(NameIndex(layout), "*"), replica=rank)
    assert {one.rank for one in plan.ranks} == ranks
    of_all = {one.rank for one in plan.ranks for landing in one.landings if landing.tensor == 1}
    assert of_all == {rank}
    export = plan_export(layout, ExportSettings(max_shard_bytes=20, replica=rank))
    assert set(export.sources[""].spans) == ranks
    samples = samples_of(layout.tensors, range(4), turn=rank)
    held = [("w", {0: 0, 2: 0}), ("w", {1: 0, 3: 0}), ("free", dict.fromkeys(range(4), 64))]
    assert [(one.fqn, one.begins) for one in samples] == held
    seen = {one: [b"same", b"apart" if one == rank else b"same"] for one in range(4)}
    assert differing(samples, seen) == ("free",)


def test_samples_are_of_few_ranks_in_turn_and_of_places_all_over_a_piece() -> None:
    world = replicas(12)
    many = [samples_of(world.layout.tensors, range(12), turn) for turn in range(12)]
    assert {len(one.begins) for found in many for one in found} == {MOST_COMPARED}
    assert {rank for found in many for rank in found[0].begins} == set(range(12))
    assert samples_of(world.layout.tensors, [3]) == []
    pieces = tuple(Piece(rank, 0, Box((0,), (1 << 20,))) for rank in range(2))
    large = TensorLayout("w", "float32", (1 << 20,), TensorKind.BUFFER, pieces)
    (one,) = samples_of([large], range(2))
    assert (one.places[0][0], one.places[-1][1]) == (0, 4 << 20)
    assert sum(end - begin for begin, end in one.places) == 4096
