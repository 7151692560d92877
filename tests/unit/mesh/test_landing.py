"""Bytes land where places say, however a stream is cut and whoever copies."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd.errors import DeadlineError, UnreachableError
from paramd.mesh.reading import transfer
from paramd.mesh.reading.places import PART_BYTES, Place, PlaceSink, fill_from

SIZE = 1000
SPANS = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.integers(1, 200)).map(
        lambda one: (one[0], min(sum(one), SIZE))
    ),
    max_size=30,
)


class Memory:
    """Snapshot bytes with an address, and a target to compare with."""

    def __init__(self, size_bytes: int) -> None:
        self.source = bytearray(i * 7 % 251 for i in range(size_bytes))
        self.target = bytearray(size_bytes)
        self.source_at = ctypes.addressof(ctypes.c_char.from_buffer(self.source))
        self.target_at = ctypes.addressof(ctypes.c_char.from_buffer(self.target))

    def read_into(self, address: int, offset_bytes: int, size_bytes: int) -> None:
        ctypes.memmove(address, self.source_at + offset_bytes, size_bytes)

    def direct(self, begin: int, end: int) -> Place:
        return Place(begin, end, self.target_at + begin)

    def stored(self, begin: int, end: int) -> Place:
        def store(address: int) -> None:
            assert address % 16 == 0
            ctypes.memmove(self.target_at + begin, address, end - begin)

        return Place(begin, end, store=store)


@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_a_stream_lands_whole_however_it_is_cut(cuts: list[int]) -> None:
    memory = Memory(400)
    # A gap at [100, 110), and places that overlap within [200, 300).
    places = [
        memory.direct(0, 100),
        memory.stored(110, 205),
        memory.stored(200, 300),
        memory.direct(210, 220),
        memory.direct(300, 400),
    ]
    sink, edges = PlaceSink(places), sorted({0, 400, *cuts})
    for begin, end in pairwise(edges):
        sink.write(begin, memory.source_at + begin, end - begin)
    expected = bytearray(memory.source)
    expected[100:110] = bytes(10)
    assert memory.target == expected


def test_threads_fill_all_places_of_all_snapshots() -> None:
    one, other = Memory(2 * PART_BYTES + 5), Memory(1000)
    jobs = [
        (one, [one.direct(0, len(one.source))]),
        (other, [other.stored(0, 300), other.direct(300, 1000)]),
    ]
    with ThreadPoolExecutor(3) as pool:
        fill_from(jobs, pool, 3)
    assert one.target == one.source
    assert other.target == other.source


def test_a_source_that_fails_fails_the_whole_after_all_threads_ended() -> None:
    class Broken(Memory):
        def read_into(self, address: int, offset_bytes: int, size_bytes: int) -> None:
            raise UnreachableError("gone")

    memory = Broken(100)
    with ThreadPoolExecutor(2) as pool, pytest.raises(UnreachableError, match="gone"):
        fill_from([(memory, [memory.direct(0, 50), memory.direct(50, 100)])], pool, 2)


def test_a_copy_ends_at_the_deadline_of_its_read() -> None:
    class Slow(Memory):
        def read_into(self, address: int, offset_bytes: int, size_bytes: int) -> None:
            super().read_into(address, offset_bytes, size_bytes)
            while time.monotonic() <= deadline_s:
                time.sleep(0.001)

    memory = Slow(3 * PART_BYTES)
    jobs = [(memory, [memory.direct(0, len(memory.source))])]
    deadline_s = time.monotonic() + 0.2
    with ThreadPoolExecutor(1) as pool, pytest.raises(DeadlineError, match="timeout="):
        fill_from(jobs, pool, 1, deadline_s=deadline_s)
    # The part that had begun is whole; none began after the deadline.
    assert memory.target[:PART_BYTES] in (memory.source[:PART_BYTES], bytes(PART_BYTES))
    assert not any(memory.target[PART_BYTES:])


@given(spans=SPANS, count=st.integers(1, 6), least=st.integers(1, 300))
def test_parts_cover_the_read_and_no_place_straddles_two(
    spans: list[tuple[int, int]], count: int, least: int
) -> None:
    places = [Place(begin, end, address=1) for begin, end in sorted(spans)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "STREAM_LEAST_BYTES", least)
        parts = transfer._cut(places, SIZE, count)
    assert 1 <= len(parts) <= count
    assert [begin for begin, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])]
    assert parts[-1][1] == SIZE
    assert [place for _, _, held in parts for place in held] == places
    for begin, end, held in parts:
        assert all(begin <= place.begin and place.end <= end for place in held)
    assert all(end - begin >= least for begin, end, _ in parts[:-1])
