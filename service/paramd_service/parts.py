"""The parts of each process, by name: a subject is in a process if it is in its list."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Final, TypeVar

Part = TypeVar("Part")

SIDECAR: Final = (
    "paramd_service.resume.sidecar:Resume",
    "paramd_service.edits.sidecar:RankEdits",
    "paramd_service.insight.sidecar:Insight",
    "paramd_service.hosts.sidecar:Hosts",
    "paramd_service.statistics.sidecar:Statistics",
    "paramd_service.follow.sidecar:Follow",
    "paramd_service.exports.sidecar:Exports",
    "paramd_service.gateway.sidecar:Gateway",
)
"""Parts of a sidecar, in the order in which they are told of a trainer."""


def loaded(names: Sequence[str], base: type[Part]) -> list[type[Part]]:
    """The classes that a list names, as "module:Class". Raises TypeError: one is no such part."""
    found: list[type[Part]] = []
    for name in names:
        module, _, attribute = name.partition(":")
        part = vars(import_module(module))[attribute]
        if not (isinstance(part, type) and issubclass(part, base)):
            raise TypeError(f"{name} is no {base.__name__}")
        found.append(part)
    return found
