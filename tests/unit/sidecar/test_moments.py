"""Statistics by numpy alone are those of torch, and torch is not loaded for them."""

import subprocess
import sys

import pytest
import torch

from paramd.layout.stats import COLUMNS, by_dtype
from paramd_service.sidecar import moments
from paramd_service.sidecar.statistics import reduce


@pytest.mark.parametrize("dtype", sorted(moments.ITEM_BYTES))
@pytest.mark.parametrize("bad", [False, True])
def test_moments_are_those_of_torch(dtype: str, bad: bool) -> None:
    torch.manual_seed(3)
    values = (torch.randn(150_000) * 3 + 0.5).to(getattr(torch, dtype))
    values[::7] = 0
    if bad:
        values[5], values[6], values[70_000] = float("nan"), float("inf"), -float("inf")
    # At an odd byte, as pieces of an arena may be.
    raw = bytearray(b"x") + bytearray(values.view(torch.uint8).numpy().tobytes())
    data = memoryview(raw)
    size = moments.ITEM_BYTES[dtype]
    runs = by_dtype(
        [(dtype, 0, 1, 100_000), (dtype, 1, 1 + 100_000 * size, 50_000), (dtype, 2, 1, 0)]
    )
    ours = moments.reduce_runs(data, runs).messages()
    theirs = reduce.reduce_runs(data, runs, with_exponents=False).messages()
    for our, their in zip(ours, theirs, strict=True):
        for name in COLUMNS:
            assert getattr(our, name) == pytest.approx(getattr(their, name), rel=1e-5, abs=1e-6)


def test_what_is_small_is_reduced_without_torch() -> None:
    code = (
        "import sys\n"
        "from paramd.layout.stats import by_dtype\n"
        "from paramd_service.sidecar import moments\n"
        "runs = by_dtype([('float32', 0, 0, 4)])\n"
        "assert moments.fits(runs)\n"
        "assert not moments.fits(by_dtype([('int8', 0, 0, 4)]))\n"
        "assert not moments.fits(by_dtype([('float32', 0, 0, 1 << 30)]))\n"
        "import struct\n"
        "found = moments.reduce_runs(memoryview(struct.pack('4f', 1, 2, 0, -3)), runs).messages()\n"
        "assert (found[0].count, found[0].zero_count, found[0].min) == (4, 1, -3.0)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
