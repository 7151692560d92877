"""Counts of binary exponents, from the elements' own bits.

Counting bytes one by one is bound by the latency of the few counters that they share. Two
neighbouring exponents taken as one number have thousands of counters, and half as many turns.
"""

from __future__ import annotations

import torch

EXPONENT_BEGIN = -64
EXPONENT_BINS = 128
"""Bins [-64, 64): weights and gradients lie far inside; the ends collect what does not."""

BIASED_BINS = 256
"""Counts are kept by the biased exponent of a float32: e + 127."""

# The bits of a float32: a sign, 8 of exponent, 23 of mantissa.
_MANTISSA_BITS = 23
_BIAS = 127

_PAIR_BINS = 1 << 15
_PAIRS_NUMEL = 1 << 16
"""Fewer elements are not worth that many counters."""


def count_biased(values: torch.Tensor, zero_count: int) -> torch.Tensor:
    """Nonzero elements by biased exponent; int64 [256].

    Args:
        values: 1-D and finite, float32 or float64; what a float32 has no exponent for is
            counted at the ends.
        zero_count: how many of them are zero.
    """
    if values.dtype != torch.float32:
        exponent = torch.frexp(values[values != 0]).exponent + (_BIAS - 1)
        return torch.bincount(exponent.clamp_(0, BIASED_BINS - 1), minlength=BIASED_BINS)
    # Shifting out the mantissa leaves sign and exponent; a byte has room for the latter.
    biased = (values.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
    counts = _count_bytes(biased)
    # Zeros and subnormals share the biased exponent 0.
    counts[0] -= zero_count
    return counts


def _count_bytes(values: torch.Tensor) -> torch.Tensor:
    """How often each byte occurs; int64 [256]."""
    if values.numel() < _PAIRS_NUMEL:
        return torch.bincount(values, minlength=BIASED_BINS)
    low, high = int(values.numpy().min()), int(values.numpy().max())
    # Pairs are read as signed numbers: both must be below 128, that is all |x| < 2.
    if high >= BIASED_BINS // 2:
        return torch.bincount(values, minlength=BIASED_BINS)
    even = values.numel() // 2 * 2
    pairs = torch.bincount(values[:even].view(torch.int16), minlength=_PAIR_BINS)
    used = slice(low, high + 1)
    table = pairs.numpy().reshape(BIASED_BINS // 2, BIASED_BINS)[used, used]
    counts = torch.bincount(values[even:], minlength=BIASED_BINS)
    counts[used] += torch.from_numpy(table.sum(axis=0) + table.sum(axis=1))
    return counts


def count_biased_rows(rows: torch.Tensor) -> torch.Tensor:
    """Nonzero elements of each row by biased exponent; [rows, columns] -> int64 [rows, 256]."""
    exponent = torch.frexp(rows).exponent.long() + (_BIAS - 1)
    bins = exponent.clamp_(0, BIASED_BINS - 1)
    bins += BIASED_BINS * torch.arange(len(rows))[:, None]
    counts = torch.bincount(bins[rows != 0], minlength=BIASED_BINS * len(rows))
    return counts.view(len(rows), BIASED_BINS)


def folded(biased: torch.Tensor) -> list[int]:
    """Counts of bins [EXPONENT_BEGIN, EXPONENT_BEGIN + EXPONENT_BINS), of int64 [256]."""
    first = EXPONENT_BEGIN + _BIAS
    counts = biased[first : first + EXPONENT_BINS].clone()
    counts[0] += biased[:first].sum()
    counts[-1] += biased[first + EXPONENT_BINS :].sum()
    found: list[int] = counts.tolist()
    return found
