"""Digests against xxhash itself; what is refused; the metrics text against promtool."""

from __future__ import annotations

import random

import pytest
import xxhash
from prometheus_client.parser import text_string_to_metric_families

from paramd.errors import UsageError
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.rpc import statistics
from paramd_service.sidecar.rpc.service import render
from tests.needs import check_with_promtool

DATA = memoryview(random.Random(1).randbytes(1 << 20))


def test_a_digest_is_xxh3_of_exactly_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK_BYTES", 1000)
    parts = [(0, 0), (0, 1), (3, 1003), (7, 123_456), (0, 1 << 20)]
    expected = [xxhash.xxh3_128_digest(DATA[begin:end]) for begin, end in parts]
    assert statistics.digest_all(DATA, parts) == expected
    assert {len(digest) for digest in expected} == {16}


def test_any_single_bit_changes_the_digest() -> None:
    data = bytearray(DATA[:512])
    (before,) = statistics.digest_all(memoryview(data), [(0, 512)])
    for bit in range(8 * 512):
        data[bit // 8] ^= 1 << bit % 8
        assert statistics.digest_all(memoryview(data), [(0, 512)]) != [before], bit
        data[bit // 8] ^= 1 << bit % 8


def test_a_cancelled_call_stops_between_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK_BYTES", 10)
    assert statistics.digest_all(DATA, [(0, 100)], stop=[True]) == []


@pytest.mark.parametrize(("begin", "end"), [(-1, 5), (5, 4), (0, 101), (101, 101)])
def test_a_range_outside_of_the_snapshot_is_refused(begin: int, end: int) -> None:
    with pytest.raises(UsageError, match="ranges"):
        statistics.checked_ranges([pb.Span(begin=begin, end=end)], 100)


def test_too_many_ranges_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "MAX_RANGES", 2)
    with pytest.raises(UsageError, match="at most 2"):
        statistics.checked_ranges([pb.Span(begin=0, end=1)] * 3, 100)


def test_the_metrics_text_keeps_values_and_escapes_the_job() -> None:
    job = 'a"b\\c\nd'
    text = render([("x_seconds", "X", 0.25), ("y_total", "Y", 3)], job=job, rank=7)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: family.type for name, family in families.items()} == {
        "paramd_sidecar_x_seconds": "gauge",
        "paramd_sidecar_y": "counter",
    }
    for family in families.values():
        (sample,) = family.samples
        assert sample.labels == {"job": job, "rank": "7"}
    assert families["paramd_sidecar_y"].samples[0].value == 3
    check_with_promtool(text)
