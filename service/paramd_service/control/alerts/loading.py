"""Reads the alert config: [alerts] of paramd.toml, and PARAMD_ALERTS over it."""

from __future__ import annotations

import json
import logging
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from paramd.cli.settings import file_places
from paramd.errors import UsageError
from paramd_service.control.alerts.config import AlertConfig
from paramd_service.control.alerts.store import AlertStore
from paramd_service.control.alerts.watchers import Watchers
from paramd_service.control.watch import Publish

ENVIRONMENT = "PARAMD_ALERTS"
"""The table as JSON; its keys win over those of files."""

log = logging.getLogger("paramd.control.alerts")


def open_watchers(
    *,
    watch: bool,
    strict: bool,
    publish: Publish,
    store: AlertStore | None = None,
    expires_s: Callable[[], float | None] = lambda: None,
) -> Watchers:
    """The watchers of a control plane, with the config in force here and now.

    Args:
        watch: False never samples parameters.
        strict: Refuse to begin with a config that cannot be right. A training's embedded
            control plane is not strict: it says so, and goes on with the defaults.
        store: Keeps alerts and history; None keeps alerts in memory alone.
        expires_s: When the control plane's certificate does; None without TLS.

    Raises:
        UsageError: the config cannot be right, and `strict`.
    """
    try:
        config = load_alerts(file_places(), os.environ, watch=watch)
    except UsageError as error:
        if strict:
            raise
        log.error("alerts go on with their defaults: %s", error)
        config = AlertConfig()
    return Watchers(config, publish=publish, store=store, expires_s=expires_s)


def parse_alerts(table: Mapping[str, Any], *, place: str, trusted: bool = True) -> dict[str, Any]:
    """The fields of AlertConfig that a table sets, types checked.

    Args:
        place: Where the table stands, for errors.
        trusted: False for a file that may have come with somebody else's project: it may
            set thresholds, but not have alerts sent anywhere.

    Raises:
        UsageError: an unknown key or a value of another type.
    """
    kinds = {field.name: field for field in fields(AlertConfig)}
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in kinds:
            raise UsageError(f"{place}: unknown key {key!r}; expected some of {', '.join(kinds)}")
        if key == "webhooks" and not trusted:
            raise UsageError(
                f"{place}: webhooks in the working directory are not followed; set them in the "
                f"user's own paramd.toml or in {ENVIRONMENT}"
            )
        found[key] = _value(place, key, value, kinds[key].default)
    return found


def _value(place: str, key: str, value: Any, default: Any) -> Any:
    if isinstance(default, tuple):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise UsageError(f"{place}: {key} is not a list of strings")
    if isinstance(default, bool) or isinstance(value, bool):
        good = isinstance(value, bool) and isinstance(default, bool)
    elif isinstance(default, int):
        good = isinstance(value, int)
    else:
        good = isinstance(value, int | float)
    if not good:
        raise UsageError(f"{place}: {key} is {value!r}; expected {type(default).__name__}")
    return value


def load_alerts(
    files: Sequence[tuple[Path, bool]], environment: Mapping[str, str], *, watch: bool
) -> AlertConfig:
    """The config in force: the environment's JSON over the files' [alerts], first file first.

    Args:
        files: paramd.toml files and whether each is the user's own.
        watch: False switches sampling off whatever is configured.

    Raises:
        UsageError: something cannot be read or is out of range.
    """
    merged: dict[str, Any] = {}
    for path, trusted in reversed(files):
        merged |= parse_alerts(_table_of(path), place=f"{path}: [alerts]", trusted=trusted)
    text = environment.get(ENVIRONMENT)
    if text:
        try:
            table = json.loads(text)
        except (ValueError, RecursionError):
            raise UsageError(f"{ENVIRONMENT}: expected a JSON object") from None
        if not isinstance(table, dict):
            raise UsageError(f"{ENVIRONMENT}: expected a JSON object")
        merged |= parse_alerts(table, place=ENVIRONMENT)
    if not watch:
        merged["watch"] = False
    return AlertConfig(**merged)


def _table_of(path: Path) -> Mapping[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    table = found.get("alerts", {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: alerts is not a table; write [alerts]")
    return table
