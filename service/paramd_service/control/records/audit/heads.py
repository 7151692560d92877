"""The head of each chain, kept in a file apart from the store.

A chain alone cannot reveal that its end was truncated. The file has two one-line slots, written
alternately, so a torn write loses only the newer line.
"""

from __future__ import annotations

import os
from pathlib import Path

from paramd.chain import Head

SLOT_BYTES = 128


class HeadFiles:
    """The head files of one directory. Single thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: dict[str, int] = {}

    def read(self, job: str) -> Head | None:
        """The newest head kept for a chain; None when there is none. Raises OSError."""
        try:
            text = path_of(self._directory, job).read_bytes()
        except FileNotFoundError:
            return None
        heads = []
        for begin in range(0, len(text), SLOT_BYTES):
            try:
                heads.append(Head.parse(text[begin : begin + SLOT_BYTES].decode("ascii")))
            except ValueError:
                continue  # torn, or never written
        return max(heads, key=lambda head: head.seq, default=None)

    def write(self, job: str, head: Head) -> None:
        """Store a head durably. Raises OSError."""
        descriptor = self._descriptors.get(job)
        if descriptor is None:
            path = path_of(self._directory, job)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._descriptors[job] = descriptor
            _make_durable(descriptor, self._directory)
        line = str(head).ljust(SLOT_BYTES - 1).encode() + b"\n"
        os.pwrite(descriptor, line, head.seq % 2 * SLOT_BYTES)
        os.fdatasync(descriptor)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def path_of(directory: Path, job: str) -> Path:
    """The head file of a chain; the site's own chain has no job."""
    return directory / (f"audit-{job}.head" if job else "audit.head")


def _make_durable(descriptor: int, directory: Path) -> None:
    if os.fstat(descriptor).st_size < 2 * SLOT_BYTES:
        # Allocate both slots now: storing a head must not fail on a full disk later.
        os.posix_fallocate(descriptor, 0, 2 * SLOT_BYTES)
        os.fsync(descriptor)
    listing = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(listing)
    finally:
        os.close(listing)
