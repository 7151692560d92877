"""Layouts merge only when all ranks agree and every element has exactly one region."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd.errors import UsageError
from paramd.layout.codec import (
    decode_layout,
    decode_local,
    encode_layout,
    encode_local,
    join_batches,
    layout_batches,
)
from paramd.layout.merge import (
    LocalLayout,
    check_replicas,
    layout_digest,
    merge_layouts,
    whole_parameters,
)
from paramd.layout.types import Box, Interval, Layout, Piece, Region, TensorKind, TensorLayout
from paramd.v1 import layout_pb2


def local(rank: int, *regions: Region, shape: tuple[int, ...] = (4, 6)) -> LocalLayout:
    pieces = tuple(Piece(rank, 0, region) for region in regions)
    tensor = TensorLayout(
        fqn="w",
        dtype="float32",
        shape=shape,
        kind=TensorKind.PARAMETER,
        placement="?",
        pieces=pieces,
    )
    return LocalLayout(rank=rank, arena_bytes=96, tensors=(tensor,))


def changed(layout: LocalLayout, **fields: object) -> LocalLayout:
    tensor = replace(layout.tensors[0], **fields)  # type: ignore[arg-type]
    return replace(layout, tensors=(tensor,))


TOP, BOTTOM = Box((0, 0), (2, 6)), Box((2, 0), (4, 6))


@pytest.mark.parametrize(
    ("regions", "reason"),
    [
        ([TOP], "no rank holds 12 of its 24 elements"),
        ([TOP, Box((1, 0), (4, 6))], r"overlap: \[0:2, 0:6\] and \[1:4, 0:6\]"),
        ([Box((0, 0), (4, 3)), Box((0, 2), (4, 5))], "overlap"),
        ([Box((0, 0), (4, 6)), TOP], "overlap"),
        ([Box((0, 0), (5, 6))], r"box \[0, 5\) is outside of dim 0 with size 4"),
        ([Box((0,), (4,))], "does not have the tensor's 2 dims"),
        ([Interval(0, 10), Interval(12, 24)], r"no rank holds elements \[10, 12\)"),
        ([Interval(0, 13), Interval(12, 24)], r"different regions hold elements \[12, 13\)"),
        ([Interval(0, 13)], r"no rank holds elements \[13, 24\)"),
        ([Interval(0, 25)], "is outside of 24 elements"),
        ([Interval(0, 12), Box((0, 3), (4, 6))], "mix boxes with intervals"),
        ([Interval(0, 12), Box((1, 0), (4, 6))], r"hold elements \[6, 12\)"),
        ([], r"no rank holds elements \[0, 24\)"),
    ],
)
def test_holes_overlaps_and_foreign_regions_are_refused(regions: list[Region], reason: str) -> None:
    ranks = [local(rank, region) for rank, region in enumerate(regions)]
    ranks.append(local(len(regions)))
    with pytest.raises(UsageError, match=f"tensor 'w'.*{reason}"):
        merge_layouts(ranks)


@given(
    cuts=st.lists(st.integers(0, 12), max_size=4), drop=st.integers(0, 3), shift=st.integers(0, 1)
)
def test_coverage_agrees_with_counting_elements(cuts: list[int], drop: int, shift: int) -> None:
    edges = sorted({0, 12, *cuts})
    boxes = [Box((low,), (min(high + shift, 12),)) for low, high in itertools.pairwise(edges)]
    boxes = [box for at, box in enumerate(boxes) if at != drop - 1]
    counts = [0] * 12
    for box in boxes:
        for at in range(box.begin[0], box.end[0]):
            counts[at] += 1
    ranks = [local(rank, box, shape=(12,)) for rank, box in enumerate(boxes)] or [
        local(0, shape=(12,))
    ]
    if counts == [1] * 12:
        assert len(merge_layouts(ranks).tensors[0].pieces) == len(boxes)
    else:
        with pytest.raises(UsageError, match="'w'"):
            merge_layouts(ranks)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "bfloat16"}, "dtype is float32 on rank 0, bfloat16 on rank 1"),
        ({"shape": (4, 7)}, r"shape is \(4, 6\) on rank 0, \(4, 7\) on rank 1"),
        ({"kind": TensorKind.BUFFER}, "TensorKind.BUFFER on rank 1"),
        (
            {"fqn": "v"},
            r"no rank holds 12 of its 24 elements; ranks \[0\] of 2 hold pieces, ranks \[1\] do",
        ),
        ({"pieces": (Piece(1, 52, BOTTOM),)}, r"bytes \[52, 100\) are outside of its arena of 96"),
        ({"pieces": (Piece(1, -4, BOTTOM),)}, "are outside of its arena"),
        ({"pieces": (Piece(0, 0, BOTTOM),)}, "its piece says rank 0"),
        ({"pieces": (Piece(1, 0, BOTTOM, (8, 1)),)}, r"strides \(8, 1\) are not dense"),
        ({"pieces": (Piece(1, 0, BOTTOM, (1,)),)}, "are not dense"),
        ({"pieces": (Piece(1, 0, Interval(12, 24), (1,)),)}, "an interval has no strides"),
        ({"aliases": ("w",)}, "rank 1 names 'w' twice"),
    ],
)
def test_ranks_that_disagree_or_err_are_named(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        merge_layouts([local(0, TOP), changed(local(1, BOTTOM), **fields)])


def test_a_shard_without_pieces_that_only_a_later_rank_has_is_refused_by_its_name() -> None:
    more = local(1, BOTTOM)
    extra = replace(more.tensors[0], fqn="v", pieces=())
    with pytest.raises(UsageError, match=r"'v'.*no rank holds.*ranks \[0\] do not know it"):
        merge_layouts([local(0, TOP), replace(more, tensors=(*more.tensors, extra))])


def whole(rank: int, fqn: str, *aliases: str) -> LocalLayout:
    return changed(local(rank, Box((0, 0), (4, 6))), fqn=fqn, aliases=aliases)


def test_ranks_with_different_modules_are_one_layout_of_all_names() -> None:
    shared = whole(0, "norm").tensors
    ranks = [whole(0, "a"), whole(1, "b"), whole(2, "c")]
    ranks[0] = replace(ranks[0], tensors=(*ranks[0].tensors, *shared))
    last = whole(2, "norm").tensors
    ranks[2] = replace(ranks[2], tensors=(*last, *ranks[2].tensors))
    layout = merge_layouts(ranks)
    held = {tensor.fqn: [piece.rank for piece in tensor.pieces] for tensor in layout.tensors}
    assert held == {"a": [0], "norm": [0, 2], "b": [1], "c": [2]}
    assert list(held) == ["a", "norm", "b", "c"]


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([whole(0, "a", "b"), whole(1, "b")], "'b' is a name of tensor 'a' on rank 0, but on rank"),
        ([whole(0, "b"), whole(1, "a", "b")], "rank 1, but on rank 0 of a tensor of its own"),
        ([whole(0, "a", "c"), whole(1, "b", "c")], "on rank 0 of 'a'; tie the same"),
        ([whole(0, "a", "b"), whole(1, "b", "a")], "tie the same tensors"),
    ],
)
def test_ranks_that_tie_different_tensors_are_refused(
    ranks: list[LocalLayout], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        merge_layouts(ranks)


def test_parameters_of_one_name_with_different_contents_are_refused() -> None:
    check_replicas([{"a": 1}, {"b": 2}, {"a": 1, "b": 2}])
    with pytest.raises(UsageError, match=r"'b' is unsharded on ranks 1 and 2, but .*stage0"):
        check_replicas([{"a": 1}, {"b": 2}, {"a": 1, "b": 3}])


def test_only_parameters_held_unsharded_are_compared_between_ranks() -> None:
    assert whole_parameters(whole(0, "a")) == ["a"]
    assert whole_parameters(local(0, TOP)) == []
    assert whole_parameters(changed(whole(0, "a"), kind=TensorKind.BUFFER)) == []


@pytest.mark.parametrize("ranks", [[], [1], [0, 0], [0, 2]])
def test_missing_and_doubled_ranks_are_refused(ranks: list[int]) -> None:
    with pytest.raises(UsageError, match="one layout from every rank"):
        merge_layouts([local(rank, TOP) for rank in ranks])


def test_row_major_strides_are_no_strides_and_aliases_unite() -> None:
    one = changed(local(0, TOP), pieces=(Piece(0, 0, TOP, (6, 1)),), aliases=("a", "b"))
    two = changed(local(1), pieces=(Piece(1, 0, BOTTOM, (1, 2)),), aliases=("b", "c"))
    (tensor,) = merge_layouts([one, two]).tensors
    assert [piece.strides for piece in tensor.pieces] == [None, (1, 2)]
    assert tensor.aliases == ("a", "b", "c")


@pytest.mark.parametrize(
    ("said", "merged"),
    [((True, False), True), ((False, False), False), ((None, False), False), ((None, None), None)],
)
def test_what_is_trained_on_any_rank_is_trainable(
    said: tuple[bool | None, ...], merged: bool | None
) -> None:
    ranks = [
        changed(local(rank, region), trainable=one)
        for rank, (region, one) in enumerate(zip((TOP, BOTTOM), said, strict=True))
    ]
    layout = merge_layouts(ranks)
    assert layout.tensors[0].trainable is merged
    assert decode_layout(encode_layout(layout)) == layout
    assert [decode_local(encode_local(rank)) for rank in ranks] == ranks
    other = replace(layout.tensors[0], trainable=not merged)
    assert layout_digest(replace(layout, tensors=(other,))) != layout_digest(layout)


# Digests and codecs.

regions = st.one_of(
    st.builds(Interval, st.integers(0, 2**40), st.integers(0, 2**40)),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(
        lambda pairs: Box(tuple(b for b, _ in pairs), tuple(e for _, e in pairs))
    ),
)
pieces = st.builds(
    Piece,
    st.integers(0, 3),
    st.integers(0, 2**40),
    regions,
    st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple),
)
tensor_fields = {
    "fqn": st.text(alphabet="ab.é", max_size=5),
    "dtype": st.sampled_from(["float32", "bool"]),
    "shape": st.lists(st.integers(0, 2**33), max_size=3).map(tuple),
    "kind": st.sampled_from(TensorKind),
    "pieces": st.lists(pieces, max_size=3).map(tuple),
    "aliases": st.lists(st.text(alphabet="ab.", max_size=3), max_size=2).map(tuple),
    "placement": st.sampled_from(["", "Shard(0) over 2"]),
    "trainable": st.none() | st.booleans(),
}
tensors = st.builds(TensorLayout, **tensor_fields)
layouts = st.lists(tensors, max_size=5).flatmap(
    lambda found: st.lists(st.integers(0, 2**45), max_size=4).map(
        lambda arenas: Layout(len(arenas), tuple(arenas), tuple(found))
    )
)


@given(layout=layouts, max_tensors=st.integers(1, 3))
def test_what_is_encoded_decodes_to_the_same(layout: Layout, max_tensors: int) -> None:
    data = encode_layout(layout).SerializeToString()
    decoded = decode_layout(layout_pb2.Layout.FromString(data))
    assert decoded == layout
    assert layout_digest(decoded) == layout_digest(layout)
    batches = list(layout_batches(layout, max_tensors))
    assert all(len(batch.tensors) <= max_tensors for batch in batches)
    assert len(batches) == max(1, -(-len(layout.tensors) // max_tensors))
    assert join_batches(batches) == layout


@pytest.mark.parametrize(
    "fields",
    [
        {"fqn": "v"},
        {"dtype": "int32"},
        {"shape": (2, 12)},
        {"kind": TensorKind.BUFFER},
        {"aliases": ("v",)},
        {"placement": "Replicate()"},
        {"pieces": (Piece(0, 0, Interval(0, 24)),)},
        {"pieces": (Piece(0, 4, Box((0, 0), (4, 6))),)},
        {"pieces": (Piece(1, 0, Box((0, 0), (4, 6))),)},
        {"pieces": (Piece(0, 0, Box((0, 0), (4, 6)), (1, 4)),)},
    ],
)
def test_every_field_is_in_the_digest(fields: dict[str, object]) -> None:
    layout = merge_layouts([local(0, Box((0, 0), (4, 6)))])
    other = replace(layout.tensors[0], **fields)  # type: ignore[arg-type]
    assert layout_digest(replace(layout, tensors=(other,))) != layout_digest(layout)
    assert layout_digest(replace(layout, arena_bytes=(97,))) != layout_digest(layout)
    assert layout_digest(replace(layout, world_size=2)) != layout_digest(layout)


def test_where_the_parameters_live_is_in_the_digest_and_in_the_layout() -> None:
    """Of an arena that is a copy nothing may be read as of one that is the parameters' home."""
    regions = [local(0, Box((0, 0), (4, 6)))]
    home, mirror = merge_layouts(regions), merge_layouts(regions, mirrored=True)
    assert (home.mirrored, mirror.mirrored) == (False, True)
    assert layout_digest(home) != layout_digest(mirror)
