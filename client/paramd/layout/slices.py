"""Slices at the end of a pattern, such as "[0:4, :, -3:]"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paramd.errors import UsageError
from paramd.layout.types import Box

_SUFFIX = re.compile(r"\[([^\[\]]*:[^\[\]]*)\]\Z")
_DIM = re.compile(r"\s*([+-]?[0-9]{1,18})?\s*:\s*([+-]?[0-9]{1,18})?\s*(?::\s*(\+?0*1)?\s*)?\Z")


@dataclass(frozen=True, slots=True)
class Slices:
    """One slice for each of the first dims; the dims after them are taken whole."""

    dims: tuple[tuple[int | None, int | None], ...]

    def box(self, shape: tuple[int, ...], name: str) -> Box:
        """The part of a tensor of `shape` that is meant; `name` is for errors.

        Raises:
            UsageError: more slices than dims, or a bound beyond a dim's size.
        """
        if len(self.dims) > len(shape):
            raise UsageError(
                f"{name!r} has {len(shape)} dims, shape {list(shape)}, but the pattern slices "
                f"{len(self.dims)}; give at most {len(shape)} slices"
            )
        begins, ends = [0] * len(shape), list(shape)
        for dim, (begin, end) in enumerate(self.dims):
            size = shape[dim]
            begins[dim] = _bound(begin, 0, size, dim, name)
            ends[dim] = _bound(end, size, size, dim, name)
            if begins[dim] > ends[dim]:
                raise UsageError(
                    f"slice {_said(begin)}:{_said(end)} of dim {dim} of {name!r}, size {size}, "
                    "ends before it begins; put the smaller bound first"
                )
        return Box(tuple(begins), tuple(ends))


def split_slices(pattern: str) -> tuple[str, Slices | None]:
    """Takes the slices off a pattern's end: the glob, and the slices if there are any.

    Raises:
        UsageError: what stands between the last brackets holds a ":" but is no list of slices.
    """
    found = _SUFFIX.search(pattern)
    if found is None:
        return pattern, None
    glob = pattern[: found.start()]
    if _SUFFIX.search(glob):
        raise UsageError(f"pattern {pattern!r} has two slices; write one, such as [0:4, 2:8]")
    return glob, Slices(tuple(_parse_dim(part, pattern) for part in found[1].split(",")))


def _parse_dim(text: str, pattern: str) -> tuple[int | None, int | None]:
    found = _DIM.match(text)
    if found is None:
        raise UsageError(
            f"{text.strip()!r} in pattern {pattern!r} is no slice; expected begin:end with "
            "step 1, such as 0:4 or -3: (one row is written 2:3)"
        )
    return (
        int(found[1]) if found[1] is not None else None,
        int(found[2]) if found[2] is not None else None,
    )


def _bound(bound: int | None, default: int, size: int, dim: int, name: str) -> int:
    if bound is None:
        return default
    if not -size <= bound <= size:
        raise UsageError(
            f"bound {bound} is out of range for dim {dim} of {name!r}, which has size {size}; "
            f"expected {-size} to {size}"
        )
    return bound + size if bound < 0 else bound


def _said(bound: int | None) -> str:
    return "" if bound is None else str(bound)
