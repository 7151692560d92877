"""The table of a rank's optimizer state, as a snapshot of it has it.

    table    length of what follows, int64; then zlib-compressed UTF-8 JSON, of the form that
             `OptimizerState.facts` gives (optimizer_state.py)

Numbers JSON lacks (NaN, infinities) are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from paramd.errors import UsageError

TABLE_BYTES = 1 << 20
"""Room for a table."""

_LENGTH = struct.Struct("=q")
_MAX_TEXT_BYTES = 64 << 20


def table_text(table: Mapping[str, Any]) -> bytes:
    """The compressed JSON alone."""
    return zlib.compress(json.dumps(table, allow_nan=False).encode(), 1)


def pack_table(table: Mapping[str, Any]) -> bytes:
    """A table; one that is too long becomes one that says so."""
    data = table_text(table)
    if len(data) > TABLE_BYTES - _LENGTH.size:
        failure = f"its table takes {len(data):,} bytes, more than there is space for"
        data = table_text({**table, "keys": [], "params": [], "groups": [], "failure": failure})
    return _LENGTH.pack(len(data)) + data


def parse_table(memory: memoryview | bytes) -> dict[str, Any]:
    """Parse a table; bytes after it are ignored.

    Raises:
        UsageError: not a table.
    """
    inflater = zlib.decompressobj()
    try:
        (length,) = _LENGTH.unpack_from(memory, 0)
        if not 0 <= length <= TABLE_BYTES - _LENGTH.size:
            raise ValueError(f"it says that it has {length} bytes")
        end = _LENGTH.size + length
        found = json.loads(inflater.decompress(memory[_LENGTH.size : end], _MAX_TEXT_BYTES))
    except (struct.error, zlib.error, ValueError, RecursionError) as error:
        raise UsageError(f"the table of optimizer state cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UsageError("the table of optimizer state is no object")
    return found
