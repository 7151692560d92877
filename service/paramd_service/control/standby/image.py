"""The store's file as bytes: what has changed in it, and the same made of that elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from paramd.v1 import control_pb2
from paramd_service.control.base.site import set_generation

PAGE_BYTES = 4096
"""Granularity of the comparison, whatever the store's own pages are."""

PART_BYTES = 1 << 20
"""Most bytes of one message."""


@dataclass(frozen=True, slots=True)
class State:
    """The store at one moment."""

    file: bytes
    audit_head: bytes
    """At most as new as the file."""


def path_of(directory: Path, job: str) -> Path:
    """Where an older paramd kept the head of its audit."""
    return directory / f"audit-{job}.head"


def state_of(connection: Connection, directory: Path, job: str) -> State:
    """The store as a reader's transaction sees it. SQLite only; costs one copy of its file."""
    # First: the head may be behind the chain, never ahead of it.
    head = b""
    with suppress(FileNotFoundError):
        head = path_of(directory, job).read_bytes()
    # The transaction has begun; reading makes it see one moment.
    connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar()
    driver = connection.connection.driver_connection
    assert driver is not None
    return State(driver.serialize(), head)


def changes(before: bytes, after: bytes) -> Iterator[tuple[int, bytes]]:
    """Offset and content of what differs, in order, at most `PART_BYTES` at a time."""
    old, new = memoryview(before), memoryview(after)
    begin = -1
    for at in range(0, len(new), PAGE_BYTES):
        same = new[at : at + PAGE_BYTES] == old[at : at + PAGE_BYTES]
        if begin >= 0 and (same or at - begin >= PART_BYTES):
            yield begin, bytes(new[begin:at])
            begin = -1
        if begin < 0 and not same:
            begin = at
    if begin >= 0:
        yield begin, bytes(new[begin:])


class Replica:
    """A copy of the store as its parts arrive, and its file on this host. Single thread."""

    def __init__(self, path: Path, directory: Path, job: str) -> None:
        """No I/O. `path` is the file; the head and the generation belong into `directory`."""
        self._path, self._directory, self._job = path, directory, job
        self._file = bytearray()
        self._pages: list[tuple[int, bytes]] = []
        self._head = b""
        self._kept_number = 0
        self.number = 0
        """Of the last whole state; 0 before the first."""
        self.generation = 0

    def begin(self) -> None:
        """Another stream begins, with a whole state."""
        self._pages.clear()
        self._file, self.number, self._kept_number = bytearray(), 0, 0

    def take(self, part: control_pb2.FollowStoreResponse) -> bool:
        """Take a part; whether a state is whole by it."""
        if not part.number:
            return False
        self._pages += [(page.offset_bytes, page.data) for page in part.pages]
        if not part.last:
            return False
        size = part.size_bytes
        del self._file[size:]
        self._file.extend(bytes(size - len(self._file)))
        for offset, data in self._pages:
            self._file[offset : offset + len(data)] = data
        self._pages.clear()
        self._head, self.number, self.generation = part.audit_head, part.number, part.generation
        return True

    def keep(self) -> None:
        """Make it this host's store, if it is newer. The one before is kept as `*.before`.

        Call only while no control plane uses that store. Raises OSError.
        """
        if self.number == self._kept_number:
            return
        fresh = self._path.with_name(self._path.name + ".copy")
        _write(fresh, bytes(self._file))
        if not self._kept_number and self._path.exists():
            os.replace(self._path, self._path.with_name(self._path.name + ".before"))
        # The log of another file must never be applied to this one.
        for companion in ("-wal", "-shm"):
            self._path.with_name(self._path.name + companion).unlink(missing_ok=True)
        os.replace(fresh, self._path)
        if self._head:
            head = path_of(self._directory, self._job)
            _write(head.with_name(head.name + ".copy"), self._head)
            os.replace(head.with_name(head.name + ".copy"), head)
        set_generation(self._directory, self.generation)
        self._kept_number = self.number


def _write(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
