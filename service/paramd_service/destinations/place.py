"""The seam between what is exported and where it goes. Everything here blocks: use threads.

A place belongs to one export at one key. It keeps nothing in memory that another process
would need: any sidecar may write, verify, finish or drop, also after another one died.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from paramd.errors import ParamdError

MANIFEST = "paramd-export.json"
"""Written last: an export without it is not one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where one export goes."""

    destination: str
    root: str
    options: Mapping[str, str]
    key: str
    export_id: str
    overwrite: bool


AtPoint: TypeAlias = Callable[[str], None]
"""Passes a named point of fault injection."""


class FileSink(Protocol):
    """One file under way. `write` in order; then `finish` or `abort`, which is idempotent."""

    def write(self, data: memoryview) -> None:
        """Takes the next bytes; they may be changed once it returns."""

    def finish(self) -> None:
        """Makes the file whole and durable under its name."""

    def abort(self) -> None:
        """Leaves nothing of it."""


class FileSource(Protocol):
    """One file to be read."""

    size_bytes: int

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Bytes from `offset_bytes` on; fewer only at the end."""

    def close(self) -> None:
        """Lets go of it."""


class Place(Protocol):
    """Where an export is put together and then seen."""

    def begin(self, size_bytes: int) -> None:
        """Makes ready, and refuses what could not end well."""

    def create(self, name: str, size_bytes: int) -> FileSink:
        """A file of the export under way."""

    def open(self, name: str, *, finished: bool) -> FileSource:
        """A file to read: of the export under way, or of what stands at the key."""

    def commit(
        self, small: Mapping[str, bytes], sizes: Mapping[str, int], at_point: AtPoint
    ) -> None:
        """Adds small files, the last of them last, and makes all visible. Idempotent.

        `sizes` names the files written before; anything else is removed. Passes the points
        export-marker, before the last step that can be seen, and export-renamed after it.
        """

    def drop(self, names: Sequence[str], *, finished: bool) -> None:
        """Removes what the export left, or the finished export. Idempotent."""

    def explain(self, error: BaseException) -> ParamdError:
        """What an error of a sink means."""
