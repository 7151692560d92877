"""What is done within a directory that is held open by its descriptor.

Nothing here follows a symbolic link.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Mapping

from paramd.errors import DataLossError
from paramd_service.exports.destinations import check_file_name
from paramd_service.exports.place import MANIFEST

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a directory, and nothing else."""

NOREPLACE = 1
"""Flag of `rename`: only where nothing stands."""

EXCHANGE = 2
"""Flag of `rename`: what stands there takes the old name."""

_MAX_MANIFEST_BYTES = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def checked(name: str) -> str:
    """The name of a file of an export. Raises UsageError for any other."""
    # Two names that begin with a dot or underscores are the format's own.
    return name if name == ".metadata" else check_file_name(name)


def open_file(parent: int, folder_name: str, name: str) -> int:
    """Descriptor of a plain file in a folder of `parent`, to be read. Raises OSError."""
    folder = os.open(folder_name, DIRECTORY, dir_fd=parent)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(name, flags, dir_fd=folder)
    finally:
        os.close(folder)


def export_id_at(parent: int, folder_name: str) -> str | None:
    """The id of the export that stands there; None when it is none."""
    try:
        file = open_file(parent, folder_name, MANIFEST)
    except OSError:
        return None
    try:
        found = json.loads(os.pread(file, _MAX_MANIFEST_BYTES, 0))
        return str(found["export_id"])
    except (ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(file)


def check_sizes(folder: int, sizes: Mapping[str, int]) -> None:
    """Raises DataLossError when a file is not as long as it was written."""
    for name, size_bytes in sizes.items():
        found = os.stat(checked(name), dir_fd=folder, follow_symlinks=False).st_size
        if found != size_bytes:
            raise DataLossError(f"{name} has {found:,} bytes; {size_bytes:,} were written")


def remove(parent: int, name: str) -> None:
    """Removes a directory of plain files, and its directories if somebody made any."""
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
    """renameat2; False when the target stands in the way or the file system has not got it."""
    done: int = _libc.renameat2(
        parent, os.fsencode(source), parent, os.fsencode(target), ctypes.c_uint(flags)
    )
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL, errno.ENOSYS, errno.ENOENT):
        return False
    raise OSError(number, os.strerror(number))
