"""The filter language of CLI and REST: globs, and terms that tensors must satisfy.

    layers.*.weight  numel>1M  dtype=bfloat16  norm>10

Words are separated by spaces. A word that begins with a key and a comparison is a term; all
terms must hold. Every other word is a glob over names, which may end in a slice; a tensor must
match any one of them, and no globs means all. Double quotes make any word a glob and may contain
spaces; inside them "" is one ".

    facts         name placement kind dtype           = != ~ (contains)
                  shape                               = != "4096x4096", "4096x*"; < > by its largest dim
                  numel dims rank                     = != < <= > >=
                  tied trainable                      = != true, false
    statistics    norm mean std min max absmax        = != < <= > >=
                  nan inf zero (counts of elements)

Numbers may end in k or K, M, G (powers of 1000). `dims` is the number of dims; `rank=3` holds when
rank 3 has a part. `trainable` is as of attach, and neither true nor false for buffers. A statistic that does not exist (the mean without any finite element)
satisfies no term.
"""  # noqa: E501

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from paramd.errors import UsageError
from paramd.layout.stats import STATISTICS, Summary

MAX_FILTER_BYTES: Final = 1024
MAX_WORDS: Final = 64

TEXT_KEYS: Final = ("name", "placement", "kind", "dtype")
COUNT_KEYS: Final = ("numel", "dims", "rank")
_STATISTICS: Final = {one.key: one.name for one in STATISTICS}
STATISTIC_KEYS: Final = (*_STATISTICS, "absmax")
FLAG_KEYS: Final = ("tied", "trainable")
KEYS: Final = (*TEXT_KEYS, "shape", *COUNT_KEYS, *FLAG_KEYS, *STATISTIC_KEYS)

