"""Views: what one piece holds of a wanted box, wherever the piece lies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from paramd.layout.regions import (
    boxes_of_interval,
    cover_numel,
    flat_interval,
    intersection,
    is_row_major,
    row_major,
)
from paramd.layout.types import Box, Interval, Region


@dataclass(frozen=True, slots=True)
class View:
    """A landing before it is known where its piece lies. Alike for the layers of a model."""

    offset_bytes: int
    """From the begin of the piece to the view's first element."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    target: Region
    size_bytes: int
    target_begin_bytes: int | None
    """None when the view is not direct."""


@lru_cache(maxsize=8192)
def views_of(
    held: Region, strides: tuple[int, ...] | None, shape: tuple[int, ...], wanted: Box, size: int
) -> tuple[View, ...]:
    """What a piece of `held` has of `wanted`; nothing when they share no element."""
    if isinstance(held, Box):
        steps = strides if strides is not None else row_major(held.sizes)
        return _box_views(held, steps, wanted, size, 0)
    if not wanted.numel:
        return ()
    run = flat_interval(wanted, shape)
    if run is not None:
        return _interval_views(held, run, size)
    views: list[View] = []
    offset_bytes = 0
    for box in boxes_of_interval(held, shape):
        views.extend(_box_views(box, row_major(box.sizes), wanted, size, offset_bytes))
        offset_bytes += box.numel * size
    return tuple(views)


def _interval_views(held: Interval, wanted: Interval, size: int) -> tuple[View, ...]:
    begin, end = max(held.begin, wanted.begin), min(held.end, wanted.end)
    if begin >= end:
        return ()
    view = View(
        offset_bytes=(begin - held.begin) * size,
        sizes=(end - begin,),
        strides=(1,),
        target=Interval(begin - wanted.begin, end - wanted.begin),
        size_bytes=(end - begin) * size,
        target_begin_bytes=(begin - wanted.begin) * size,
    )
    return (view,)


def _box_views(
    held: Box, strides: tuple[int, ...], wanted: Box, size: int, held_offset_bytes: int
) -> tuple[View, ...]:
    shared = intersection(held, wanted)
    if shared is None:
        return ()
    offset = sum((s - h) * st for s, h, st in zip(shared.begin, held.begin, strides, strict=True))
    target = Box(
        tuple(s - w for s, w in zip(shared.begin, wanted.begin, strict=True)),
        tuple(s - w for s, w in zip(shared.end, wanted.begin, strict=True)),
    )
    run = flat_interval(target, wanted.sizes) if is_row_major(target.sizes, strides) else None
    view = View(
        offset_bytes=held_offset_bytes + offset * size,
        sizes=target.sizes,
        strides=strides,
        target=target,
        size_bytes=cover_numel(target.sizes, strides) * size,
        target_begin_bytes=run.begin * size if run is not None else None,
    )
    return (view,)
