"""Retention of metric points: what is rolled up, what is dropped, and at what age. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

GRACE_S = 30
"""A bucket is rolled up this long after its end; later samples are missing from it."""

MAX_ROLL_UP_S = 3600
"""Longest time range of one roll-up, which bounds the length of a write."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A resolution and how long its points are kept."""

    resolution_s: int
    """0: raw samples."""
    keep_s: int


TIERS = (Tier(0, 3600), Tier(60, 86_400), Tier(600, 30 * 86_400))
"""Finest first; each resolution is a multiple of the previous one."""


@dataclass(frozen=True, slots=True)
class RollUp:
    """Aggregate the source's points in `[begin_s, end_s)` into buckets of the target."""

    source_s: int
    target_s: int
    begin_s: int
    end_s: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove a resolution's points older than `before_s`."""

    resolution_s: int
    before_s: int


def plan(
    now_s: float,
    rolled_s: Mapping[int, int],
    oldest_s: Mapping[int, int],
    tiers: Sequence[Tier] = TIERS,
) -> list[RollUp | Drop]:
    """Steps due at `now_s`, in order.

    Args:
        now_s: Seconds since the Unix epoch.
        rolled_s: By resolution, the time up to which that tier is filled; absent: not at all.
        oldest_s: By resolution, the time of its oldest point; absent: it has none.
    """
    steps: list[RollUp | Drop] = []
    filled_s = int(now_s) - GRACE_S
    until: dict[int, int] = {}
    for source, target in pairwise(tiers):
        width_s = target.resolution_s
        begin_s = rolled_s.get(width_s, oldest_s.get(source.resolution_s))
        if begin_s is None:
            break
        begin_s = begin_s // width_s * width_s
        end_s = max(min(filled_s // width_s * width_s, begin_s + MAX_ROLL_UP_S), begin_s)
        if end_s > begin_s:
            steps.append(RollUp(source.resolution_s, width_s, begin_s, end_s))
        until[source.resolution_s] = filled_s = end_s
    for tier in tiers:
        before_s = int(now_s) - tier.keep_s
        if tier is not tiers[-1]:
            # Never drop points that are not yet rolled up.
            before_s = min(before_s, until.get(tier.resolution_s, 0))
        if oldest_s.get(tier.resolution_s, before_s) < before_s:
            steps.append(Drop(tier.resolution_s, before_s))
    return steps


def tier_for(begin_s: float, now_s: float, tiers: Sequence[Tier] = TIERS) -> Tier:
    """The finest tier that still has points at `begin_s`."""
    age_s = now_s - begin_s
    return next((tier for tier in tiers if age_s <= tier.keep_s), tiers[-1])
