"""Tables on a terminal: which columns fit, and names made shorter where they are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

GAP = 2
"""Spaces between columns."""

LEAST = 24
"""Names are made shorter down to this, before a column is left out."""

Cut = Literal["", "middle", "end"]
"""How a column's texts may be made shorter: not at all (numbers), names, prose."""


def width_of(widths: Sequence[int]) -> int:
    """Of a line with columns of these widths."""
    return sum(widths) + GAP * max(len(widths) - 1, 0)


def least_of(widths: Sequence[int], cuts: Sequence[Cut], kept: Sequence[int]) -> int:
    """Of a line with these columns, names as short as they may be."""
    return width_of([min(widths[at], LEAST) if cuts[at] else widths[at] for at in kept])


def chosen(
    widths: Sequence[int], cuts: Sequence[Cut], drops: Sequence[int], width: int
) -> list[int]:
    """Indices of the columns to show in `width` characters.

    Args:
        drops: 0 for a column that stays; of the others the highest goes first.
    """
    kept = list(range(len(widths)))
    while least_of(widths, cuts, kept) > width:
        goes = max(kept, key=lambda at: (drops[at], at))
        if not drops[goes]:
            break
        kept.remove(goes)
    return kept


def cut_widths(widths: Sequence[int], cuts: Sequence[Cut], width: int) -> list[int]:
    """The widths after the widest cuttable columns gave up what is too much."""
    found = list(widths)
    while (over := width_of(found) - width) > 0:
        able = [at for at, cut in enumerate(cuts) if cut and found[at] > LEAST // 2]
        if not able:
            break
        widest = max(able, key=lambda at: found[at])
        second = max((found[at] for at in able if at != widest), default=0)
        found[widest] -= min(over, max(found[widest] - max(second, LEAST // 2), 1))
    return found


def shortened(texts: Sequence[str], width: int, cut: Cut) -> list[str]:
    """`texts` of at most `width` characters; wider where different names would become alike.

    Names lose what is in the middle: their end says which tensor it is. What all of them begin
    with goes first, because it distinguishes none.
    """
    if cut != "middle":
        return [text if len(text) <= width else text[: width - 1] + "…" for text in texts]
    different = len(set(texts))
    common = _common(texts)
    for wide in range(width, max(map(len, texts), default=0)):
        for begin in {common: None, 0: None} if common else {0: None}:
            found = [_middle(text, wide, begin) for text in texts]
            if len(set(found)) == different:
                return found
    return list(texts)


def _common(texts: Sequence[str]) -> int:
    """Length of the path that all long names begin with, up to a dot."""
    paths = [text for text in texts if "." in text]
    if len(paths) < 2:
        return 0
    low, high = min(paths), max(paths)
    same = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low.rfind(".", 0, same) + 1


def _middle(text: str, width: int, begin: int) -> str:
    if len(text) <= width:
        return text
    rest = text[begin:]
    if begin and len(rest) < width:
        return "…" + rest
    head = (width - 1) // 3 if not begin else 0
    return text[:head] + "…" + text[len(text) - (width - 1 - head) :]
