"""Which metric points are summed up, and which are dropped, at what age. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

GRACE_S = 30
"""A bucket is summed up this long after its end; what comes later is not in the sum."""

MAX_ROLL_UP_S = 3600
"""Longest stretch that one step sums up, so that no write takes long."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Points of one resolution, and how long they are kept."""

    resolution_s: int
    """0: as they came."""
    keep_s: int


TIERS = (Tier(0, 3600), Tier(60, 86_400), Tier(600, 30 * 86_400))
"""Finest first; each resolution a multiple of the one before."""


@dataclass(frozen=True, slots=True)
class RollUp:
    """Sum up the source's points in `[begin_s, end_s)` into buckets of the target."""

    source_s: int
    target_s: int
    begin_s: int
    end_s: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove the points of a resolution that are older than `before_s`."""

    resolution_s: int
    before_s: int


def plan(
    now_s: float,
    rolled_s: Mapping[int, int],
    oldest_s: Mapping[int, int],
    tiers: Sequence[Tier] = TIERS,
) -> list[RollUp | Drop]:
    """What is to be done at `now_s`, in this order.

    Args:
        now_s: seconds since the Unix epoch.
        rolled_s: by resolution, until when that tier has been filled; absent: not at all.
        oldest_s: by resolution, time of its oldest point; absent: it has none.
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
            # Nothing goes before its sum is written.
            before_s = min(before_s, until.get(tier.resolution_s, 0))
        if oldest_s.get(tier.resolution_s, before_s) < before_s:
            steps.append(Drop(tier.resolution_s, before_s))
    return steps


def tier_for(begin_s: float, now_s: float, tiers: Sequence[Tier] = TIERS) -> Tier:
    """The finest tier that still has points of `begin_s`."""
    age_s = now_s - begin_s
    return next((tier for tier in tiers if age_s <= tier.keep_s), tiers[-1])
