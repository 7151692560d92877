"""Statistics of the difference of two snapshots, against torch."""

from __future__ import annotations

import pytest
import torch

from paramd_service.sidecar.statistics import reduce


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32"])
def test_statistics_of_a_difference_are_those_that_torch_computes(dtype: str) -> None:
    kind = getattr(torch, dtype)
    before = (torch.randn(300_001) * 10).to(kind)
    after = before.clone()
    after[1000:2000] += 1
    found = reduce.reduce_run(bytes_of(after), dtype, with_exponents=False, before=bytes_of(before))
    wanted = after.double() - before.double()
    assert found.count == 300_001
    assert found.zero_count == int((wanted == 0).sum())
    assert found.sum_squares == pytest.approx(float(wanted.square().sum()), rel=1e-6)
    assert found.max == pytest.approx(float(wanted.max()), rel=1e-6)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy()))
