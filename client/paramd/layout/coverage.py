"""Do regions cover a tensor exactly once?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

from paramd.layout.regions import flat_interval, full_box, intersection
from paramd.layout.types import Box, Interval, Region


def outside(region: Region, shape: Sequence[int]) -> str | None:
    """Why `region` is not a part of a tensor of `shape`; None when it is."""
    if isinstance(region, Interval):
        if 0 <= region.begin <= region.end <= prod(shape):
            return None
        return f"interval [{region.begin}, {region.end}) lies outside of {prod(shape)} elements"
    if not len(region.begin) == len(region.end) == len(shape):
        return f"box {region.begin}..{region.end} has not the {len(shape)} dims of the tensor"
    for dim, (begin, end, size) in enumerate(zip(region.begin, region.end, shape, strict=True)):
        if not 0 <= begin <= end <= size:
            return f"box [{begin}, {end}) lies outside of dim {dim} with size {size}"
    return None


@lru_cache(maxsize=4096)
def defect(shape: tuple[int, ...], regions: tuple[Region, ...]) -> str | None:
    """Why the regions do not cover every element exactly once; None when they do.

    Equal regions are replicas and count once. Cached, since the layers of a model
    are alike. The cost is that of sorting for intervals and grids of boxes.
    """
    distinct = [region for region in dict.fromkeys(regions) if region.numel]
    boxes = [region for region in distinct if isinstance(region, Box)]
    if boxes and len(boxes) < len(distinct):
        intervals = _as_intervals(distinct, shape)
        if intervals is None:
            return "its ranks mix boxes with intervals"
        return _defect_of_intervals(intervals, prod(shape))
    if boxes:
        return _defect_of_boxes(boxes, shape)
    return _defect_of_intervals([r for r in distinct if isinstance(r, Interval)], prod(shape))


def _as_intervals(regions: Iterable[Region], shape: tuple[int, ...]) -> list[Interval] | None:
    result: dict[Interval, None] = {}
    for region in regions:
        interval = flat_interval(region, shape) if isinstance(region, Box) else region
        if interval is None:
            return None
        result[interval] = None
    return list(result)


def _defect_of_intervals(intervals: list[Interval], numel: int) -> str | None:
    reached = 0
    for interval in sorted(intervals, key=lambda i: (i.begin, i.end)):
        if interval.begin > reached:
            return f"no rank holds elements [{reached}, {interval.begin})"
        if interval.begin < reached:
            return f"different regions hold elements [{interval.begin}, {reached})"
        reached = interval.end
    return None if reached == numel else f"no rank holds elements [{reached}, {numel})"


def _defect_of_boxes(boxes: list[Box], shape: tuple[int, ...]) -> str | None:
    if boxes == [full_box(shape)]:
        return None
    for one, other in _overlaps(boxes, len(shape)):
        return f"different boxes overlap: {_said(one)} and {_said(other)}"
    missing = prod(shape) - sum(box.numel for box in boxes)
    return f"no rank holds {missing} of its {prod(shape)} elements" if missing else None


def _overlaps(boxes: list[Box], ndim: int) -> Iterable[tuple[Box, Box]]:
    # A sweep along the dim that is cut most often keeps few boxes to compare with.
    dim = max(range(ndim), key=lambda d: len({box.begin[d] for box in boxes}), default=0)
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.begin[dim] if ndim else 0):
        active = [other for other in active if other.end[dim] > box.begin[dim]] if ndim else active
        for other in active:
            if intersection(box, other) is not None:
                yield other, box
        active.append(box)


def _said(box: Box) -> str:
    return "[" + ", ".join(f"{b}:{e}" for b, e in zip(box.begin, box.end, strict=True)) + "]"
