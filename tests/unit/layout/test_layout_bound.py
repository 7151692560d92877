"""What a rank sends as its layout has a bound: in bytes, in names and in their length."""

from itertools import repeat

import pytest

from paramd.errors import ExhaustedError
from paramd.layout.codec import MAX_LAYOUT_BYTES, MAX_NAME_CHARS, MAX_NAMES, LayoutBound
from paramd.v1 import layout_pb2


def batch(name: str = "w", aliases: int = 0, tensors: int = 1) -> layout_pb2.Layout:
    tensor = layout_pb2.Tensor(fqn=name, aliases=[name] * aliases)
    return layout_pb2.Layout(tensors=[tensor] * tensors)


def batches_taken(one: layout_pb2.Layout) -> int:
    """How many of an endless stream are taken before it is told that they are too many."""
    bound = LayoutBound("rank 3")
    taken: list[None] = []
    with pytest.raises(ExhaustedError, match=r"rank 3 sends a layout of [0-9,]+ .*at most"):
        taken.extend(map(bound.count, repeat(one)))
    return len(taken)


def test_an_endless_layout_ends_after_so_many_names() -> None:
    assert batches_taken(batch(aliases=9_999)) == MAX_NAMES // 10_000
    assert batches_taken(batch(tensors=10_000)) == MAX_NAMES // 10_000


def test_an_endless_layout_without_names_ends_after_so_many_bytes() -> None:
    one = layout_pb2.Layout(arena_bytes=[2**62] * 1_000_000)
    assert batches_taken(one) == MAX_LAYOUT_BYTES // one.ByteSize()


def test_one_long_name_or_many_as_long_are_too_much_at_once() -> None:
    assert batches_taken(batch("a" * (MAX_NAME_CHARS + 1))) == 0
    assert batches_taken(batch("a" * MAX_NAME_CHARS, aliases=20_000)) == 0


def test_a_layout_as_large_as_they_get_is_taken() -> None:
    bound = LayoutBound("rank 0")
    for _ in range(100):
        bound.count(batch("layers.0.attention.wq.weight" * 4, tensors=1_000))
