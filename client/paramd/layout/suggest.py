"""Did you mean: names near one that does not exist, from a bounded number of candidates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from paramd.layout.globs import Glob, NameColumns

NEAR_COUNT = 40
"""Candidates that share the longest possible begin, and as many that share the end."""

KIND_COUNT = 80
SAMPLE_COUNT = 2000
"""Names looked at for kinds: from the begin, the end, and spread between."""

MAX_TEXT = 120
"""difflib costs the product of both lengths; nothing longer is compared."""

_NUMBER = re.compile(r"[0-9]+")


def did_you_mean(names: Sequence[str], columns: NameColumns, wanted: str) -> str:
    """The end of an error's sentence: near names, or how to see all of them."""
    if not names:
        return "; the layout holds no tensor"
    kinds = _kinds(names)
    if re.search(r"[*?\[]", wanted):
        candidates = list(kinds)
    else:
        candidates = [*_neighbours(names, columns, wanted), *kinds.values()]
    fitting = [name for name in dict.fromkeys(candidates) if len(name) <= MAX_TEXT]
    near = get_close_matches(wanted[:MAX_TEXT], fitting, n=3, cutoff=0.6)
    if not near:
        return f"; names look like {names[0]!r}, and '*' lists all {len(names)}"
    return "; did you mean " + " or ".join(map(repr, near)) + "?"


def _kinds(names: Sequence[str]) -> dict[str, str]:
    """Patterns for names that differ in numbers only, each with one name of its kind."""
    stride = max(1, len(names) // SAMPLE_COUNT)
    sample = [*names[:SAMPLE_COUNT], *names[-SAMPLE_COUNT:], *names[::stride]]
    kinds: dict[str, str] = {}
    for name in sample:
        kinds.setdefault(_NUMBER.sub("*", name), name)
        if len(kinds) == KIND_COUNT:
            break
    return kinds


def _neighbours(names: Sequence[str], columns: NameColumns, wanted: str) -> list[str]:
    """Names that share the longest possible begin with `wanted`, then the longest end."""
    found: list[str] = []
    for globs in (_begins_as, _ends_as):
        # Longer ends match fewer names, so the longest one is found by halving.
        low, high = 0, min(len(wanted), columns.longest)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if columns.match(globs(wanted, middle)) else (low, middle - 1)
            )
        if low:
            found.extend(
                names[at] for at in columns.first(columns.match(globs(wanted, low)), NEAR_COUNT)
            )
    return found


def _begins_as(wanted: str, size: int) -> Glob:
    return Glob(tuple(wanted[:size]), (*[False] * size, True))


def _ends_as(wanted: str, size: int) -> Glob:
    return Glob(tuple(wanted[len(wanted) - size :]), (True, *[False] * size))
