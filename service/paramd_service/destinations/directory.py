"""Exports to a directory: written to a hidden sibling, synced, renamed.

Every name below the root is opened relative to its parent and never through a symbolic link, so
nothing outside the root can be reached, whoever else writes there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paramd import bounds
from paramd.answers import parsed_json, read_descriptor
from paramd.errors import (
    ConflictError,
    DataLossError,
    DeniedError,
    ExhaustedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
)
from paramd.v1.export_pb2 import ExportTarget
from paramd_service.admission import covers
from paramd_service.destinations.destinations import (
    MANIFEST,
    AtPoint,
    check_below,
    check_file_name,
    check_key,
    not_seen,
)

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a directory, and nothing else."""
NOREPLACE = 1
"""Flag of `rename`: fail if the target exists."""
EXCHANGE = 2
"""Flag of `rename`: swap source and target."""

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)
"""Errors that would tell a token for some jobs what lies at the keys of others."""

_SYNC_FILE_RANGE_WRITE = 2
_WRITEBACK_BYTES = 32 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def checked(name: str) -> str:
    """Check a file's name; return it. Raises UsageError. The format requires ".metadata"."""
    return name if name == ".metadata" else check_file_name(name)


@contextmanager
def opened_folder(parent: int, name: str) -> Iterator[int]:
    """A descriptor of the folder `name` of `parent`. Raises OSError."""
    folder = os.open(name, DIRECTORY, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


def open_file(folder: int, name: str) -> int:
    """Open a plain file in a folder for reading; return its descriptor. Raises OSError."""
    # Non-blocking: a FIFO of that name must not hang this process.
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)


@dataclass(frozen=True, slots=True)
class Stored:
    """What a folder's manifest says of the export in it."""

    export_id: str = ""
    """Empty: the folder holds no export."""
    job: str = ""
    names: frozenset[str] = frozenset()
    """Names of its files, the manifest included."""


def export_in(folder: int) -> Stored:
    """The export in an open folder."""
    try:
        file = open_file(folder, MANIFEST)
    except OSError:
        return Stored()
    try:
        found = parsed_json(read_descriptor(file, bounds.MANIFEST), bounds.MANIFEST)
        names = frozenset((MANIFEST, *(str(one["name"]) for one in found["files"])))
        return Stored(str(found["export_id"]), str(found.get("job", "")), names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Stored()
    finally:
        os.close(file)


def export_at(parent: int, folder_name: str) -> Stored:
    """The export in the folder of that name."""
    try:
        with opened_folder(parent, folder_name) as folder:
            return export_in(folder)
    except OSError:
        return Stored()


def export_of(path: Path) -> Stored:
    """The export in the folder at `path`."""
    try:
        folder = os.open(path, DIRECTORY)
    except OSError:
        return Stored()
    try:
        return export_in(folder)
    finally:
        os.close(folder)


def check_sizes(folder: int, sizes: Mapping[str, int]) -> None:
    """Raise DataLossError if a file does not have the size that was written."""
    for name, size_bytes in sizes.items():
        found = os.stat(checked(name), dir_fd=folder, follow_symlinks=False).st_size
        if found != size_bytes:
            raise DataLossError(f"{name} has {found:,} bytes; {size_bytes:,} were written")


def remove(parent: int, name: str) -> None:
    """Remove a directory of plain files, and any subdirectories."""
    try:
        folder = os.open(name, DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        return
    try:
        for inner in os.listdir(folder):
            try:
                os.unlink(inner, dir_fd=folder)
            except IsADirectoryError:
                remove(folder, inner)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=parent)


def rename(parent: int, source: str, target: str, flags: int) -> bool:
    """renameat2; False if the target exists or the file system does not support it."""
    done: int = _libc.renameat2(
        parent, os.fsencode(source), parent, os.fsencode(target), ctypes.c_uint(flags)
    )
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL, errno.ENOSYS, errno.ENOENT):
        return False
    raise OSError(number, os.strerror(number))


