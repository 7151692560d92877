"""The interface between exports and where they go. Everything here blocks: use threads.

A place belongs to one export at one key. It keeps no state in memory that another process would
need: any sidecar may write, verify, finish or drop, even after another one died.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from paramd.errors import ParamdError

MANIFEST = "paramd-export.json"
"""Written last: an export without it is not one."""


AtPoint: TypeAlias = Callable[[str], None]
"""Passes a named fault injection point."""


class FileSink(Protocol):
    """A file being written. `write` in order; then `finish` or `abort`, which is idempotent."""

    def write(self, data: memoryview) -> None:
        """Write the next bytes; their memory may be reused once it returns."""

    def finish(self) -> None:
        """Make the file complete and durable under its name."""

    def abort(self) -> None:
        """Remove what was written."""


class FileSource(Protocol):
    """A file to read."""

    size_bytes: int

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Bytes from `offset_bytes` on; fewer only at the end."""

    def close(self) -> None:
        """Close it."""


class Place(Protocol):
    """Where an export is assembled and then published."""

    def begin(self, size_bytes: int) -> None:
        """Prepare the place; refuse early what cannot succeed. Idempotent for the same export."""

    def create(self, name: str, size_bytes: int) -> FileSink:
        """Create a file of the export in progress."""

    def open(self, name: str, *, finished: bool) -> FileSource:
        """Open a file to read: of the export in progress, or of the finished one at the key."""

    def commit(
        self, small: Mapping[str, bytes], sizes: Mapping[str, int], at_point: AtPoint
    ) -> None:
        """Add small files, the last of them last, and publish everything. Idempotent.

        `sizes` names the files written before; anything else is removed. Passes the points
        export-marker, before the last visible step, and export-renamed after it.
        """

    def drop(self, names: Sequence[str], *, finished: bool) -> None:
        """Remove what the export left behind, or the finished export. Idempotent."""

    def explain(self, error: BaseException) -> ParamdError:
        """Translate an error of a sink."""
