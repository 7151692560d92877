"""Small files that are copied beside an export: kept on disk until it has ended."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from paramd import clock
from paramd.errors import ConflictError, ExhaustedError, NotFoundError, UnreachableError, UsageError
from paramd.layout.exports.formats import FORMATS
from paramd_service.destinations.destinations import check_file_name
from paramd_service.shares import CALLER, Shares, Who

MAX_BYTES: Final = 64 << 20
"""Of all files of one owner."""
MAX_FILES: Final = 64
MAX_OWNERS: Final = 64
UNOWNED_S: Final = 3600.0
"""Files that no export or schedule has claimed by then are removed."""

_RESERVED: Final = (".partial", *(end for one in FORMATS.values() for end in one.endings))


class Assets:
    """Files by owner, in a directory of the control plane. Methods do I/O: run them beside."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / "export-assets"
        self._whose: dict[str, Who] = {}

    def put(self, owner: str, name: str, offset_bytes: int, data: str) -> int:
        """Writes one part, in order; the file's size. The same part may come again.

        Raises:
            UsageError: no plain name, no base64. ConflictError: a part is missing before it.
            ExhaustedError: too many files, bytes or owners. UnreachableError: no disk.
        """
        check_asset_name(name)
        try:
            part = base64.b64decode(data, validate=True)
        except ValueError:  # not ASCII either
            raise UsageError("data: no base64") from None
        try:
            return self._put(self._root / owner, name, offset_bytes, part)
        except OSError as error:
            raise UnreachableError(
                f"assets: the control plane cannot keep {name!r} ({error.strerror})"
            ) from error

    def _put(self, folder: Path, name: str, offset_bytes: int, part: bytes) -> int:
        if not folder.exists():
            self._make_room()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._whose[folder.name] = CALLER.get()
        path = folder / name
        others = [other for other in folder.iterdir() if other != path]
        size_bytes = sum(other.stat().st_size for other in others) + offset_bytes + len(part)
        if len(others) >= MAX_FILES or size_bytes > MAX_BYTES:
            raise ExhaustedError(
                f"assets: at most {MAX_FILES} files of {MAX_BYTES:,} bytes in all are copied "
                "beside an export; put larger ones there by other means"
            )
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            found_bytes = file.seek(0, os.SEEK_END)
            if found_bytes < offset_bytes:
                raise ConflictError(
                    f"{name}: {found_bytes} bytes are here, the part begins at {offset_bytes}; "
                    "send it from there"
                )
            file.seek(offset_bytes)
            file.write(part)
            file.truncate()
        return offset_bytes + len(part)

    def read(self, owner: str, names: Iterable[str]) -> dict[str, bytes]:
        """The files of an owner. Raises NotFoundError when one was never sent."""
        found = {}
        for name in names:
            path = self._root / owner / check_asset_name(name)
            try:
                found[name] = path.read_bytes()
            except FileNotFoundError:
                raise NotFoundError(
                    f"assets: {name!r} was not sent; send it with store_export_asset first"
                ) from None
        return found

    def forget(self, owner: str) -> None:
        """Removes the files of an owner. Idempotent."""
        shutil.rmtree(self._root / owner, ignore_errors=True)

    def sweep(self, owners: Iterable[str]) -> None:
        """Removes what belongs to none of `owners` and is old."""
        kept = set(owners)
        if not self._root.exists():
            return
        for folder in self._root.iterdir():
            if folder.name not in kept and clock.now_s() - folder.stat().st_mtime > UNOWNED_S:
                shutil.rmtree(folder, ignore_errors=True)

    def _make_room(self) -> None:
        there = [one.name for one in self._root.iterdir()] if self._root.exists() else []
        self._whose = {name: self._whose.get(name) for name in there}
        shares = Shares(MAX_OWNERS, "exports that wait with assets")
        for holder in self._whose.values():
            shares.count(holder)
        shares.check(CALLER.get())


def check_asset_name(name: str) -> str:
    """A plain file name that no file of an export has. Raises UsageError."""
    check_file_name(name)
    if name.endswith(_RESERVED):
        raise UsageError(f"assets: {name!r} could be taken for a file of the export itself")
    return name
