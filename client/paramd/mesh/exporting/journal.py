"""A download's partial file, and what of it is known to be right: it survives a break.

Beside `model.safetensors` stand `.model.safetensors.part`, with all its room reserved, and
`.model.safetensors.journal`: one line of JSON that says which snapshot it is of, then one for
every range that was written, with its checksum. What a broken line or a wrong checksum speaks
of is read again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_128_hexdigest

from paramd.errors import ConflictError, ExhaustedError, ParamdError, UsageError

PART_BYTES: Final = 16 << 20
"""Longest range with a checksum of its own."""

Ranges = dict[tuple[int, int], str]
"""Checksums of half-open ranges of the file."""


class PartialFile:
    """A file on its way to `path`. Methods block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.parent / f".{path.name}.part"
        self._journal = path.parent / f".{path.name}.journal"
        self._file = -1
        self._lines: Any = None

    def check(self, *, replace: bool) -> None:
        """Refuses early what would be refused at the end.

        Raises:
            UsageError: no such directory. ConflictError: the name is taken.
        """
        if not self.path.parent.is_dir():
            raise UsageError(f"{self.path}: there is no directory {self.path.parent}; make it")
        if not replace and os.path.lexists(self.path):
            raise ConflictError(f"{self.path} exists; give another name, or --force to replace it")

    def found(self) -> tuple[Mapping[str, Any], Ranges] | None:
        """What an earlier try left: of which snapshot it is, and its ranges; None: nothing."""
        try:
            lines = self._journal.read_bytes().split(b"\n")
            about = json.loads(lines[0])
            ranges: Ranges = {}
            for line in lines[1:-1]:
                one = json.loads(line)
                ranges[int(one["begin"]), int(one["end"])] = str(one["xxh3"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (about, ranges) if isinstance(about, dict) and self._part.exists() else None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Holds the file open; two downloads to one name are kept apart.

        Raises:
            ConflictError: another process downloads to this name.
        """
        import fcntl

        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._part, flags, 0o666)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConflictError(
                    f"{self.path}: another process downloads to it; wait, or give another name"
                ) from None
            yield
        finally:
            if self._lines is not None:
                self._lines.close()
                self._lines = None
            os.close(self._file)
            self._file = -1

    def begin(self, about: Mapping[str, Any], size_bytes: int) -> None:
        """Begins anew, with room for the whole file.

        Raises:
            ExhaustedError: the disk has not the room.
        """
        self._close_lines()
        try:
            os.ftruncate(self._file, 0)
            os.posix_fallocate(self._file, 0, max(size_bytes, 1))
            os.ftruncate(self._file, size_bytes)
        except OSError as error:
            raise ExhaustedError(
                f"{self.path}: {size_bytes:,} bytes cannot be had there ({error.strerror}); free "
                "some or write elsewhere"
            ) from error
        self._lines = self._journal.open("wb", buffering=0)
        self._line(about)

    def go_on(self, about: Mapping[str, Any], ranges: Ranges) -> None:
        """Goes on with these ranges; the journal then has them and no others."""
        self._close_lines()
        self._lines = self._journal.open("wb", buffering=0)
        self._line(about)
        for (begin, end), checksum in ranges.items():
            self._line({"begin": begin, "end": end, "xxh3": checksum})

    def checked(self, ranges: Ranges, size_bytes: int) -> Ranges:
        """Those of `ranges` whose bytes in the file have that checksum."""
        if os.fstat(self._file).st_size != size_bytes:
            return {}
        return {
            (begin, end): checksum
            for (begin, end), checksum in ranges.items()
            if 0 <= begin < end <= size_bytes
            and xxh3_128_hexdigest(os.pread(self._file, end - begin, begin)) == checksum
        }

    def write(self, begin: int, data: memoryview) -> None:
        """Writes a range, and notes it part by part.

        Raises:
            ExhaustedError: the disk is full after all.
        """
        for at in range(begin, begin + len(data), PART_BYTES):
            part = data[at - begin : at - begin + PART_BYTES]
            try:
                _write_all(self._file, part, at)
            except OSError as error:
                raise ExhaustedError(f"{self.path}: {error.strerror}") from error
            end = at + len(part)
            self._line({"begin": at, "end": end, "xxh3": xxh3_128_hexdigest(part)})

    def publish(self, *, replace: bool) -> None:
        """Gives the file its name.

        Raises:
            ConflictError: the name was taken meanwhile.
        """
        os.fsync(self._file)
        if replace:
            os.replace(self._part, self.path)
        else:
            try:
                os.link(self._part, self.path)
            except FileExistsError:
                raise ConflictError(
                    f"{self.path} exists; give another name, or --force to replace it"
                ) from None
            except OSError:
                # A file system without hard links.
                if os.path.lexists(self.path):
                    raise ConflictError(f"{self.path} exists; give another name") from None
                os.rename(self._part, self.path)
        self.forget()
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def forget(self) -> None:
        """Removes what is beside. Idempotent."""
        for path in (self._part, self._journal):
            with suppress(FileNotFoundError):
                path.unlink()

    def _line(self, content: Mapping[str, Any]) -> None:
        if self._lines is None:
            raise ParamdError(f"{self.path}: the download has not begun")
        self._lines.write(json.dumps(dict(content), separators=(",", ":")).encode() + b"\n")

    def _close_lines(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done
