"""A follower's copy: parts that turn it into what the rank has are taken, all others are not."""

import torch
from xxhash import xxh3_128_digest

from paramd.deltas import make_delta
from paramd.layout.plan import Landing, RankRead
from paramd.layout.types import Interval
from paramd.mesh.frames.follow import RankMirror
from paramd.v1 import sidecar_pb2 as pb

NUMEL = 4096
BYTES = 2 * NUMEL


def mirror_of(*states: bytes) -> RankMirror:
    """A mirror with a range for each of these, which it holds and knows."""
    landings = tuple(
        Landing(
            tensor=number,
            begin_bytes=number * BYTES,
            sizes=(NUMEL,),
            strides=(1,),
            target=Interval(0, NUMEL),
            size_bytes=BYTES,
            target_begin_bytes=0,
        )
        for number in range(len(states))
    )
    size_bytes = len(states) * BYTES
    read = RankRead(rank=0, spans=((0, size_bytes),), size_bytes=size_bytes, landings=landings)
    items = tuple(
        pb.DeltaItem(begin_bytes=one.begin_bytes, end_bytes=one.end_bytes, element_bytes=2)
        for one in landings
    )
    mirror = RankMirror(read, items, torch.empty(size_bytes, dtype=torch.uint8))
    for index, state in enumerate(states):
        mirror.view(index)[:] = state
        mirror.wanted[index] = xxh3_128_digest(state)
        assert mirror.check(index)
    return mirror


def changed(state: bytes, *elements: int) -> bytes:
    found = bytearray(state)
    for element in elements:
        found[2 * element] ^= 1
    return bytes(found)


def part_of(new: bytes, base: bytes) -> tuple[pb.DeltaPart, bytes]:
    delta = make_delta(memoryview(new), memoryview(base), 2)
    part = pb.DeltaPart(
        digest=xxh3_128_digest(new),
        form=delta.form,  # type: ignore[arg-type]
        changed_count=delta.changed_count,
        size_bytes=len(delta.data),
    )
    return part, delta.data


STATE = bytes(range(256)) * (BYTES // 256)


def test_parts_are_applied_in_the_order_of_their_bytes() -> None:
    mirror = mirror_of(STATE, STATE, STATE)
    new = [changed(STATE, 5), STATE, changed(STATE, *range(0, NUMEL, 3))]
    parts = [part_of(one, STATE) for one in new]
    found = mirror.apply(0, [part for part, _ in parts], b"".join(data for _, data in parts))
    assert found == []
    assert [bytes(mirror.view(index)) for index in range(3)] == new


def test_a_base_that_is_not_the_ranks_leaves_the_range_to_be_read_whole() -> None:
    mirror = mirror_of(STATE, STATE)
    mirror.view(0)[100] ^= 1  # a bit of the host's memory has flipped
    new = changed(STATE, 7)
    part, data = part_of(new, STATE)
    assert mirror.apply(0, [part, part], data + data) == [0]
    assert bytes(mirror.view(1)) == new
    # Until it has been read, nothing is known of it: not even the same state counts.
    assert mirror.apply(0, [part], data) == [0]
    mirror.view(0)[:] = new
    assert mirror.check(0)
    assert mirror.apply(0, [part], data) == []


def test_what_is_told_to_be_the_same_but_is_not_is_read_whole() -> None:
    mirror = mirror_of(STATE)
    told = pb.DeltaPart(digest=xxh3_128_digest(changed(STATE, 1)), form=pb.DELTA_FORM_SAME)
    assert mirror.apply(0, [told], b"") == [0]


def test_without_a_base_only_ranges_that_differ_are_read() -> None:
    mirror = mirror_of(STATE, STATE)
    parts = [
        pb.DeltaPart(digest=xxh3_128_digest(one), changed_count=-1)
        for one in (STATE, changed(STATE, 1))
    ]
    assert mirror.changed_bytes(0, parts) == BYTES
    assert mirror.apply(0, parts, b"") == [1]


def test_data_that_do_not_fit_are_read_whole() -> None:
    mirror = mirror_of(STATE)
    part, data = part_of(changed(STATE, 1, 2), STATE)
    part.changed_count = 3
    assert mirror.apply(0, [part], data) == [0]
