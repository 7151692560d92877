"""A download's partial file, and what of it is known to be right: it survives a break.

Beside `model.safetensors` stand `.model.safetensors.part`, with all its room reserved, and
`.model.safetensors.journal`: one line of JSON that says which snapshot it is of, then one for
every range that was written, with its checksum. What a broken line or a wrong checksum speaks
of is read again.

The directory may be one that others write too, such as /tmp. So both files are ours alone (mode
0600) until the whole file gets its name, and what another user put there, or links to elsewhere,
is refused: never followed, never finished.
"""

from __future__ import annotations

import json
import os
import stat
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
        self._file = self._lines = -1

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
            lines = _contents(self._lines).split(b"\n")
            about = json.loads(lines[0])
            ranges: Ranges = {}
            for line in lines[1:-1]:
                one = json.loads(line)
                ranges[int(one["begin"]), int(one["end"])] = str(one["xxh3"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (about, ranges) if isinstance(about, dict) else None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Holds the file open; two downloads to one name are kept apart.

        Raises:
            ConflictError: another process downloads to this name, or what stands beside it
                is not ours.
        """
        import fcntl

        self._file = _open_ours(self._part)
        try:
            self._lines = _open_ours(self._journal)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConflictError(
                    f"{self.path}: another process downloads to it; wait, or give another name"
                ) from None
            yield
        finally:
            for file in (self._file, self._lines):
                if file >= 0:
                    os.close(file)
            self._file = self._lines = -1

    def begin(self, about: Mapping[str, Any], size_bytes: int) -> None:
        """Begins anew, with room for the whole file.

        Raises:
            ExhaustedError: the disk has not the room.
        """
        try:
            os.ftruncate(self._file, 0)
            os.posix_fallocate(self._file, 0, max(size_bytes, 1))
            os.ftruncate(self._file, size_bytes)
        except OSError as error:
            raise ExhaustedError(
                f"{self.path}: {size_bytes:,} bytes cannot be had there ({error.strerror}); free "
                "some or write elsewhere"
            ) from error
        self._rewrite(about)

    def go_on(self, about: Mapping[str, Any], ranges: Ranges) -> None:
        """Goes on with these ranges; the journal then has them and no others."""
        self._rewrite(about)
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
            ConflictError: the name was taken meanwhile, or the partial file was replaced.
        """
        os.fchmod(self._file, 0o666 & ~_umask())
        os.fsync(self._file)
        if not os.path.samestat(os.lstat(self._part), os.fstat(self._file)):
            raise ConflictError(f"{self._part} was replaced by somebody else; begin again")
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
        if self._lines < 0:
            raise ParamdError(f"{self.path}: the download has not begun")
        os.write(self._lines, json.dumps(dict(content), separators=(",", ":")).encode() + b"\n")

    def _rewrite(self, about: Mapping[str, Any]) -> None:
        if self._lines < 0:
            raise ParamdError(f"{self.path}: the download has not begun")
        os.ftruncate(self._lines, 0)
        os.lseek(self._lines, 0, os.SEEK_SET)
        self._line(about)


def _open_ours(path: Path) -> int:
    """A file of ours, made when it is missing, to be read and written; nobody else's.

    Raises:
        ConflictError: a link, no plain file, or one that others own, can open or have linked.
    """
    # Not blocking: a FIFO would wait for somebody at its other end.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            file = os.open(path, flags)
    except OSError as error:
        raise ConflictError(
            f"{path} cannot be used: {error.strerror}; remove it, or give another name"
        ) from None
    found = os.fstat(file)
    ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    if not ours or found.st_mode & 0o077 or found.st_nlink != 1:
        os.close(file)
        raise ConflictError(
            f"{path} is not a file of this user alone (uid {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}, {found.st_nlink} links); remove it, or give "
            "another name"
        )
    return file


def _contents(file: int) -> bytes:
    """All of a file. The position moves to its end, where the next write goes."""
    os.lseek(file, 0, os.SEEK_SET)
    return b"".join(iter(lambda: os.read(file, 1 << 20), b""))


def _umask() -> int:
    """The mode bits that the user does not want; asking the system for it would change it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done
