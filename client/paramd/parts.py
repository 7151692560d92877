"""How the parts of a process are found: its own by name, and those that installed packages add.

A package adds a part by an entry point in the group `paramd.parts`, whose name begins with the
process: `sidecar.NAME = "module:Class"`. With `PARAMD_TRACE_PARTS=1` each call of a part is logged
with the time that it took.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

GROUP: Final = "paramd.parts"
TRACE: Final = "PARAMD_TRACE_PARTS"

Part = TypeVar("Part")
Tell = Callable[[str, str, float], None]
"""Called with a part's name, a method and how long it took, in seconds."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A part that an installed package adds."""

    name: str
    """Of its entry point, without the process."""
    value: str
    """Where it is: "module:Class"."""
    package: str


def found(names: Iterable[str], process: str, base: type[Part]) -> list[type[Part]]:
    """The classes that are named as "module:Class", then those that installed packages add.

    Args:
        names: The process' own.
        process: What entry points of its parts begin with.
        base: What each of them derives from.

    Raises:
        TypeError: One is no such part.
    """
    added = [part.value for part in installed(process)]
    return [loaded(name, base) for name in (*names, *added)]


def installed(process: str) -> list[Installed]:
    """The parts of a process that installed packages add, by name. Imports none of them."""
    if not any(map(_may_add, sys.path)):
        return []
    # Here: importing it takes longer than to find that nothing was added.
    from importlib.metadata import entry_points

    parts = []
    for entry in entry_points(group=GROUP):
        of_process, _, name = entry.name.partition(".")
        if of_process == process:
            package = entry.dist.name if entry.dist is not None else entry.module
            parts.append(Installed(name, entry.value, package))
    return sorted(parts, key=lambda part: (part.name, part.package))


def _may_add(entry: str) -> bool:
    """Whether a package in an entry of `sys.path` may add parts, without parsing any metadata."""
    path = Path(entry)
    if not path.is_dir():
        # An archive has metadata, too.
        return path.is_file()
    header = f"[{GROUP}]".encode()
    return any(
        header in file.read_bytes()
        for kind in ("dist-info", "egg-info")
        for file in path.glob(f"*.{kind}/entry_points.txt")
    )


def loaded(name: str, base: type[Part]) -> type[Part]:
    """The class that is named as "module:Class".

    Raises:
        TypeError: It does not derive from `base`.
    """
    module, _, attribute = name.partition(":")
    part = vars(import_module(module)).get(attribute)
    if not (isinstance(part, type) and issubclass(part, base)):
        raise TypeError(f"{name} is no {base.__name__}, so it cannot be a part")
    return part


def traced(part: Part, base: type[Part], tell: Tell) -> Part:
    """The part itself. With `PARAMD_TRACE_PARTS=1`, `tell` is called after each call of a method
    that `base` has."""
    if os.environ.get(TRACE) == "1":
        name = str(getattr(part, "name", type(part).__name__))
        for method in vars(base):
            call = getattr(part, method)
            if not method.startswith("_") and callable(call):
                setattr(part, method, _timed(call, functools.partial(tell, name, method)))
    return part


def _timed(call: Callable[..., Any], tell: Callable[[float], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            tell(time.perf_counter() - began_s)

    @functools.wraps(call)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return await call(*args, **kwargs)
        finally:
            tell(time.perf_counter() - began_s)

    return awaited if inspect.iscoroutinefunction(call) else timed
