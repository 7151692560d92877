"""Checks that a request must pass before anything is done or allocated for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paramd.errors import UsageError

MAX_SPANS = 100_000
MAX_STATS_ITEMS = 100_000
MAX_SNAPSHOT_IDS = 1_024

# Kept back from a caller's deadline, so that the reason arrives before it ends.
_MARGIN_S = 0.25
_MARGIN_PART = 0.1


class SpanMessage(Protocol):
    """paramd.v1.Span."""

    begin: int
    end: int


def check_deadline(remaining_s: float | None, max_deadline_s: float) -> float:
    """Seconds of a call's deadline that may be used.

    Raises:
        UsageError: the call has none, or one too far away.
    """
    if remaining_s is None or remaining_s > max_deadline_s + 1:
        given = "no deadline" if remaining_s is None else f"a deadline in {remaining_s:.0f} s"
        raise UsageError(
            f"the call has {given}; set one of at most {max_deadline_s:.0f} s (timeout=)"
        )
    return max(remaining_s - min(_MARGIN_S, _MARGIN_PART * remaining_s), 0.0)


def check_spans(spans: Sequence[SpanMessage], arena_bytes: int) -> tuple[tuple[int, int], ...]:
    """The spans as pairs.

    Raises:
        UsageError: too many, empty, not sorted, overlapping, or outside of the arena.
    """
    if len(spans) > MAX_SPANS:
        raise UsageError(f"spans: {len(spans):,}; expected at most {MAX_SPANS:,}")
    checked: list[tuple[int, int]] = []
    last_end = 0
    for span in spans:
        begin, end = span.begin, span.end
        if not last_end <= begin < end <= arena_bytes:
            raise UsageError(
                f"spans: [{begin}, {end}) after byte {last_end}; expected non-empty spans, sorted, "
                f"not overlapping, within [0, {arena_bytes})"
            )
        checked.append((begin, end))
        last_end = end
    return tuple(checked)


def check_range(offset_bytes: int, size_bytes: int, total_bytes: int) -> tuple[int, int]:
    """[begin, end) of a read; size 0 means up to the end.

    Raises:
        UsageError: it leaves the snapshot.
    """
    if not 0 <= offset_bytes <= total_bytes or not 0 <= size_bytes <= total_bytes - offset_bytes:
        raise UsageError(
            f"offset_bytes, size_bytes: {offset_bytes}, {size_bytes}; expected a range within the "
            f"snapshot's {total_bytes} bytes"
        )
    return offset_bytes, offset_bytes + size_bytes if size_bytes else total_bytes


def granted_lease_s(lease_ms: int, default_s: float, max_s: float) -> float:
    """Lease that a request gets, in seconds; 0 means the default, and `max_s` is the cap.

    Raises:
        UsageError: it is negative.
    """
    if lease_ms < 0:
        raise UsageError(f"lease_ms: {lease_ms}; expected 0 (the default) or more")
    return min(lease_ms / 1000, max_s) if lease_ms else default_s
