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
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Final, ParamSpec, TypeVar

GROUP: Final = "paramd.parts"
TRACE: Final = "PARAMD_TRACE_PARTS"
_OURS = ("paramd", "paramd_service")

P = ParamSpec("P")
Part = TypeVar("Part")
Result = TypeVar("Result")
Tell = Callable[[str, str, float], None]
"""Called with a part's name, a method and how long it took, in seconds."""
TellFailed = Callable[[str, str, Exception], None]
"""Called with a part's name, what failed of it, and how."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A part that an installed package adds."""

    name: str
    """Of its entry point, without the process."""
    value: str
    """Where it is: "module:Class"."""
    package: str


def found(
    names: Iterable[str], process: str, base: type[Part], tell_failed: TellFailed | None = None
) -> list[type[Part]]:
    """The classes that are named as "module:Class", then those that installed packages add.

    Args:
        names: The process' own.
        process: What entry points of its parts begin with.
        base: What each of them derives from.
        tell_failed: Called for an installed part that cannot be loaded, which is left out; None:
            raise.

    Raises:
        TypeError: One is no such part.
    """
    classes = [loaded(name, base) for name in names]
    for part in installed(process):
        try:
            classes.append(loaded(part.value, base))
        # Whatever a package does as it is imported.
        except Exception as error:
            if tell_failed is None:
                raise
            tell_failed(part.name, "import", error)
    return classes


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
    if not os.path.isdir(entry):
        # An archive has metadata, too.
        return os.path.isfile(entry)
    header = f"[{GROUP}]".encode()
    with os.scandir(entry) as files:
        metadata = [file.path for file in files if file.name.endswith((".dist-info", ".egg-info"))]
    return any(header in _read(f"{folder}/entry_points.txt") for folder in metadata)


def _read(path: str) -> bytes:
    """A file's bytes; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


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


def made(
    kinds: Iterable[type[Part]],
    make: Callable[[type[Part]], Part],
    base: type[Part],
    *,
    tell: Tell,
    tell_failed: TellFailed,
) -> list[Part]:
    """Makes a part of each class, `guarded` and `traced`.

    A part of an installed package that cannot be made is reported and left out. Raises what `make`
    raises for a part of paramd's own.
    """
    parts = []
    for kind in kinds:
        try:
            part = make(kind)
        except Exception as error:
            if is_ours(kind):
                raise
            tell_failed(kind.__name__, "__init__", error)
        else:
            parts.append(traced(guarded(part, base, tell_failed), base, tell))
    return parts


def is_ours(kind: type[object]) -> bool:
    """Whether a part is of paramd itself, not of another package."""
    return kind.__module__.partition(".")[0] in _OURS


def guarded(part: Part, base: type[Part], tell_failed: TellFailed) -> Part:
    """The part itself. If a method of an installed part raises, the error is reported, and the
    method of `base` is called instead, which does nothing."""
    if is_ours(type(part)):
        return part
    name = str(getattr(part, "name", type(part).__name__))
    for method, of_base in vars(base).items():
        if not method.startswith("_") and callable(of_base):
            call, instead = getattr(part, method), functools.partial(of_base, part)
            tell = functools.partial(tell_failed, name, method)
            wrap = _guarded_coroutine if inspect.iscoroutinefunction(call) else _guarded
            setattr(part, method, wrap(call, instead, tell))
    return part


def _guarded(
    call: Callable[P, Result], instead: Callable[P, Result], tell: Callable[[Exception], None]
) -> Callable[P, Result]:
    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            tell(error)
            return instead(*args, **kwargs)

    return run


def _guarded_coroutine(
    call: Callable[P, Awaitable[Result]],
    instead: Callable[P, Awaitable[Result]],
    tell: Callable[[Exception], None],
) -> Callable[P, Awaitable[Result]]:
    @functools.wraps(call)
    async def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return await call(*args, **kwargs)
        except Exception as error:
            tell(error)
            return await instead(*args, **kwargs)

    return run


def traced(part: Part, base: type[Part], tell: Tell) -> Part:
    """The part itself. With `PARAMD_TRACE_PARTS=1`, `tell` is called after each call of a method
    that `base` has."""
    if os.environ.get(TRACE) == "1":
        name = str(getattr(part, "name", type(part).__name__))
        for method in vars(base):
            call = getattr(part, method)
            if not method.startswith("_") and callable(call):
                wrap = _timed_coroutine if inspect.iscoroutinefunction(call) else _timed
                setattr(part, method, wrap(call, functools.partial(tell, name, method)))
    return part


def _timed(call: Callable[P, Result], tell: Callable[[float], None]) -> Callable[P, Result]:
    @functools.wraps(call)
    def timed(*args: P.args, **kwargs: P.kwargs) -> Result:
        began_s = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            tell(time.perf_counter() - began_s)

    return timed


def _timed_coroutine(
    call: Callable[P, Awaitable[Result]], tell: Callable[[float], None]
) -> Callable[P, Awaitable[Result]]:
    @functools.wraps(call)
    async def timed(*args: P.args, **kwargs: P.kwargs) -> Result:
        began_s = time.perf_counter()
        try:
            return await call(*args, **kwargs)
        finally:
            tell(time.perf_counter() - began_s)

    return timed
