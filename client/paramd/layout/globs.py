"""Globs over many names at once, at a cost that no pattern can blow up.

Names are stored by column: for every position and character, one integer whose bit i
says that name i has it there. Matching advances all names together: for every position
and pattern token, one AND and one OR over all names. So a pattern costs at most
`longest name * tokens` such pairs, whatever it is: no backtracking exists. Tokens
beyond the longest name cannot match, which bounds the product for long patterns too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import compress, islice

_DIGITS = bytes.maketrans(b"01", b"\x00\x01")

NEAR_COUNT = 40
"""Candidates that share the longest possible begin, and as many that share the end."""

KIND_COUNT = 80
SAMPLE_COUNT = 2000
"""Names looked at for kinds: from the begin, the end, and spread between."""

MAX_TEXT = 120
"""difflib costs the product of both lengths; nothing longer is compared."""

_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class CharClass:
    """A set of characters: `[abc]`, `[a-z]`, negated `[!abc]`; `?` is the negated empty one."""

    singles: frozenset[str] = frozenset()
    ranges: tuple[tuple[str, str], ...] = ()
    negated: bool = False

    def __contains__(self, char: str) -> bool:
        found = char in self.singles or any(low <= char <= high for low, high in self.ranges)
        return found is not self.negated


ANY_CHAR = CharClass(negated=True)


@dataclass(frozen=True, slots=True)
class Glob:
    """A parsed pattern: one token for each character of the name that is not under a `*`.

    `stars[i]` says whether a `*` stands before token i; the last entry is the end's.
    """

    tokens: tuple[str | CharClass, ...]
    stars: tuple[bool, ...]

    @property
    def literal(self) -> str | None:
        """The only name that can match; None when there may be several."""
        if any(self.stars):
            return None
        chars = [token for token in self.tokens if isinstance(token, str)]
        return "".join(chars) if len(chars) == len(self.tokens) else None


def parse_glob(pattern: str) -> Glob:
    """Parses `*` (anything, dots too), `?`, `[abc]`, `[a-z]` and `[!abc]`, as fnmatch does.

    A `[` that is never closed stands for itself; so does `*` in `[*]`.
    """
    tokens: list[str | CharClass] = []
    stars = [False]
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "*":
            stars[-1] = True
            continue
        token: str | CharClass = char
        if char == "?":
            token = ANY_CHAR
        elif char == "[":
            # A "]" directly after "[" or "[!" belongs to the class.
            close = pattern.find("]", at + 1 + pattern.startswith("!", at))
            if close >= 0:
                token = _parse_class(pattern[at:close])
                at = close + 1
        tokens.append(token)
        stars.append(False)
    return Glob(tuple(tokens), tuple(stars))


def _parse_class(body: str) -> CharClass:
    negated = body.startswith("!")
    at = int(negated)
    singles: set[str] = set()
    ranges: list[tuple[str, str]] = []
    while at < len(body):
        if body.startswith("-", at + 1) and at + 2 < len(body):
            ranges.append((body[at], body[at + 2]))
            at += 3
        else:
            singles.add(body[at])
            at += 1
    return CharClass(frozenset(singles), tuple(ranges), negated)


class NameColumns:
    """Names in a form that globs can be matched against. Bit i of a mask is name i."""

    def __init__(self, names: Sequence[str]) -> None:
        self.count = len(names)
        self.all = (1 << self.count) - 1
        self.longest = max(map(len, names), default=0)
        self._alphabet = sorted(set().union(*names))
        self._columns: list[dict[str, int]] = []
        # The highest bit is written first.
        padding = _unused(self._alphabet)
        padded = [name.ljust(self.longest, padding) for name in reversed(names)]
        for column in zip(*padded, strict=True):
            self._columns.append(_masks("".join(column), padding))
        longer = [sum(column.values()) for column in self._columns]
        self._longer = [*longer, 0]
        self._ends = [a ^ b for a, b in zip([self.all, *longer], self._longer, strict=True)]

    def match(self, glob: Glob) -> int:
        """The mask of the names that match."""
        tokens, stars = glob.tokens, glob.stars
        total, longest = len(tokens), self.longest
        if total > longest or not self.count:
            return self._ends[0] if total == 0 and self.count else 0
        matcher = _TokenMasks(self._alphabet, self._columns, self._longer)
        # reached[i]: names whose characters so far can be what stands before token i.
        reached = [self.all] + [0] * total
        matched = 0
        for position in range(longest + 1):
            matched |= reached[total] & (self.all if stars[total] else self._ends[position])
            if position == longest or not any(reached):
                break
            # A token whose followers outnumber the characters left cannot finish.
            lowest = max(0, total - (longest - position))
            for i in range(min(total - 1, position), lowest - 1, -1):
                kept = reached[i + 1] if stars[i + 1] else 0
                if reached[i]:
                    kept |= reached[i] & matcher.mask(position, tokens[i])
                reached[i + 1] = kept
            if not stars[0]:
                reached[0] = 0
        return matched

    def positions(self, mask: int) -> list[int]:
        """The numbers of a mask's names, rising."""
        return list(compress(range(self.count), self.flags(mask)))

    def first(self, mask: int, count: int) -> list[int]:
        """As `positions`, but at most the first `count` of them."""
        return list(islice(compress(range(self.count), self.flags(mask)), count))

    def flags(self, mask: int) -> bytes:
        """One byte for each name: 1 when the mask has it, else 0."""
        return format(mask, f"0{self.count}b").encode().translate(_DIGITS)[::-1]


@dataclass(slots=True)
class _TokenMasks:
    """The names that a token fits at a position; remembers classes within one match."""

    alphabet: list[str]
    columns: list[dict[str, int]]
    longer: list[int]
    _fitting: dict[CharClass, frozenset[str]] = field(default_factory=dict)
    _masks: dict[tuple[int, frozenset[str]], int] = field(default_factory=dict)

    def mask(self, position: int, token: str | CharClass) -> int:
        if isinstance(token, str):
            return self.columns[position].get(token, 0)
        if token is ANY_CHAR:
            return self.longer[position]
        fitting = self._fitting.get(token)
        if fitting is None:
            fitting = frozenset(char for char in self.alphabet if char in token)
            self._fitting[token] = fitting
        mask = self._masks.get((position, fitting))
        if mask is None:
            mask = self._masks[position, fitting] = self._united(position, fitting)
        return mask

    def _united(self, position: int, fitting: frozenset[str]) -> int:
        column = self.columns[position]
        inside = [mask for char, mask in column.items() if char in fitting]
        if 2 * len(inside) <= len(column):
            return _union(inside)
        others = [mask for char, mask in column.items() if char not in fitting]
        return self.longer[position] ^ _union(others)


def _union(masks: list[int]) -> int:
    united = 0
    for mask in masks:
        united |= mask
    return united


def _unused(alphabet: list[str]) -> str:
    return next(char for char in map(chr, range(len(alphabet) + 1)) if char not in alphabet)


def _masks(column: str, padding: str) -> dict[str, int]:
    chars = set(column)
    zeros = dict.fromkeys(map(ord, chars), "0")
    return {
        char: int(column.translate({**zeros, ord(char): "1"}), 2)
        for char in sorted(chars - {padding})
    }


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
