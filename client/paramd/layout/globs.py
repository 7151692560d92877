"""Globs, and the names that they match.

Patterns come from users, so no pattern may be slow. Names are stored by column: for every
position and character, an integer whose bit i is set if name i has it there. A match advances
all names together, with one AND and one OR for every position and token: at most
`longest name * tokens` pairs, and no backtracking. A pattern with more tokens than the longest
name matches nothing, which bounds the product.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

_DIGITS = bytes.maketrans(b"01", b"\x00\x01")


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
    """A parsed pattern: one token per character of the name, except those that `*` matches.

    `stars[i]`: whether a `*` precedes token i; the last entry is for the end.
    """

    tokens: tuple[str | CharClass, ...]
    stars: tuple[bool, ...]

    @property
    def literal(self) -> str | None:
        """The only name that can match; None if several can."""
        if any(self.stars):
            return None
        chars = [token for token in self.tokens if isinstance(token, str)]
        return "".join(chars) if len(chars) == len(self.tokens) else None


def literal(name: str) -> str:
    """The glob that matches only `name`."""
    return re.sub(r"[*?\[]", r"[\g<0>]", name)


def parse_glob(pattern: str, *, classes: bool = True) -> Glob:
    """Parse `*` (anything, dots too), `?`, `[abc]`, `[a-z]` and `[!abc]`, as fnmatch does.

    An unclosed `[` is literal, and so is `*` in `[*]`; without `classes` every bracket is, but for
    `[*]`, `[?]` and `[[]`, which always quote.
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
        elif pattern[at - 1 : at + 2] in ("[*]", "[?]", "[[]"):
            token, at = pattern[at], at + 2
        elif char == "[" and classes:
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
    """Names by column, for matching globs. Bit i of a mask is name i."""

    def __init__(self, names: Sequence[str]) -> None:
        self.count = len(names)
        self.all = (1 << self.count) - 1
        self.longest = max(map(len, names), default=0)
        self._alphabet = sorted(set().union(*names))
        self._columns: list[dict[str, int]] = []
        # Reversed: the first digit of a binary literal is its highest bit.
        padding = _unused(self._alphabet)
        padded = [name.ljust(self.longest, padding) for name in reversed(names)]
        for column in zip(*padded, strict=True):
            self._columns.append(_masks("".join(column), padding))
        longer = [sum(column.values()) for column in self._columns]
        self._longer = [*longer, 0]
        self._ends = [a ^ b for a, b in zip([self.all, *longer], self._longer, strict=True)]

    def match(self, glob: Glob) -> int:
        tokens, stars = glob.tokens, glob.stars
        total, longest = len(tokens), self.longest
        if total > longest or not self.count:
            return self._ends[0] if total == 0 and self.count else 0
        matcher = _TokenMasks(self._alphabet, self._columns, self._longer)
        # reached[i]: names whose characters so far can match everything before token i.
        reached = [self.all] + [0] * total
        matched = 0
        for position in range(longest + 1):
            matched |= reached[total] & (self.all if stars[total] else self._ends[position])
            if position == longest or not any(reached):
                break
            # Skip tokens with more tokens after them than characters are left.
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
        """The indices of a mask's names, ascending."""
        return list(compress(range(self.count), self.flags(mask)))

    def flags(self, mask: int) -> bytes:
        """One byte per name: 1 if it is in the mask, else 0."""
        return format(mask, f"0{self.count}b").encode().translate(_DIGITS)[::-1]


@dataclass(slots=True)
class _TokenMasks:
    """The names that a token matches at a position; caches character classes for one match."""

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
