"""What an export is asked to be: format, sizes, dtype, names. Pure, checked when made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paramd.errors import ConflictError, UsageError
from paramd.layout.dtypes import DTYPES
from paramd.layout.exports.formats import FORMATS

CAST_DTYPES = tuple(name for name, one in DTYPES.items() if one.exponent)
"""What an export can be cast to, and what is cast."""

DEFAULT_SHARD_BYTES = 5_000_000_000
MAX_NAME_RULES = 100_000
MAX_NAME_BYTES = 1024

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(?P<count>[0-9]{1,18}(?:\.[0-9]{1,6})?) ?(?P<unit>[A-Za-z]{0,3})")


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB" (decimal, as Hugging Face means it) or "2GiB".

    Raises:
        UsageError: it is none, or less than one byte.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found["unit"].upper()) if found is not None else None
    if found is None or unit is None:
        raise UsageError(f"{text[:40]!r} is no size; expected for example '5GB' or '2GiB'")
    whole, _, part = found["count"].partition(".")
    size_bytes = int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)
    if size_bytes < 1:
        raise UsageError(f"{text[:40]!r}: expected at least one byte")
    return size_bytes


@dataclass(frozen=True, slots=True)
class NameRule:
    """One renaming: an exact name, or one `*` (any characters, dots too) on both sides."""

    source: str
    target: str

    def __post_init__(self) -> None:
        sides = (self.source, self.target)
        if any(not 0 < len(side.encode()) <= MAX_NAME_BYTES for side in sides):
            raise UsageError(f"a name has 1 to {MAX_NAME_BYTES} bytes; {self.source[:80]!r} not")
        stars = self.source.count("*")
        if stars > 1 or stars != self.target.count("*"):
            raise UsageError(
                f"{self.source[:80]!r} -> {self.target[:80]!r}: expected no '*', or one on each "
                "side, as in 'old.*' -> 'new.*'"
            )

    def rename(self, name: str) -> str | None:
        """The new name, or None when the rule does not fit."""
        head, star, tail = self.source.partition("*")
        if not star:
            return self.target if name == self.source else None
        if len(name) < len(head) + len(tail):
            return None
        if not name.startswith(head) or not name.endswith(tail):
            return None
        return self.target.replace("*", name[len(head) : len(name) - len(tail)])


@dataclass(frozen=True, slots=True)
class NameMap:
    """Renaming of all names: exact names first, then patterns in their order."""

    rules: tuple[NameRule, ...] = ()

    @classmethod
    def of(cls, table: Mapping[str, str]) -> NameMap:
        """The map that a JSON object of the form {"old.*": "new.*"} describes.

        Raises:
            UsageError: not names to names, too many, or a malformed pattern.
        """
        if len(table) > MAX_NAME_RULES:
            raise UsageError(f"{len(table):,} names; expected at most {MAX_NAME_RULES:,}")
        for source, target in table.items():
            if not isinstance(source, str) or not isinstance(target, str):
                raise UsageError(f"{source!r}: {target!r}; expected a JSON object of names")
        return cls(tuple(NameRule(source, target) for source, target in table.items()))

    def apply(self, names: Iterable[str]) -> dict[str, str]:
        """The new name of each name.

        Raises:
            UsageError: a rule fits no name.
            ConflictError: two names would become one.
        """
        exact = {rule.source: rule for rule in self.rules if "*" not in rule.source}
        patterns = [rule for rule in self.rules if "*" in rule.source]
        used: set[str] = set()
        renamed: dict[str, str] = {}
        for name in names:
            candidates = [exact[name]] if name in exact else patterns
            for rule in candidates:
                target = rule.rename(name)
                if target is not None:
                    used.add(rule.source)
                    renamed[name] = target
                    break
            else:
                renamed[name] = name
        _check_used(self.rules, used)
        _check_distinct(renamed)
        return renamed


def _check_used(rules: Iterable[NameRule], used: set[str]) -> None:
    idle = [rule.source for rule in rules if rule.source not in used]
    if idle:
        raise UsageError(
            f"name rule {idle[0][:80]!r} fits no tensor that is exported; mend it or leave it out"
        )


def _check_distinct(renamed: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for name, target in renamed.items():
        other = first.setdefault(target, name)
        if other != name:
            raise ConflictError(
                f"{other!r} and {name!r} would both be named {target!r}; give them names apart"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What a user asks for."""

    format: str = "safetensors"
    """How files are laid out: one of `FORMATS`."""
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    """Most bytes of tensors in one file of safetensors, at least 1; a larger tensor has a file
    of its own. Files of dcp are one for each rank."""
    dtype: str | None = None
    """One of `CAST_DTYPES`, to which tensors of those dtypes are cast; None keeps each one's."""
    parameters: bool = True
    """Parameters are in it."""
    buffers: bool = True
    """Persistent buffers are in it."""
    keep_tied: bool = False
    """Tied tensors are written under each of their names. (In dcp they always have all names,
    which share the bytes.)"""
    names: NameMap = field(default_factory=NameMap)
    """Renaming."""
    writers: tuple[int, ...] = ()
    """Ranks whose sidecars may be given files; empty means all."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"format: {self.format!r}; expected one of {', '.join(FORMATS)}")
        if self.max_shard_bytes < 1:
            raise UsageError(f"max_shard_size: {self.max_shard_bytes}; expected at least one byte")
        if self.dtype is not None and self.dtype not in CAST_DTYPES:
            raise UsageError(
                f"dtype: {self.dtype!r}; an export can be cast to {', '.join(CAST_DTYPES)}"
            )
        if not self.parameters and not self.buffers:
            raise UsageError("include: expected parameters, buffers or both")

    def dtype_of(self, dtype: str) -> str:
        """The dtype in the files of a tensor of `dtype`."""
        return self.dtype if self.dtype is not None and dtype in CAST_DTYPES else dtype
