"""Reads the destinations: [destinations] of paramd.toml, and PARAMD_DESTINATIONS over it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from paramd.errors import UsageError
from paramd.state_files import file_places
from paramd_service.control.base.config import table_of_file
from paramd_service.destinations.destinations import (
    ENVIRONMENT,
    Destination,
    destinations_of,
    parse_destinations,
)

log = logging.getLogger("paramd.control.exports")


def open_destinations(*, strict: bool) -> dict[str, Destination]:
    """The destinations in force here and now, by name.

    Args:
        strict: Refuse to begin with a table that cannot be right. A training's embedded
            control plane is not strict: it says so, and exports nowhere.

    Raises:
        UsageError: the table cannot be right, and `strict`.
    """
    try:
        return load_destinations(file_places(), os.environ)
    except UsageError as error:
        if strict:
            raise
        log.error("there are no destinations for exports: %s", error)
        return {}


def load_destinations(
    files: Sequence[tuple[Path, bool]], environment: Mapping[str, str]
) -> dict[str, Destination]:
    """What the environment says, over the user's own paramd.toml.

    Args:
        files: paramd.toml files and whether each is the user's own: one that may have come
            with somebody else's project names no places where checkpoints go.

    Raises:
        UsageError: something cannot be read, or is no destination.
    """
    found: dict[str, Destination] = {}
    for path, trusted in files:
        table = table_of_file(path, "destinations")
        if table and not trusted:
            raise UsageError(
                f"{path}: destinations in the working directory are not followed; set them in "
                f"the user's own paramd.toml or in {ENVIRONMENT}"
            )
        found |= parse_destinations(table)
    return found | destinations_of(environment.get(ENVIRONMENT, ""))
