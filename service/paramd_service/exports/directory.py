"""Exports into a directory: written into a hidden one beside, synced, renamed.

Every name below the root is opened relative to its parent and never through a symbolic
link, so nothing outside of the root can be reached, whoever else writes there.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from paramd.errors import (
    ConflictError,
    DeniedError,
    ExhaustedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
)
from paramd_service.exports.destinations import check_key
from paramd_service.exports.directory_files import DirectorySink, DirectorySource
from paramd_service.exports.folders import (
    DIRECTORY,
    EXCHANGE,
    NOREPLACE,
    check_sizes,
    checked,
    export_id_at,
    open_file,
    remove,
    rename,
)
from paramd_service.exports.place import AtPoint, Target


class DirectoryPlace:
    """One export at `<root>/<key>`."""

    def __init__(self, root: str, target: Target) -> None:
        self._root = root
        *self._parents, self._last = check_key(target.key)
        self._target = target
        self._hidden = f".{self._last}.{target.export_id}.part"

    def begin(self, size_bytes: int) -> None:
        with self._explained(), self._parent(make=True) as parent:
            if not self._is_ours(parent):
                self._check_free(parent)
            found = os.fstatvfs(parent)
            free_bytes = found.f_bavail * found.f_frsize
            if free_bytes < size_bytes:
                raise ExhaustedError(
                    f"{self._target.destination}: {size_bytes:,} bytes are needed, {free_bytes:,} "
                    "are free there; free some or export elsewhere"
                )
            with suppress(FileExistsError):
                os.mkdir(self._hidden, dir_fd=parent)
            os.close(os.open(self._hidden, DIRECTORY, dir_fd=parent))

    def create(self, name: str, size_bytes: int) -> DirectorySink:
        checked(name)
        with self._explained(), self._parent() as parent:
            folder = os.open(self._hidden, DIRECTORY, dir_fd=parent)
            try:
                return DirectorySink(folder, name)
            except BaseException:
                os.close(folder)
                raise

    def open(self, name: str, *, finished: bool) -> DirectorySource:
        checked(name)
        with self._explained(), self._parent() as parent:
            folder = self._last if finished else self._hidden
            return DirectorySource(open_file(parent, folder, name))

    def commit(
        self, small: Mapping[str, bytes], sizes: Mapping[str, int], at_point: AtPoint
    ) -> None:
        with self._explained(), self._parent() as parent:
            if self._is_ours(parent):
                return
            folder = os.open(self._hidden, DIRECTORY, dir_fd=parent)
            try:
                check_sizes(folder, sizes)
                for name, content in small.items():
                    sink = DirectorySink(os.dup(folder), checked(name))
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

    def explain(self, error: BaseException) -> ParamdError:
        return explained(error, self._target) if isinstance(error, OSError) else _unknown(error)

    def drop(self, names: Sequence[str], *, finished: bool) -> None:
        with self._explained(), suppress(FileNotFoundError), self._parent() as parent:
            remove(parent, self._hidden)
            if finished and self._is_ours(parent):
                # Out of sight at once; what is removed piece by piece has no name any more.
                os.rename(self._last, self._hidden, src_dir_fd=parent, dst_dir_fd=parent)
                remove(parent, self._hidden)
            os.fsync(parent)

    def _publish(self, parent: int) -> None:
        if rename(parent, self._hidden, self._last, NOREPLACE):
            return
        self._check_free(parent)
        if rename(parent, self._hidden, self._last, EXCHANGE):
            remove(parent, self._hidden)  # what stood there before
            return
        # A file system without the exchange: for a moment nothing stands there.
        old = f".{self._last}.{secrets.token_hex(4)}.old"
        with suppress(FileNotFoundError):
            os.rename(self._last, old, src_dir_fd=parent, dst_dir_fd=parent)
        os.rename(self._hidden, self._last, src_dir_fd=parent, dst_dir_fd=parent)
        remove(parent, old)

    def _check_free(self, parent: int) -> None:
        try:
            os.stat(self._last, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return
        where = f"{self._target.destination}/{self._target.key}"
        if not self._target.overwrite:
            raise ConflictError(f"{where} exists; choose another key, or allow to overwrite it")
        if export_id_at(parent, self._last) is None:
            raise ConflictError(
                f"{where} exists and is no export of paramd, so it is not replaced; choose "
                "another key"
            )

    def _is_ours(self, parent: int) -> bool:
        """Whether this very export stands at the key."""
        return export_id_at(parent, self._last) == self._target.export_id

    @contextmanager
    def _parent(self, *, make: bool = False) -> Iterator[int]:
        """The directory that holds the key's last part."""
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in self._parents:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folder)
                inner = os.open(name, DIRECTORY, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ParamdError:
            raise
        except OSError as error:
            raise explained(error, self._target) from error


def explained(error: OSError, target: Target) -> ParamdError:
    """What an operating system's error means for an export."""
    where = f"{target.destination}/{target.key}"
    text = f"{where}: {os.strerror(error.errno) if error.errno else error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ExhaustedError(f"{text}; free some room there or export elsewhere")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DeniedError(f"{text}; the sidecar's user must be able to write there")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return DeniedError(f"{where}: a part of it is no directory but a file or a symbolic link")
    if error.errno == errno.ENOENT:
        return NotFoundError(
            f"{text}: the destination, or the export, is not there; is the directory shared by "
            "all hosts of the job?"
        )
    return UnreachableError(text)


def _unknown(error: BaseException) -> ParamdError:
    return UnreachableError(f"the destination failed: {error}")
