"""Streams: every element travels exactly once, aligned, and no rank sends much more than others."""

from hypothesis import given
from hypothesis import strategies as st

from paramd.trainer.summon.wire import (
    ALIGNMENT_BYTES,
    Part,
    plan_streams,
    span_bytes,
    spans,
    stream_bytes,
)

WORLD_SIZE = 4

parts = st.lists(
    st.builds(
        Part,
        numel=st.integers(1, 70_000),
        item_bytes=st.sampled_from([1, 2, 4, 8, 16]),
        senders=st.sets(st.integers(0, WORLD_SIZE - 1), min_size=1).map(
            lambda ranks: tuple(sorted(ranks))
        ),
    ),
    max_size=8,
)


@given(parts, st.integers(0, 1 << 22))
def test_every_element_travels_once_from_a_rank_that_has_it(
    wanted: list[Part], budget_bytes: int
) -> None:
    streams = plan_streams(wanted, WORLD_SIZE)
    longest = max(map(stream_bytes, streams))
    size = span_bytes(WORLD_SIZE, budget_bytes, longest)
    assert size % ALIGNMENT_BYTES == 0
    seen: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(wanted))}
    for rank, stream in enumerate(streams):
        for span in spans(stream, size, -(-longest // size)):
            end = 0
            for cut in span:
                part = wanted[cut.part]
                assert rank in part.senders
                assert cut.at % part.item_bytes == 0
                assert end <= cut.at
                end = cut.at + (cut.end - cut.begin) * part.item_bytes
                assert end <= size
                seen[cut.part].append((cut.begin, cut.end))
    for index, part in enumerate(wanted):
        position = 0
        for begin, end in sorted(seen[index]):
            assert begin == position
            position = end
        assert position == part.numel


def test_spans_stay_within_the_budget_above_the_floor() -> None:
    budget_bytes = 64 << 20
    assert (WORLD_SIZE + 1) * span_bytes(WORLD_SIZE, budget_bytes, 1 << 30) <= budget_bytes
    assert span_bytes(WORLD_SIZE, 0, 1 << 30) == 1 << 18
    assert span_bytes(WORLD_SIZE, 0, 100) == 112
