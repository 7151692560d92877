"""Settings of an export: format, sizes, dtype, names. Pure, validated when constructed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paramd.errors import ConflictError, UsageError
from paramd.layout.dtypes import DTYPES
from paramd.layout.exports.dcp import DCP
from paramd.layout.exports.files import Format
from paramd.layout.exports.peft import PEFT
from paramd.layout.exports.safetensors import SAFETENSORS

FORMATS: Mapping[str, Format] = {one.name: one for one in (SAFETENSORS, DCP, PEFT)}
"""By name, the default first."""

CAST_DTYPES = tuple(name for name, one in DTYPES.items() if one.exponent)
"""Dtypes that an export can cast, from and to."""

DEFAULT_SHARD_BYTES = 5_000_000_000
MAX_NAME_RULES = 100_000
MAX_NAME_BYTES = 1024

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(?P<count>[0-9]{1,18}(?:\.[0-9]{1,6})?) ?(?P<unit>[A-Za-z]{0,3})")


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB" (decimal, as in Hugging Face) or "2GiB"; else UsageError."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found["unit"].upper()) if found is not None else None
    if found is None or unit is None:
        raise UsageError(f"{text[:40]!r} is not a size; expected for example '5GB' or '2GiB'")
    whole, _, part = found["count"].partition(".")
    size_bytes = int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)
    if size_bytes < 1:
        raise UsageError(f"{text[:40]!r}: expected at least one byte")
    return size_bytes


@dataclass(frozen=True, slots=True)
class NameRule:
    """One rename: a whole name, or one `*` (any characters, dots too) on both sides."""

    source: str
    target: str

    def __post_init__(self) -> None:
        sides = (self.source, self.target)
        if any(not 0 < len(side.encode()) <= MAX_NAME_BYTES for side in sides):
            raise UsageError(
                f"name rule {self.source[:80]!r}: names have 1 to {MAX_NAME_BYTES} bytes"
            )

    def check_pattern(self) -> None:
        """Raises UsageError for a rule that is no whole name's, if its sides do not fit."""
        stars = self.source.count("*")
        if stars > 1 or stars != self.target.count("*"):
            raise UsageError(
                f"{self.source[:80]!r} -> {self.target[:80]!r}: expected no '*', or one on each "
                "side, as in 'old.*' -> 'new.*'"
            )

    def rename(self, name: str) -> str | None:
        if name == self.source:
            return self.target
        head, star, tail = self.source.partition("*")
        fits = len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail)
        if not star or not fits:
            return None
        return self.target.replace("*", name[len(head) : len(name) - len(tail)])


@dataclass(frozen=True, slots=True)
class NameMap:
    """All renames: exact names first, then patterns in order."""

    rules: tuple[NameRule, ...] = ()

    @classmethod
    def of(cls, table: Mapping[str, str]) -> NameMap:
        """The map of a JSON object such as {"old.*": "new.*"}; UsageError if malformed."""
        if len(table) > MAX_NAME_RULES:
            raise UsageError(f"{len(table):,} names; expected at most {MAX_NAME_RULES:,}")
        for source, target in table.items():
            if not isinstance(source, str) or not isinstance(target, str):
                raise UsageError(f"{source!r}: {target!r}; expected a JSON object of names")
        return cls(tuple(NameRule(source, target) for source, target in table.items()))

    def apply(self, names: Iterable[str]) -> dict[str, str]:
        """The new name of each name; UsageError: an unused rule, ConflictError: duplicates."""
        names = list(names)
        exact = {rule.source: rule for rule in self.rules}
        exact = {name: exact[name] for name in names if name in exact}
        patterns = [rule for rule in self.rules if rule.source not in exact]
        for rule in patterns:
            rule.check_pattern()
        used: set[str] = set()
        renamed: dict[str, str] = {}
        for name in names:
            rules = [exact[name]] if name in exact else patterns
            for rule in rules:
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
            f"name rule {idle[0][:80]!r} matches no exported tensor; correct or remove it"
        )


def _check_distinct(renamed: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for name, target in renamed.items():
        other = first.setdefault(target, name)
        if other != name:
            raise ConflictError(
                f"{other!r} and {name!r} would both be named {target!r}; use different names"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """The content and the format of an export."""

    format: str = "safetensors"
    """One of `FORMATS`."""
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    """Most bytes of tensors in one safetensors file, at least 1; a larger tensor gets its own
    file. dcp has one file per rank."""
    dtype: str | None = None
    """One of `CAST_DTYPES`, to which tensors of those dtypes are cast; None casts nothing."""
    parameters: bool = True
    """Include parameters."""
    buffers: bool = True
    """Include persistent buffers."""
    patterns: tuple[str, ...] = ()
    """The tensors to write, as whole names or patterns of `select`; () all of them."""
    keep_tied: bool = False
    """Write tied tensors under each of their names. (dcp has all names, sharing the bytes.)"""
    names: NameMap = field(default_factory=NameMap)
    """Renames."""
    replica: int = 0
    """A rank of the replica that is read, where ranks hold the same."""
    adapter: str = ""
    """The adapter that is written or merged; empty: the model's only one."""
    merge: bool = False
    """Merge the adapter into its base, and write that."""
    weights_from: str = ""
    """A model that `attach` was given, or a kind of the optimizers' state, whose weights are
    written; empty: the parameters."""

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
        self._check_view()

    def _check_view(self) -> None:
        if self.format == PEFT.name:
            for given, what in (
                (self.merge, "merge"),
                (self.weights_from, "weights_from"),
                (self.patterns, "names"),
                (self.names.rules, "name_map"),
            ):
                if given:
                    raise UsageError(
                        f"{what}: an adapter is written whole, as PEFT writes it; leave it out, or "
                        f"use format {SAFETENSORS.name!r}"
                    )
        elif self.adapter and not self.merge:
            raise UsageError(
                f"adapter: {self.adapter!r}; it is for format {PEFT.name!r} and for merge"
            )
        if self.merge and (self.format != SAFETENSORS.name or self.weights_from):
            raise UsageError(
                f"merge: a merged model is written as {SAFETENSORS.name}, of the parameters"
            )

    def dtype_of(self, dtype: str) -> str:
        """The dtype that a tensor of `dtype` has in the files."""
        return self.dtype if self.dtype is not None and dtype in CAST_DTYPES else dtype
