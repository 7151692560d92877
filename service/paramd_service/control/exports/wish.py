"""What an export is asked to be: of a request, checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paramd.errors import UsageError
from paramd.layout.export_settings import ExportFormat, ExportSettings, NameMap, parse_size

STEP = "{step}"
"""Stands in a schedule's key for the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """One request, read."""

    destination: str
    """Name of the destination."""
    key: str
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
        UsageError: a size, dtype, name rule or destination that cannot be.
    """
    name, slash, key = str(request["destination"]).partition("/")
    if not slash or not name or not key:
        raise UsageError(
            f"destination: {request['destination']!r}; expected the name of a destination, '/', "
            "and a key, such as 'checkpoints/step-100'"
        )
    include = set(request["include"])
    return Wish(
        destination=name,
        key=key,
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


def at_step(destination: str, step: int) -> str:
    """The destination of a schedule's export: its key with the step."""
    if STEP in destination:
        return destination.replace(STEP, str(step))
    return f"{destination.rstrip('/')}/step-{step}"
