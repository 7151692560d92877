"""Points of a series, and how to reduce them: neighbours merge within a grid of time. Pure.

A grid's spans are powers of two of a millisecond, counted from the Unix epoch. Two neighbouring
spans always form one of the next grid, so merging in steps or at once gives the same points. A span
without measurements has no point, in any grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A series within one span of time."""

    time_ms: int
    """Begin of the span, in milliseconds since the Unix epoch."""
    span_ms: int = 1
    """Length of the span; 1: one moment."""
    step: int = -1
    """The highest step within it; -1: unknown."""
    mean: float | None
    """Of the finite values; None when there are none."""
    min: float | None
    max: float | None
    count: int
    """Finite values."""
    nonfinite_count: int
    """NaN and infinities."""

    @property
    def time_s(self) -> float:
        """Begin of the span, in seconds since the Unix epoch."""
        return self.time_ms / 1000

    @property
    def span_s(self) -> float:
        """Length of the span in seconds."""
        return self.span_ms / 1000

    @property
    def end_ms(self) -> int:
        """End of the span, exclusive."""
        return self.time_ms + self.span_ms


def sampled(time_ms: int, step: int, value: float) -> Point:
    finite = value if math.isfinite(value) else None
    return Point(
        time_ms=time_ms,
        step=step,
        mean=finite,
        min=finite,
        max=finite,
        count=int(finite is not None),
        nonfinite_count=int(finite is None),
    )


def merge(points: Iterable[Point], span_ms: int) -> list[Point]:
    """At most one point for each span of the grid that has any; `points` are in order of time."""
    grid = groupby(points, key=lambda point: point.time_ms // span_ms)
    return [_one(list(within), place * span_ms, span_ms) for place, within in grid]


def thin(points: Sequence[Point], span_ms: int, limit: int) -> tuple[Sequence[Point], int]:
    """At most `limit` points, and the span of their grid: `span_ms`, doubled as often as needed."""
    if len(points) <= limit:
        return points, span_ms
    while len({point.time_ms // span_ms for point in points}) > limit:
        span_ms *= 2
    return merge(points, span_ms), span_ms


def _one(points: list[Point], time_ms: int, span_ms: int) -> Point:
    if len(points) == 1 and points[0].span_ms >= span_ms:
        return points[0]  # of a coarser grid, as an older paramd kept them
    count = sum(point.count for point in points)
    finite = [point for point in points if point.count]
    low = min((point.min for point in finite if point.min is not None), default=None)
    high = max((point.max for point in finite if point.max is not None), default=None)
    mean = None
    if low is not None and high is not None:
        # Weights first, so that no sum overflows; clamping removes rounding errors.
        parts = (point.mean * (point.count / count) for point in finite if point.mean is not None)
        mean = min(max(math.fsum(parts), low), high)
    return Point(
        time_ms=time_ms,
        span_ms=max(span_ms, points[-1].end_ms - time_ms),
        step=max(point.step for point in points),
        mean=mean,
        min=low,
        max=high,
        count=count,
        nonfinite_count=sum(point.nonfinite_count for point in points),
    )
