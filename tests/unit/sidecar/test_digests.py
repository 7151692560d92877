"""Digests against xxhash itself; what is refused; the metrics text against promtool."""

import random

import pytest
import xxhash

from paramd.errors import UsageError
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar import digests
from paramd_service.statistics import sidecar as statistics

DATA = memoryview(random.Random(1).randbytes(1 << 20))


def test_a_digest_is_xxh3_of_exactly_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BLOCK_BYTES", 1000)
    parts = [(0, 0), (0, 1), (3, 1003), (7, 123_456), (0, 1 << 20)]
    expected = [xxhash.xxh3_128_digest(DATA[begin:end]) for begin, end in parts]
    assert digests.digest_all(DATA, parts) == expected
    assert {len(digest) for digest in expected} == {16}


@pytest.mark.parametrize(("begin", "end"), [(-1, 5), (5, 4), (0, 101), (101, 101)])
def test_a_range_outside_of_the_snapshot_is_refused(begin: int, end: int) -> None:
    with pytest.raises(UsageError, match="ranges"):
        statistics.checked_ranges([pb.Span(begin=begin, end=end)], 100)


def test_too_many_ranges_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "MAX_RANGES", 2)
    with pytest.raises(UsageError, match="at most 2"):
        statistics.checked_ranges([pb.Span(begin=0, end=1)] * 3, 100)
