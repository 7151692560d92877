"""Layout of optimizer state in the moments memory, and the table behind it.

trainer/boundary/moments.py documents its contents. The trainer writes it when it mirrors its state;
where the state lies in the optimizer memory, the sidecar does both (sidecar/snapshots/moments.py).
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from paramd.errors import UsageError
from paramd.memory.descriptors import SparseMemory, pages
from paramd.memory.handover import MOMENT_ROOMS, ROOM_EXTRA_BYTES

TABLE_BYTES = ROOM_EXTRA_BYTES
"""Room for the table."""

_LENGTH = struct.Struct("=q")
_MAX_TEXT_BYTES = 64 << 20


def room_begin(number: int, arena_bytes: int) -> int:
    """First byte of a room."""
    return number * pages(arena_bytes)


def table_begin(arena_bytes: int) -> int:
    """First byte of the table."""
    return room_begin(MOMENT_ROOMS, arena_bytes)


def table_size(memory: memoryview) -> int:
    """Size of the table that begins at the first byte of `memory`."""
    if memory.nbytes < _LENGTH.size:
        raise UsageError(f"{memory.nbytes} bytes are no table of optimizer state")
    (length,) = _LENGTH.unpack_from(memory, 0)
    if not 0 <= length <= TABLE_BYTES - _LENGTH.size:
        raise UsageError(f"the table of optimizer state says that it has {length} bytes")
    return _LENGTH.size + int(length)


def write_table(memory: SparseMemory, arena_bytes: int, table: dict[str, Any]) -> None:
    """Write a table behind the rooms; one that is too long becomes one that says so.

    Raises:
        ExhaustedError: no memory for it.
    """
    data = _packed(table)
    if len(data) > TABLE_BYTES - _LENGTH.size:
        failure = f"its table takes {len(data):,} bytes, more than there is space for"
        data = _packed({**table, "keys": [], "params": [], "groups": [], "failure": failure})
    begin, end = table_begin(arena_bytes), table_begin(arena_bytes) + _LENGTH.size + len(data)
    memory.reserve(begin, pages(end))
    _LENGTH.pack_into(memory.buffer, begin, len(data))
    memory.buffer[begin + _LENGTH.size : end] = data


def _packed(table: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(table, allow_nan=False).encode(), 1)


def parse_table(memory: memoryview | bytes) -> dict[str, Any]:
    """Parse a table; bytes after it are ignored.

    Raises:
        UsageError: not a table.
    """
    size = table_size(memoryview(memory))
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(memory[_LENGTH.size : size], _MAX_TEXT_BYTES)
        found = json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise UsageError(f"the table of optimizer state cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UsageError("the table of optimizer state is no object")
    return found