_TERM = re.compile(r"([A-Za-z_]+)(!=|<=|>=|=|<|>|~)")
_SPACED = re.compile(
    r'("(?:[^"]|"")*")|(?<!\s)\s*(!=|<=|>=|=|<|>|~)\s*|(?<=[0-9*])\s+(x)\s+(?=[0-9*])'
)
"""Around comparisons, and in shapes; not in quotes."""
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')
_NUMBER = re.compile(
    r"([+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:e[+-]?[0-9]{1,3})?)"
    r"([kKMG]?)\Z"
)
_SHAPE = re.compile(r"(?:[0-9]{1,18}|\*)(?:x(?:[0-9]{1,18}|\*)){0,31}\Z")
_SCALE: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
_ORDER: Final[dict[str, Callable[[float, float], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_DTYPES: Final = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


class FilterError(UsageError):
    """A filter that does not parse; `position` is the offending character."""

    def __init__(self, position: int, found: str, expected: str) -> None:
        shown = repr(found if len(found) <= 40 else f"{found[:37]}...")
        super().__init__(f"filter: at character {position + 1}, {shown}: expected {expected}")
        self.position = position


class Tensor(Protocol):
    """Source of facts: an item of a layout, or of `mesh.params()`."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def placement(self) -> str: ...
    @property
    def numel(self) -> int: ...
    @property
    def trainable(self) -> bool | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a tensor without its values."""

    tensor: Tensor
    kind: str
    """parameter or buffer."""
    names: tuple[str, ...]
    """All its names; more than one when it is tied."""
    ranks: frozenset[int]
    """Ranks that hold a part."""


@dataclass(frozen=True, slots=True)
class Term:
    key: str
    comparison: str
    text: str
    """The value as written."""
    number: float = field(default=math.nan, compare=False)
    """The value as a number; NaN for texts, which is unequal to itself."""

    def __str__(self) -> str:
        return f"{self.key}{self.comparison}{self.text}"


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed filter. Immutable, hashable: equal filters select the same."""

    patterns: tuple[str, ...]
    """Globs; ("*",) when none was given."""
    facts: tuple[Term, ...]
    statistics: tuple[Term, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """Globs in quotes and terms, one by one, for `filter_of`."""
        globs = ('"' + glob.replace('"', '""') + '"' for glob in self.patterns)
        return (*globs, *map(str, self.facts), *map(str, self.statistics))

    def matches(self, facts: Facts) -> bool:
        """Whether all terms about facts hold."""
        return all(_fact(term, facts) for term in self.facts)

    def matches_numbers(self, numbers: Summary) -> bool:
        """Whether all terms about statistics hold."""
        return all(
            # Comparisons with a nonexistent number never hold, not even "!=".
            not math.isnan(value := statistic(term.key, numbers))
            and _ORDER[term.comparison](value, term.number)
            for term in self.statistics
        )


def parse_filter(text: str, beside: Iterable[str] = ()) -> Filter:
    """Parse a filter in linear time, with globs `beside` it as they are; FilterError says where it
    is invalid, and what fits there."""
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if size_bytes > MAX_FILTER_BYTES:
        raise FilterError(
            MAX_FILTER_BYTES, f"{size_bytes} bytes", f"at most {MAX_FILTER_BYTES} bytes"
        )
    patterns, terms = list(beside), list[Term]()
    words = _words(text)
    if len(words) > MAX_WORDS:
        raise FilterError(words[MAX_WORDS][0], words[MAX_WORDS][1], f"at most {MAX_WORDS} words")
    for position, word, quoted in words:
        found = None if quoted else _TERM.match(word)
        if found is None:
            patterns.append(word)
        else:
            value = word[found.end() :]
            terms.append(_term(found[1], found[2], value, position, position + found.end()))
    of_layout = tuple(term for term in terms if term.key not in STATISTIC_KEYS)
    of_values = tuple(term for term in terms if term.key in STATISTIC_KEYS)
    return Filter(tuple(patterns) if patterns else ("*",), of_layout, of_values)


def filter_of(patterns: Iterable[str]) -> Filter:
    """The filter of patterns given one by one: one that begins with a term is read as a filter,
    in which spaces may stand around comparisons; all else is a glob, in quotes or not."""
    filters: list[str] = []
    globs: list[str] = []
    for pattern in patterns:
        text = _SPACED.sub(lambda one: one[one.lastindex or 0], pattern.strip())
        found, quoted = _TERM.match(text), _QUOTED.fullmatch(pattern)
        if found and found[1] in KEYS:
            filters.append(text)
        else:
            globs.append(quoted[1].replace('""', '"') if quoted else pattern)
    return parse_filter(" ".join(filters), globs)


def _words(text: str) -> list[tuple[int, str, bool]]:
    """(position, word, whether quoted). Spaces in brackets belong to a slice."""
    words: list[tuple[int, str, bool]] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text[at] == '"':
            quoted = _QUOTED.match(text, at)
            if quoted is None:
                raise FilterError(at, text[at:], 'a closing "')
            if not quoted[1]:
                raise FilterError(at, '""', "a glob between the quotes")
            words.append((at, quoted[1].replace('""', '"'), True))
            at = quoted.end()
            if at < len(text) and not text[at].isspace():
                raise FilterError(at, text[at:], "a space after the quotes")
        else:
            end = _end_of_word(text, at)
            words.append((at, text[at:end], False))
            at = end
    return words


def _end_of_word(text: str, begin: int) -> int:
    opened = False
    for at in range(begin, len(text)):
        if text[at] == "[":
            # An unclosed bracket is an ordinary character.
            opened = "]" in text[at:]
        elif text[at] == "]":
            opened = False
        elif text[at].isspace() and not opened:
            return at
    return len(text)


def _term(key: str, comparison: str, value: str, position: int, value_at: int) -> Term:
    if key not in KEYS:
        raise FilterError(
            position, key, f'one of {", ".join(KEYS)} before {comparison!r} (or quotes: "...")'
        )
    if not value:
        raise FilterError(value_at, value, f"a value after {key}{comparison}, without a space")
    if key in TEXT_KEYS:
        _check(comparison, ("=", "!=", "~"), key, value_at)
        if key == "dtype" and comparison != "~":
            value = value.removeprefix("torch.")
            value = _DTYPES.get(value, value)
        return Term(key, comparison, value)
    if key in FLAG_KEYS:
        _check(comparison, ("=", "!="), key, value_at)
        if value not in ("true", "false"):
            raise FilterError(value_at, value, "true or false")
        return Term(key, comparison, value)
    _check(comparison, tuple(_ORDER), key, value_at)
    if key == "shape" and comparison in ("=", "!="):
        if value != "scalar" and _SHAPE.match(value) is None:
            raise FilterError(value_at, value, 'a shape such as "4096x4096", "4096x*" or "scalar"')
        return Term(key, comparison, value)
    found = _NUMBER.match(value)
    if found is None:
        raise FilterError(value_at, value, 'a number such as "10", "-1.5e-3" or "4M"')
    return Term(key, comparison, value, float(found[1]) * _SCALE[found[2]])


def _check(comparison: str, allowed: tuple[str, ...], key: str, at: int) -> None:
    if comparison not in allowed:
        raise FilterError(at - len(comparison), comparison, f"one of {' '.join(allowed)} for {key}")


def _fact(term: Term, facts: Facts) -> bool:
    tensor = facts.tensor
    if term.key == "shape":
        return _shape(term, tensor.shape)
    if term.key in FLAG_KEYS:
        flag = len(facts.names) > 1 if term.key == "tied" else tensor.trainable
        return (flag is (term.text == "true")) == (term.comparison == "=")
    if term.key == "rank":
        return _rank(term, facts.ranks)
    if term.key in COUNT_KEYS:
        counted = tensor.numel if term.key == "numel" else len(tensor.shape)
        return _ORDER[term.comparison](counted, term.number)
    texts = {
        "name": facts.names,
        "placement": (tensor.placement,),
        "kind": (facts.kind,),
        "dtype": (tensor.dtype,),
    }[term.key]
    if term.comparison == "~":
        return any(term.text.casefold() in text.casefold() for text in texts)
    return (term.text in texts) == (term.comparison == "=")


def _shape(term: Term, shape: tuple[int, ...]) -> bool:
    if not math.isnan(term.number):
        return _ORDER[term.comparison](max(shape, default=1), term.number)
    wanted = term.text.split("x") if term.text != "scalar" else []
    same = len(wanted) == len(shape) and all(
        w == "*" or int(w) == size for w, size in zip(wanted, shape, strict=True)
    )
    return same == (term.comparison == "=")


def _rank(term: Term, ranks: frozenset[int]) -> bool:
    if term.comparison == "!=":
        return all(rank != term.number for rank in ranks)
    return any(_ORDER[term.comparison](rank, term.number) for rank in ranks)


def statistic(key: str, numbers: Summary) -> float:
    """One of `STATISTIC_KEYS`; NaN where there is no finite element to have it of."""
    if key == "absmax":
        return max(abs(numbers.min), abs(numbers.max))
    return float(getattr(numbers, _STATISTICS[key]))
