"""Destinations: names that the operator gave to places, and keys that clients may write. Pure.

    PARAMD_DESTINATIONS='{"checkpoints": "/data/checkpoints",
                          "cloud": {"root": "s3://bucket/prefix", "region": "eu-west-1"}}'

A client names "checkpoints/run-7/step-100": a destination and a relative key. Nothing else it
sends is ever opened, and the key is checked here first.

A `Place` is the interface between exports and storage; all of it blocks: use threads. It belongs to
one export at one key. It keeps no state in memory that another process would need: any sidecar may
write, verify, finish or drop, even after another one died.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias

from paramd.errors import DeniedError, NotFoundError, UsageError
from paramd_service.admission import covers

ENVIRONMENT = "PARAMD_DESTINATIONS"
MAX_KEY_BYTES = 512
MAX_SEGMENTS = 16
MAX_SEGMENT_BYTES = 128
OPTIONS = frozenset({"endpoint", "region", "allow_http", "virtual_hosted_style_request"})
"""Options of an object store, apart from credentials (see object_store.py)."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
# Leaves no room for escapes, schemes, blanks or separators.
_SEGMENT = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._=+-]*[A-Za-z0-9_=+-])?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# Windows device names, with any extension: the directory may be a share that Windows reads.
_DEVICE = re.compile(r"(?:CON|PRN|AUX|NUL|COM[0-9]|LPT[0-9]|CONIN|CONOUT|CLOCK)(?:\.|$)", re.I)


class DestinationKind(Enum):
    """The kind of storage behind a name."""

    DIRECTORY = "directory"
    S3 = "s3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    name: str
    kind: DestinationKind
    root: str
    """Absolute path, or "s3://bucket/prefix"."""
    options: Mapping[str, str] = field(default_factory=dict)


def parse_destinations(table: Mapping[str, object]) -> dict[str, Destination]:
    """The destinations of a configuration, by name.

    Raises:
        UsageError: If a name, a root or an option is invalid.
    """
    return {name: _destination(name, value) for name, value in table.items()}


def locate(destinations: Mapping[str, Destination], text: str) -> tuple[Destination, str]:
    """Resolve "name/key" to a destination and a key. Opens nothing.

    Raises:
        UsageError: If it has no key, or an invalid one.
        NotFoundError: If there is no destination of that name.
    """
    name, slash, key = text.partition("/")
    if not _NAME.fullmatch(name) or not slash:
        raise UsageError(
            f"destination {text[:80]!r}: expected the name of a destination, '/', and a relative "
            "key, such as 'checkpoints/run-7/step-100'"
        )
    check_key(key)
    found = destinations.get(name)
    if found is None:
        known = ", ".join(sorted(destinations)) or "none is configured"
        raise NotFoundError(f"no destination {name!r}; known: {known}")
    return found, key


def check_key(key: str) -> tuple[str, ...]:
    """Check a relative key; return its segments.

    Raises:
        UsageError: If it is not plain names joined by single slashes.
    """
    segments = tuple(key.split("/"))
    if len(key) > MAX_KEY_BYTES or len(segments) > MAX_SEGMENTS:
        raise UsageError(
            f"key: {len(key)} characters in {len(segments)} parts; expected at most "
            f"{MAX_KEY_BYTES} in {MAX_SEGMENTS}"
        )
    for segment in segments:
        check_file_name(segment)
    return segments


def check_below(key: str, jobs: str) -> None:
    """Raise DeniedError unless a token for `jobs` (as in `covers`) may write at `key`: a token for
    some jobs writes below a folder with the name of such a job. `key` may hold "{step}"."""
    folder, below, _ = key.partition("/")
    # A name that is filled in later could become another job's.
    if jobs and (not below or "{" in folder or not covers(jobs, folder)):
        raise DeniedError(
            f"key {key[:80]!r}: your token is for jobs {jobs} and writes only below a folder with "
            "the name of such a job; write NAME/JOB/KEY, such as checkpoints/my-run/step-{step}"
        )


def not_seen(where: str) -> NotFoundError:
    """The error for everything that a token for some jobs may not read at `where`. It is the same
    whether nothing is there, no export, or an export of another job."""
    return NotFoundError(f"{where}: there is no such file of an export that your token is for")


def check_file_name(name: str) -> str:
    """Check a plain file name, and return it.

    Raises:
        UsageError: If it is not one.
    """
    plain = _SEGMENT.fullmatch(name) is not None and len(name) <= MAX_SEGMENT_BYTES
    if not plain or _DEVICE.match(name):
        raise UsageError(
            f"{name[:80]!r} is not a valid part of a key: expected 1 to {MAX_SEGMENT_BYTES} of the "
            "characters A-Z a-z 0-9 _ . = + -, starting with a letter, a digit or '_', not "
            "ending with a dot, and not a Windows device name"
        )
    return name


def _destination(name: str, value: object) -> Destination:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"destination {name!r}: expected a name such as 'checkpoints'")
    table = {"root": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.get("root"), str):
        raise UsageError(f"destination {name!r}: expected a root, or an object with a root")
    options = {
        str(key): str(option).lower() if isinstance(option, bool) else str(option)
        for key, option in table.items()
        if key != "root"
    }
    kind, root = parse_root(table["root"], name)
    if set(options) - OPTIONS or (options and kind is DestinationKind.DIRECTORY):
        raise UsageError(
            f"destination {name!r}: options {', '.join(sorted(options))}; an object store takes "
            f"{', '.join(sorted(OPTIONS))}, a directory none"
        )
    return Destination(name=name, kind=kind, root=root, options=options)


def parse_root(text: str, name: str) -> tuple[DestinationKind, str]:
    """Kind and canonical form of a root.

    Raises:
        UsageError: If it is neither an absolute path nor "s3://bucket/prefix".
    """
    scheme, separator, rest = text.partition("://")
    if scheme == "s3" and separator:
        bucket, _, prefix = rest.rstrip("/").partition("/")
        if _BUCKET.fullmatch(bucket) and "@" not in prefix:
            if prefix:
                check_key(prefix)
            return DestinationKind.S3, f"s3://{bucket}" + (f"/{prefix}" if prefix else "")
    path = rest if scheme == "file" and separator else text
    if path.startswith("/") and "\0" not in path and ".." not in path.split("/"):
        return DestinationKind.DIRECTORY, path.rstrip("/") or "/"
    shown = "a root with '@'" if "@" in text else repr(text[:80])  # before it may be a secret
    raise UsageError(
        f"destination {name!r}: {shown}; expected an absolute path without '..', or "
        "s3://bucket/prefix"
    )


MANIFEST = "paramd-export.json"
"""Written last: an export without it does not count."""

AtPoint: TypeAlias = Callable[[str], None]
"""Passes a named fault injection point."""


class FileSink(Protocol):
    """A file being written: `write` in order, then `finish` or `abort`, which is idempotent. Raises
    ParamdError with what to do."""

    def write(self, data: memoryview) -> None:
        """Write the next bytes; their memory may be reused once it returns."""

    def finish(self) -> None:
        """Make the file complete and durable under its name."""

    def abort(self) -> None:
        """Remove the part written."""


class FileSource(Protocol):
    size_bytes: int

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Bytes from `offset_bytes` on; fewer only at the end."""

    def close(self) -> None:
        """Close it."""


class Place(Protocol):
    """Storage in which an export is assembled and then published."""

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
        """Remove the export's leftovers, or the finished export. Idempotent."""
