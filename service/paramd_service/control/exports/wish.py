"""What an export is asked to be: of a request, checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paramd.layout.export_settings import ExportFormat, ExportSettings, NameMap, parse_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """One request, read."""

    settings: ExportSettings
    optimizer: bool
    """Whether the optimizer's state is wanted."""
    overwrite: bool
    verify: bool
    timeout_s: float
    assets: tuple[str, ...]
    """Names of files that are copied beside."""


def read_wish(request: Mapping[str, Any]) -> Wish:
    """What a request (as `ExportRequest` has it) asks for.

    Raises:
        UsageError: a size, dtype or name rule that cannot be.
    """
    include = set(request["include"])
    return Wish(
        settings=ExportSettings(
            format=ExportFormat(request["format"]),
            max_shard_bytes=parse_size(str(request["max_shard_size"])),
            dtype=request["dtype"],
            parameters="parameters" in include,
            buffers="buffers" in include,
            keep_tied=request["tied"] == "keep",
            names=NameMap.of(request["name_map"]),
        ),
        optimizer="optimizer" in include,
        overwrite=bool(request.get("overwrite", False)),
        verify=bool(request["verify"]),
        timeout_s=float(request["timeout_s"]),
        assets=tuple(request["assets"]),
    )


def named_at(destination: str, *, epoch: int, step: int) -> str:
    """A destination whose key has "{step}" or "{epoch}" in it, once they are known."""
    return destination.replace("{step}", str(step)).replace("{epoch}", str(epoch))


def scheduled(destination: str) -> str:
    """The destination of a schedule, whose exports each need a key of their own."""
    if "{step}" in destination:
        return destination
    return f"{destination.rstrip('/')}/step-{{step}}"
