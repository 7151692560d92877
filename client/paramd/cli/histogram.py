"""A histogram of binary exponents as text."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 40
"""Characters of the longest bar."""

_EIGHTHS = " ▏▎▍▌▋▊▉"


def histogram(exponents: Sequence[tuple[int, int]], *, zero_count: int = 0) -> list[str]:
    """One line a bin: its lower bound, a bar as long as its share, its count.

    Args:
        exponents: (e, count) of 2**e <= |x| < 2**(e+1), rising.
        zero_count: elements that are exactly zero; a line of their own when there are any.
    """
    rows = [(f"2^{exponent}", found) for exponent, found in exponents]
    if zero_count:
        rows.insert(0, ("0", zero_count))
    most = max((found for _, found in rows), default=0)
    return [f"{name:>6} {bar(found, most):<{WIDTH}} {found:,}".rstrip() for name, found in rows]


def bar(value: int, most: int) -> str:
    """A bar of `value`, `WIDTH` characters for `most`; never empty for a value above 0."""
    if value <= 0:
        return ""
    eighths = max(1, round(8 * WIDTH * value / most))
    whole, left = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[left] if left else "")
