"""Reductions against numpy in float64, for every dtype and for the nasty values."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
import torch

from paramd.errors import UsageError
from paramd.layout.stats import COLUMNS, by_dtype
from paramd_service.sidecar.statistics import reduce
from paramd_service.sidecar.statistics.reduce import EXPONENT_BEGIN, EXPONENT_BINS

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes()))


def check(tensor: torch.Tensor, dtype: str) -> reduce.Reduced:
    """Compares all numbers with numpy's."""
    found = reduce.reduce_run(bytes_of(tensor), dtype, with_exponents=True)
    plain = reduce.reduce_run(bytes_of(tensor), dtype, with_exponents=False)
    assert reduce.exponent_counts(plain) == []
    assert _numbers(plain) == _numbers(found)
    values = tensor.to(torch.float64).numpy()
    finite = values[np.isfinite(values)]
    assert found.count == values.size
    assert found.zero_count == int((values == 0).sum())
    assert found.nan_count == int(np.isnan(values).sum())
    assert found.inf_count == int(np.isinf(values).sum())
    assert found.min == finite.min(initial=math.inf)
    assert found.max == finite.max(initial=-math.inf)
    if finite.size:
        scale = float(np.sqrt(np.mean(finite**2)))
        assert found.mean == pytest.approx(finite.mean(), rel=1e-6, abs=1e-6 * scale)
        assert found.sum_squares == pytest.approx(float((finite**2).sum()), rel=2e-6)
        deviation = float(((finite - finite.mean()) ** 2).sum())
        assert found.m2 == pytest.approx(deviation, rel=1e-5, abs=1e-9 * scale**2)
    assert reduce.exponent_counts(found) == expected_exponents(finite)
    return found


def expected_exponents(finite: np.ndarray) -> list[int]:
    nonzero = np.abs(finite[finite != 0])
    exponents = np.floor(np.frexp(nonzero)[1] - 1).astype(int) - EXPONENT_BEGIN
    clipped = np.clip(exponents, 0, EXPONENT_BINS - 1)
    counts: list[int] = np.bincount(clipped, minlength=EXPONENT_BINS).tolist()
    return counts


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 300_000])
def test_floats_are_reduced_as_numpy_does(dtype: str, numel: int) -> None:
    torch.manual_seed(numel)
    values = torch.randn(numel)
    values[::7] = 0
    check(values.to(getattr(torch, dtype)), dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_reduced_as_numpy_does(dtype: str) -> None:
    torch.manual_seed(1)
    info = torch.iinfo(getattr(torch, dtype))
    high = min(info.max, 2**40)
    values = torch.randint(max(info.min, -high), high, (70_001,), dtype=torch.int64)
    check(values.to(getattr(torch, dtype)), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_values_that_are_no_numbers_are_counted_apart(dtype: str) -> None:
    values = torch.linspace(-3, 3, 200_000).to(getattr(torch, dtype))
    values[5], values[150_000], values[9], values[10] = math.nan, math.nan, math.inf, -math.inf
    found = check(values, dtype)
    assert (found.nan_count, found.inf_count) == (2, 2)


HARD: dict[str, Callable[[], torch.Tensor]] = {
    "ones": lambda: torch.ones(300_000) + 1e-4 * torch.randn(300_000),
    "offset": lambda: 1e6 + torch.randn(100_000),
    "tiny": lambda: 1e-25 * torch.randn(100_000),
    "huge": lambda: 1e30 * torch.randn(100_000),
    "largest": lambda: torch.full((100_000,), 3e38),
    "subnormal": lambda: torch.full((5000,), 1e-42),
    "blocks": lambda: torch.cat([torch.zeros(200_000), torch.ones(200_000)]),
    "edges": lambda: torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-126), 1.0, 1.9999999]),
    # An odd number of them below 2, zeros of both signs among them; then one that is not.
    "odd": lambda: torch.cat([torch.tensor([0.0, -0.0, 1e-42]), 1e-3 * torch.randn(150_000)]),
    "two": lambda: torch.cat([1e-3 * torch.randn(150_000), torch.tensor([-2.0])]),
    "equal": lambda: torch.tensor([1e-3, -1e-3]).repeat(150_000),
    "no number": lambda: torch.full((3000,), math.nan),
}


@pytest.mark.parametrize("of", HARD)
def test_hard_values_keep_their_digits(of: str) -> None:
    torch.manual_seed(3)
    check(HARD[of](), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int16", "bool"])
@pytest.mark.parametrize("with_exponents", [False, True])
def test_small_items_reduced_together_are_as_each_by_itself(
    dtype: str, with_exponents: bool
) -> None:
    torch.manual_seed(2)
    numbers = torch.randn(9, 500)
    numbers[0], numbers[1, ::3], numbers[2, 7], numbers[3, 1] = 0.0, -0.0, math.nan, -math.inf
    numbers[4] *= 1e-30
    kind = getattr(torch, dtype)
    values = (numbers if kind.is_floating_point else 9 * torch.randn(9, 500)).to(kind)
    # From an odd byte on, and with nothing at the end.
    data = memoryview(bytearray(b"x" + bytes(bytes_of(values))))
    size_bytes = (len(data) - 1) // len(values)
    begins = [1 + size_bytes * row for row in range(len(values))] + [len(data)]
    numels = [500] * len(values) + [0]
    runs = by_dtype((dtype, *of) for of in zip(itertools.count(), begins, numels))
    answers = reduce.reduce_runs(data, runs, with_exponents=with_exponents)
    found, columns = answers.messages(), answers.columns()
    for name in COLUMNS:
        assert list(getattr(columns, name)) == [getattr(one, name) for one in found], name
    for message, begin, numel in zip(found, begins, numels, strict=True):
        run = data[begin : begin + numel * size_bytes // 500]
        one = reduce.reduce_run(run, dtype, with_exponents=with_exponents)
        alone = reduce.stats_message(one)
        for name in ("count", "zero_count", "nan_count", "inf_count", "min", "max"):
            assert getattr(message, name) == getattr(alone, name), name
        scale = math.sqrt(alone.sum_squares / 500) if alone.sum_squares else 1.0
        assert message.mean == pytest.approx(alone.mean, rel=1e-6, abs=1e-6 * scale)
        assert message.m2 == pytest.approx(alone.m2, rel=2e-6)
        assert message.sum_squares == pytest.approx(alone.sum_squares, rel=2e-6)
        assert list(message.exponent_counts) == list(alone.exponent_counts)
        assert bool(message.exponent_counts) == with_exponents
    for begin, numel in ((-1, 1), (0, -1), (len(data), 1), (0, len(data) + 1), (1, 1 << 62)):
        with pytest.raises(UsageError, match="leave the snapshot"):
            reduce.reduce_runs(data, by_dtype([(dtype, 0, begin, numel)]), with_exponents=False)


def _numbers(reduced: reduce.Reduced) -> dict[str, object]:
    return {name: value for name, value in asdict(reduced).items() if name != "exponents"}


_LOADS = """
import os, resource, sys
from paramd.errors import ExhaustedError
used, (soft, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
try:
    import paramd_service.sidecar.statistics
except ExhaustedError as error:
    print(error)
assert "torch" not in sys.modules
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
import paramd_service.sidecar.statistics.reduce
print("loaded")
"""


def test_torch_is_loaded_when_there_is_room_and_not_by_halves() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOADS], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[1:] == ["loaded"], done
    assert done.stdout.startswith("out of file descriptors")
