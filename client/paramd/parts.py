"""How the parts of a process are found: its own by name, and those that installed packages add.

A package adds a part by an entry point in the group `paramd.parts`, whose name begins with the
process: `sidecar.NAME = "module:Class"`. With `PARAMD_TRACE_PARTS=1` each call of a part is logged
with the time that it took.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final, TypeVar

GROUP: Final = "paramd.parts"
TRACE: Final = "PARAMD_TRACE_PARTS"

Part = TypeVar("Part")
Tell = Callable[[str, str, float], None]
"""Called with a part's name, a method and how long it took, in seconds."""


def found(names: Iterable[str], process: str, base: type[Part]) -> list[type[Part]]:
    """The classes that are named as "module:Class", then those that installed packages add.

    Args:
        names: The process' own.
        process: What entry points of its parts begin with.
        base: What each of them derives from.

    Raises:
        TypeError: One is no such part.
    """
    return [_loaded(name, base) for name in (*names, *_installed(process))]


def _installed(process: str) -> Iterator[str]:
    for entry in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        if entry.name.startswith(f"{process}."):
            yield entry.value


def _loaded(name: str, base: type[Part]) -> type[Part]:
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
