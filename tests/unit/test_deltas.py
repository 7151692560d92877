"""Deltas: what is made of two states turns one into the other, in the fewest bytes."""

import numpy as np
import pytest

from paramd.deltas import GROUP, STRETCH, Delta, apply_delta, make_delta
from paramd.errors import DataLossError, UsageError
from paramd.v1 import sidecar_pb2 as pb

SAME, OFFSETS, BITMAP, WHOLE = (
    pb.DELTA_FORM_SAME,
    pb.DELTA_FORM_OFFSETS,
    pb.DELTA_FORM_BITMAP,
    pb.DELTA_FORM_UNSPECIFIED,
)


def states(numel: int, size: int, changed: float, seed: int = 0) -> tuple[bytearray, bytearray]:
    """Two states of `numel` elements, of which that share differs; the first and last always."""
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 256, numel * size, dtype=np.uint8)
    after, mask = before.copy(), rng.random(numel) < changed
    if changed and numel:
        mask[[0, -1]] = True
    after.reshape(numel, size)[mask, rng.integers(0, size)] ^= 1
    return bytearray(before), bytearray(after)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("numel", [1, 7, 8, 9, GROUP - 1, GROUP, GROUP + 1, STRETCH + 5])
@pytest.mark.parametrize("changed", [0.0, 0.001, 0.1, 0.5, 1.0])
def test_what_is_applied_to_the_base_is_the_new_state(
    size: int, numel: int, changed: float
) -> None:
    before, after = states(numel, size, changed)
    delta = make_delta(memoryview(after), memoryview(before), size)
    assert len(delta.data) < len(after)
    if delta.form in (SAME, WHOLE):
        assert (delta.form == SAME) == (before == after)
        assert not delta.data
        return
    apply_delta(memoryview(before), delta, size)
    assert before == after


def test_the_shorter_way_to_write_it_is_chosen() -> None:
    numel = 1 << 20
    forms = [
        make_delta(*map(memoryview, reversed(states(numel, 2, share))), 2).form
        for share in (0.01, 0.05, 0.07, 0.8, 0.99)
    ]
    assert forms == [OFFSETS, OFFSETS, BITMAP, BITMAP, WHOLE]


def test_bits_are_compared_not_numbers() -> None:
    zeros = np.array([0.0, -0.0, np.nan] * 100, dtype=np.float32)
    other = zeros.copy()
    other[0] = -0.0
    delta = make_delta(memoryview(other).cast("B"), memoryview(zeros).cast("B"), 4)
    assert (delta.form, delta.changed_count) == (OFFSETS, 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: Delta(d.form, d.changed_count, d.data[:-1]),
        lambda d: Delta(d.form, d.changed_count + 1, d.data),
        lambda d: Delta(WHOLE, d.changed_count, d.data),
        lambda d: Delta(7, d.changed_count, d.data),
        lambda d: Delta(d.form, d.changed_count, bytes(8) + d.data[8:]),
        lambda d: Delta(d.form, -1, d.data),
    ],
    ids=["short", "more", "whole", "unknown", "other-offsets", "none"],
)
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_data_that_do_not_fit_are_refused_and_change_nothing(spoil: object, share: float) -> None:
    before, after = states(2 * GROUP, 2, share)
    delta = make_delta(memoryview(after), memoryview(before), 2)
    assert delta.data
    kept = bytes(before)
    with pytest.raises(DataLossError):
        apply_delta(memoryview(before), spoil(delta), 2)  # type: ignore[operator]
    assert before == kept


def test_an_offset_beyond_the_end_is_refused() -> None:
    data, target = b"\x01\0\0\0" + b"\xff\xff" + b"\x01\x02", bytearray(20)
    with pytest.raises(DataLossError, match="element 65,535 of 10"):
        apply_delta(memoryview(target), Delta(OFFSETS, 1, data), 2)
    assert target == bytes(20)


@pytest.mark.parametrize(("size", "length"), [(3, 12), (0, 12), (4, 10), (-1, 4)])
def test_elements_of_another_size_are_refused(size: int, length: int) -> None:
    data = memoryview(bytes(length))
    with pytest.raises(UsageError, match="element_bytes"):
        make_delta(data, data, size)
