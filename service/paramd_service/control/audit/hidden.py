"""Arguments that may be secret: the audit has their digest only, under a key of its own."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY_BYTES = 32
KEY_FILE = "audit.key"


@dataclass(frozen=True, slots=True)
class Hidden:
    """A value that must not stand in the audit as it is. Equal values have equal digests."""

    value: bytes | str = field(repr=False)


def load_key(directory: Path) -> bytes:
    """The key of the digests, made when it is missing. Raises OSError."""
    path = directory / KEY_FILE
    if not path.exists():
        _offer_key(path)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} does not hold {KEY_BYTES} bytes; remove it")
    return key


def _offer_key(path: Path) -> None:
    """Makes a key, whole before it has its name; who comes second takes the first one's."""
    descriptor, written = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(written, path)
    finally:
        os.unlink(written)


def shown(value: Any, key: bytes) -> Any:
    """`value` with every `Hidden` in it replaced by its HMAC-SHA256."""
    if isinstance(value, Hidden):
        data = value.value.encode() if isinstance(value.value, str) else value.value
        return {"hmac_sha256": hmac.new(key, data, hashlib.sha256).hexdigest()}
    if isinstance(value, Mapping):
        return {str(name): shown(found, key) for name, found in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(found, key) for found in value]
    return value
