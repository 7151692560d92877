"""Slices of tensors in patterns, such as "w[0:4, -3:]"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paramd.errors import UsageError
from paramd.layout.types import Box

SUFFIX = re.compile(r"\[([^\[\]]*:[^\[\]]*)\]\Z")
"""What may be slices, at the end of a pattern."""

_DIM = re.compile(r"\s*([+-]?[0-9]{1,18})?\s*:\s*([+-]?[0-9]{1,18})?\s*(?::\s*(\+?0*1)?\s*)?\Z")


@dataclass(frozen=True, slots=True)
class Slices:
    """One slice for each of the first dims; the remaining dims are taken whole."""

    dims: tuple[tuple[int | None, int | None], ...]

    def box(self, shape: tuple[int, ...], name: str) -> Box:
        """The box selected from a tensor of `shape`; UsageError names `name` if none fits."""
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
    """Split a pattern into glob and slices; UsageError if brackets with ":" have no slices."""
    found = SUFFIX.search(pattern)
    if found is None:
        return pattern, None
    glob = pattern[: found.start()]
    if SUFFIX.search(glob):
        raise UsageError(f"pattern {pattern!r} has two slices; combine them, as in [0:4, 2:8]")
    return glob, parse_slices(found[1], pattern)


def parse_slices(text: str, pattern: str) -> Slices:
    """The slices within the brackets of a pattern; UsageError if they are none."""
    return Slices(tuple(_parse_dim(part, pattern) for part in text.split(",")))


def _parse_dim(text: str, pattern: str) -> tuple[int | None, int | None]:
    found = _DIM.match(text)
    if found is None:
        raise UsageError(
            f"{text.strip()!r} in pattern {pattern!r} is not a slice; expected begin:end with "
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