class DirectorySink:
    """A file, under a temporary name until it is complete."""

    def __init__(self, folder: int, name: str, target: ExportTarget) -> None:
        """Takes ownership of the descriptor `folder`; `target` is named in errors."""
        self._folder = folder
        self._name = name
        self._target = target
        self._part = f".{name}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._part, flags, 0o666, dir_fd=folder)
        self._written = 0
        self._begun = 0

    def write(self, data: memoryview) -> None:
        with explained(self._target):
            while data:
                written = os.write(self._file, data)
                self._written += written
                data = data[written:]
        if self._written - self._begun >= _WRITEBACK_BYTES:
            # Start writeback now, so that the final fsync is short.
            size = self._written - self._begun
            _libc.sync_file_range(self._file, self._begun, size, _SYNC_FILE_RANGE_WRITE)
            self._begun = self._written

    def finish(self) -> None:
        with explained(self._target):
            # Synced before the rename: the final name never stands for missing data.
            os.fsync(self._file)
            os.rename(self._part, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._close()

    def abort(self) -> None:
        if self._file < 0:
            return
        with suppress(FileNotFoundError):
            os.unlink(self._part, dir_fd=self._folder)
        self._close()

    def _close(self) -> None:
        os.close(self._file)
        os.close(self._folder)
        self._file = -1


class DirectorySource:
    """A file to read."""

    def __init__(self, descriptor: int) -> None:
        self._file = descriptor
        self.size_bytes = os.fstat(descriptor).st_size

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        return os.pread(self._file, size_bytes, offset_bytes)

    def close(self) -> None:
        os.close(self._file)


class DirectoryPlace:
    """One export at `<root>/<key>`."""

    def __init__(self, root: str, target: ExportTarget) -> None:
        self._root = root
        *self._parents, self._last = check_key(target.key)
        self._target = target
        self._hidden = f".{self._last}.{target.export_id}.part"

    def begin(self, size_bytes: int) -> None:
        check_below(self._target.key, self._target.jobs)
        with explained(self._target), self._parent(make=True) as parent:
            if not self._is_ours(parent):
                self._check_free(parent)
            found = os.fstatvfs(parent)
            free_bytes = found.f_bavail * found.f_frsize
            if free_bytes < size_bytes:
                need = f"{size_bytes:,} bytes needed, {free_bytes:,} free"
                why = f"{need}; free some space or export elsewhere"
                raise ExhaustedError(f"{self._target.destination}: {why}")
            with suppress(FileExistsError):
                os.mkdir(self._hidden, dir_fd=parent)
            os.close(os.open(self._hidden, DIRECTORY, dir_fd=parent))

    def create(self, name: str, size_bytes: int) -> DirectorySink:
        checked(name)
        with explained(self._target), self._parent() as parent:
            folder = os.open(self._folder(parent), DIRECTORY, dir_fd=parent)
            try:
                return DirectorySink(folder, name, self._target)
            except BaseException:
                os.close(folder)
                raise

    def open(self, name: str, *, finished: bool) -> DirectorySource:
        checked(name)
        with explained(self._target):
            if finished and self._target.jobs:
                return self._open_seen(name)
            with self._parent() as parent:
                at = self._last if finished else self._folder(parent)
                with opened_folder(parent, at) as folder:
                    return DirectorySource(open_file(folder, name))

    def commit(
        self, small: Mapping[str, bytes], sizes: Mapping[str, int], at_point: AtPoint
    ) -> None:
        with explained(self._target), self._parent() as parent:
            if self._is_ours(parent):
                return
            folder = os.open(self._hidden, DIRECTORY, dir_fd=parent)
            try:
                check_sizes(folder, sizes)
                for name, content in small.items():
                    sink = DirectorySink(os.dup(folder), checked(name), self._target)
                    sink.write(memoryview(content))
                    sink.finish()
                for name in os.listdir(folder):
                    if name not in sizes and name not in small:
                        os.unlink(name, dir_fd=folder)
                os.fsync(folder)
            finally:
                os.close(folder)
            at_point("export-marker")
            self._publish(parent)
            at_point("export-renamed")
            os.fsync(parent)

    def drop(self, names: Sequence[str], *, finished: bool) -> None:
        with explained(self._target), suppress(FileNotFoundError), self._parent() as parent:
            remove(parent, self._hidden)
            if finished and self._is_ours(parent):
                self._check_nothing_else(parent, self._last)
                # Hidden first, so that no reader finds a half-removed export.
                os.rename(self._last, self._hidden, src_dir_fd=parent, dst_dir_fd=parent)
                remove(parent, self._hidden)
            os.fsync(parent)

    def _publish(self, parent: int) -> None:
        if rename(parent, self._hidden, self._last, NOREPLACE):
            return
        self._check_free(parent)
        if rename(parent, self._hidden, self._last, EXCHANGE):
            try:
                # Another writer may have replaced what was checked before the exchange.
                self._check_replaceable(parent, self._hidden)
            except ConflictError:
                rename(parent, self._hidden, self._last, EXCHANGE)
                raise
            remove(parent, self._hidden)  # the replaced export
            return
        # This file system has no RENAME_EXCHANGE: for a moment the key is empty.
        old = f".{self._last}.{secrets.token_hex(4)}.old"
        with suppress(FileNotFoundError):
            os.rename(self._last, old, src_dir_fd=parent, dst_dir_fd=parent)
            try:
                self._check_replaceable(parent, old)
            except ConflictError:
                os.rename(old, self._last, src_dir_fd=parent, dst_dir_fd=parent)
                raise
        os.rename(self._hidden, self._last, src_dir_fd=parent, dst_dir_fd=parent)
        remove(parent, old)

    def _check_free(self, parent: int) -> None:
        try:
            os.stat(self._last, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return
        where = f"{self._target.destination}/{self._target.key} exists"
        if not self._target.overwrite:
            raise ConflictError(f"{where}; choose another key, or overwrite=True")
        self._check_replaceable(parent, self._last)

    def _check_replaceable(self, parent: int, name: str) -> None:
        """Raise ConflictError unless the folder `name` is an export that may be replaced."""
        found = export_at(parent, name)
        if not found.export_id or not covers(self._target.jobs, found.job):
            raise not_replaced(self._target)
        self._check_nothing_else(parent, name)

    def _check_nothing_else(self, parent: int, name: str) -> None:
        """Raise ConflictError if more lies in the folder `name` than files of the export there."""
        with opened_folder(parent, name) as folder:
            others = set(os.listdir(folder)) - export_in(folder).names
        if others:
            where = f"{self._target.destination}/{self._target.key} also holds {min(others)!r}"
            why = "which is not of the paramd export there, so nothing is replaced or removed"
            raise ConflictError(f"{where}, {why}; move it or choose another key")

    def _open_seen(self, name: str) -> DirectorySource:
        """Open a file of the finished export if that is of a job that the caller sees. Raises
        NotFoundError for everything else, with one text."""
        try:
            with self._parent() as parent, opened_folder(parent, self._last) as folder:
                # In one open folder: the export is the one whose manifest was read.
                found = export_in(folder)
                seen = bool(found.export_id) and covers(self._target.jobs, found.job)
                if seen and name in found.names:
                    return DirectorySource(open_file(folder, name))
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
        except ConflictError:
            pass  # the key lies within an export of another job
        raise not_seen(f"{self._target.destination}/{self._target.key}")

    def _is_ours(self, parent: int) -> bool:
        """Whether this very export is already at the key."""
        return export_at(parent, self._last).export_id == self._target.export_id

    def _folder(self, parent: int) -> str:
        """Where its files are: at the key if a control plane died after it was published."""
        return self._last if self._is_ours(parent) else self._hidden

    @contextmanager
    def _parent(self, *, make: bool = False) -> Iterator[int]:
        """Open the directory that holds the key's last segment."""
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in self._parents:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folder)
                above = export_at(folder, name) if self._target.jobs else Stored()
                if above.export_id and not covers(self._target.jobs, above.job):
                    raise not_replaced(self._target)
                inner = os.open(name, DIRECTORY, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)


def not_replaced(target: ExportTarget) -> ConflictError:
    """The error for something at the key that is no export, or none that may be replaced."""
    what = f"an export of your jobs ({target.jobs})" if target.jobs else "a paramd export"
    return ConflictError(
        f"{target.destination}/{target.key} exists and is not {what}, so it is not replaced; "
        "choose another key"
    )


@contextmanager
def explained(target: ExportTarget) -> Iterator[None]:
    """Translate errors of the operating system for an export."""
    try:
        yield
    except ParamdError:
        raise
    except OSError as error:
        raise _meaning(error, target) from error


def _meaning(error: OSError, target: ExportTarget) -> ParamdError:
    where = f"{target.destination}/{target.key}"
    text = f"{where}: {os.strerror(error.errno) if error.errno else error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ExhaustedError(f"{text}; free some space there or export elsewhere")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DeniedError(f"{text}; the sidecar's user must be able to write there")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return DeniedError(f"{where}: a part of the path is a file or a symbolic link")
    if error.errno == errno.ENOENT:
        return NotFoundError(
            f"{text}: the destination or the export does not exist; is the directory shared by "
            "all hosts of the job?"
        )
    return UnreachableError(text)
