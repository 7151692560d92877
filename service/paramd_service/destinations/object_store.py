"""Exports to S3 and compatible stores, through obstore: multipart uploads, the manifest last.

An object store cannot rename, so each file appears under its final name once it is complete. The
manifest makes them an export; it is put last and only if there is none. While an export is in
progress, an object `.paramd-export` reserves the key.

Credentials come from the environment of this process (AWS_ACCESS_KEY_ID and so on).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from paramd import bounds
from paramd.answers import parsed_json
from paramd.bounds import Bound
from paramd.errors import (
    AbortedError,
    ConflictError,
    DataLossError,
    DeniedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd.v1.export_pb2 import ExportTarget
from paramd_service.admission import covers
from paramd_service.destinations.destinations import (
    MANIFEST,
    OPTIONS,
    AtPoint,
    check_below,
    check_file_name,
    check_key,
    not_seen,
)
from paramd_service.destinations.directory import not_replaced

PART_BYTES = 6 << 20
CONCURRENCY = 4
"""Concurrent parts: they and the one being filled bound the memory of an upload."""

_MAX_PARTS = 9_000

RESERVATION = ".paramd-export"
LISTED = 1000
"""Objects of a listing in memory at a time."""
_RETRY: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}


class ObjectSink:
    """A multipart upload in progress, fed through a queue of one part."""

    def __init__(self, place: ObjectPlace, path: str, size_bytes: int) -> None:
        self._place = place
        self._path = path
        self._part_bytes = max(PART_BYTES, -(-size_bytes // _MAX_PARTS))
        self._parts: queue.Queue[bytearray | None] = queue.Queue(1)
        self._pending = bytearray()
        self._aborted = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._upload, name="paramd-upload", daemon=True)
        self._thread.start()

    def write(self, data: memoryview) -> None:
        while data:
            room = self._part_bytes - len(self._pending)
            self._pending += data[:room]
            data = data[room:]
            if len(self._pending) == self._part_bytes:
                self._pass_on()

    def finish(self) -> None:
        if self._pending:
            self._pass_on()
        self._put(None)
        self._thread.join()
        self._check()

    def abort(self) -> None:
        self._aborted = True
        while self._thread.is_alive():
            with suppress(queue.Full):
                self._parts.put(None, timeout=0.05)
            self._thread.join(0.05)

    def _pass_on(self) -> None:
        part, self._pending = self._pending, bytearray()
        self._put(part)

    def _put(self, part: bytearray | None) -> None:
        while True:
            # Polled: once the upload has failed, the queue is never emptied.
            self._check()
            try:
                self._parts.put(part, timeout=0.2)
                return
            except queue.Full:
                continue

    def _check(self) -> None:
        if self._error is not None:
            raise self._place.explain(self._error)

    def _upload(self) -> None:
        try:
            obstore.put(
                self._place.store,
                self._path,
                self._taken(),
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=CONCURRENCY,
            )
        except BaseException as error:
            self._error = error

    def _taken(self) -> Iterator[bytearray]:
        while (part := self._parts.get()) is not None:
            yield part
        if self._aborted:
            # An error from its source makes obstore discard the parts already uploaded.
            raise AbortedError("the upload was aborted")


class ObjectSource:
    """A file to read."""

    def __init__(
        self, place: ObjectPlace, path: str, size_bytes: int, tag: str | None = None
    ) -> None:
        """With `tag`, reading fails once the object has been replaced."""
        self._place = place
        self._path = path
        self._tag = tag
        self.size_bytes = size_bytes

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        length = min(size_bytes, self.size_bytes - offset_bytes)
        if length <= 0:
            return b""
        with self._place.explained():
            store, path = self._place.store, self._path
            if self._tag is None:
                return bytes(obstore.get_range(store, path, start=offset_bytes, length=length))
            span = (offset_bytes, offset_bytes + length)
            found = obstore.get(store, path, options={"range": span, "if_match": self._tag})
            return bytes(found.bytes())

    def close(self) -> None:
        pass


def _reservation_of(content: bytes) -> tuple[str, str]:
    """(export id, job) of a reservation; the job is empty in one of an earlier version."""
    export_id, _, job = content.decode("ascii", "replace").partition(" ")
    return export_id, job


def _bounded(found: Any, bound: Bound, what: str) -> bytes:
    """The content of a `GetResult`, whatever size its store says that it has. Raises DataLossError:
    it has more than its bound."""
    content = bytearray()
    for part in found.stream(min_chunk_size=1 << 16):
        content += part
        if len(content) > bound.most_bytes:
            raise DataLossError(
                f"{what} has over {bound.most_bytes:,} bytes, so paramd did not write it; "
                "choose another key, or remove it"
            )
    return bytes(content)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


class ObjectPlace:
    """One export at `<prefix>/<key>/`."""

    def __init__(self, root: str, target: ExportTarget) -> None:
        bucket, _, prefix = root.removeprefix("s3://").partition("/")
        unknown = set(target.options) - OPTIONS
        if unknown:
            raise UsageError(f"{target.destination}: unknown options {', '.join(sorted(unknown))}")
        check_key(target.key)
        self.target = target
        self._bucket = bucket
        self._prefix = f"{prefix}/{target.key}" if prefix else target.key

    @cached_property
    def store(self) -> Any:
        """The obstore client; created on first use."""
        options: Any = dict(self.target.options)
        return S3Store(
            self._bucket,
            client_options={"allow_http": options.pop("allow_http", "false") == "true"},
            retry_config=_RETRY,
            config=options,
        )

    def begin(self, size_bytes: int) -> None:
        check_below(self.target.key, self.target.jobs)
        with self.explained():
            self._check_above()
            manifest = self._manifest()
            if manifest is not None and manifest.get("export_id") == self.target.export_id:
                return
            if manifest is None and self._reserved_by() == self.target.export_id:
                # Begun by a control plane that died: the files belong to this export.
                return
            # Looked at before: under its reservation `drop` removes what it finds of its names.
            self._check_free(manifest)
            self._reserve()
            manifest = self._manifest()
            try:
                self._check_free(manifest)  # another export may have ended meanwhile
            except ConflictError:
                self._unreserve()
                raise
            if manifest is not None:
                self._delete_export(manifest)

    def create(self, name: str, size_bytes: int) -> ObjectSink:
        return ObjectSink(self, self._path(name), size_bytes)

    def open(self, name: str, *, finished: bool) -> ObjectSource:
        with self.explained():
            if finished and self.target.jobs:
                return self._open_seen(name)
            found = obstore.head(self.store, self._path(name))
            return ObjectSource(self, self._path(name), int(found["size"]))

    def commit(
        self, small: Mapping[str, bytes], sizes: Mapping[str, int], at_point: AtPoint
    ) -> None:
        with self.explained():
            manifest = self._manifest()
            if manifest is not None and manifest.get("export_id") == self.target.export_id:
                self._unreserve()
                return
            found = self._sizes(sizes)
            for name, size_bytes in sizes.items():
                if (has := found.get(name)) != size_bytes:
                    raise DataLossError(f"{name} has {has} bytes stored; {size_bytes} were written")
            *others, (last, marker) = small.items()
            for name, content in others:
                obstore.put(self.store, self._path(name), content, use_multipart=False)
            at_point("export-marker")
            if self._reserved_by() != self.target.export_id:
                raise ConflictError(f"{self._where} was taken by another export meanwhile")
            self._put_new(last, marker)
            at_point("export-renamed")
            self._unreserve()

    def explain(self, error: BaseException) -> ParamdError:
        if isinstance(error, ParamdError):
            return error
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            why = "the sidecars' environment must have credentials"
            may = f"{why} that may read, write, list and delete there"
            return DeniedError(f"{self._where}: the object store denied access; {may}")
        # obstore has no class for a listing's 404.
        if isinstance(error, FileNotFoundError) or "404 Not Found" in str(error):
            return NotFoundError(f"{self._where}: bucket or object not found")
        return UnreachableError(f"{self._where}: the object store failed ({_first_line(error)})")

    def drop(self, names: Sequence[str], *, finished: bool) -> None:
        with self.explained():
            manifest = self._manifest()
            ours = manifest is not None and manifest.get("export_id") == self.target.export_id
            if ours and finished:
                assert manifest is not None
                self._delete_export(manifest)
            elif manifest is None and self._reserved_by() == self.target.export_id:
                # Otherwise the files may be another's.
                self._delete(names)
            self._unreserve()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Translate a store's errors into domain errors."""
        try:
            yield
        except ParamdError:
            raise
        except Exception as error:
            raise self.explain(error) from error

    @property
    def _where(self) -> str:
        return f"{self.target.destination}/{self.target.key}"

    def _path(self, name: str) -> str:
        known = (".metadata", RESERVATION)
        return f"{self._prefix}/{name if name in known else check_file_name(name)}"

    def _get(self, name: str, bound: Bound, folder: str = "") -> bytes | None:
        """A small object, or None without it. Raises DataLossError for one that is larger: whoever
        can write there must not take the memory of a sidecar, in a pod the trainer's."""
        path = f"{folder}/{name}" if folder else self._path(name)
        try:
            return _bounded(obstore.get(self.store, path), bound, f"{self._where}: {name}")
        except FileNotFoundError:
            return None

    def _manifest(self, folder: str = "") -> dict[str, Any] | None:
        """The manifest at the key, or in another folder of the bucket."""
        content = self._get(MANIFEST, bounds.MANIFEST, folder)
        try:
            found = parsed_json(content, bounds.MANIFEST) if content is not None else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _check_free(self, manifest: Mapping[str, Any] | None) -> None:
        if all(name == RESERVATION for name, _ in self._listed()):
            return
        if not self.target.overwrite:
            raise ConflictError(f"{self._where} exists; choose another key, or overwrite=True")
        if manifest is None or not self._covers(manifest):
            raise not_replaced(self.target)

    def _covers(self, manifest: Mapping[str, Any]) -> bool:
        """Whether the export is of a job that the caller's token is for."""
        return covers(self.target.jobs, str(manifest.get("job", "")))

    def _check_above(self) -> None:
        """Raise ConflictError if the key lies within an export of a job that the caller does not
        see: objects below that export's key would keep it from being replaced."""
        above = PurePosixPath(self.target.key).parents[:-1] if self.target.jobs else ()
        for key in map(str, above):
            manifest = self._manifest(self._prefix.removesuffix(self.target.key) + key)
            if manifest is not None and not self._covers(manifest):
                raise not_replaced(self.target)

    def _open_seen(self, name: str) -> ObjectSource:
        """Open a file of the finished export if that is of a job that the caller sees. Raises
        NotFoundError for everything else, with one text."""
        with suppress(FileNotFoundError):
            found = obstore.head(self.store, self._path(name))
            # After the file: the manifest of an export is deleted before its files change.
            manifest = self._manifest()
            names = {MANIFEST, *self._names_of(manifest or {})}
            if manifest is not None and self._covers(manifest) and name in names:
                size_bytes, tag = int(found["size"]), found["e_tag"]
                return ObjectSource(self, self._path(name), size_bytes, tag)
        raise not_seen(self._where)

    def _reserved_by(self) -> str | None:
        content = self._get(RESERVATION, bounds.RESERVATION)
        return _reservation_of(content)[0] if content is not None else None

    def _reserve(self) -> None:
        if self._reserved_by() == self.target.export_id:
            return
        content = f"{self.target.export_id} {self.target.job}".encode()
        try:
            self._put_new(RESERVATION, content)
        except ConflictError:
            if not self.target.overwrite:
                why = "is in progress, or was abandoned; choose another key, or overwrite=True"
                raise ConflictError(f"another export to {self._where} {why}") from None
            self._take_over(content)

    def _take_over(self, content: bytes) -> None:
        """Replace another export's reservation. With `jobs` only one of a job that the caller sees,
        and only the very one that was looked at."""
        path = self._path(RESERVATION)
        if not self.target.jobs:
            obstore.put(self.store, path, content, use_multipart=False)
            return
        try:
            found = obstore.get(self.store, path)
            tag = found.meta["e_tag"]
            content_there = _bounded(found, bounds.RESERVATION, f"{self._where}: {RESERVATION}")
            if tag is None or not covers(self.target.jobs, _reservation_of(content_there)[1]):
                raise not_replaced(self.target)
            obstore.put(self.store, path, content, mode={"e_tag": tag})
        except (FileNotFoundError, PreconditionError):
            why = "began or ended at this moment; try again"
            raise ConflictError(f"another export to {self._where} {why}") from None

    def _unreserve(self) -> None:
        if self._reserved_by() == self.target.export_id:
            self._delete([RESERVATION])

    def _put_new(self, name: str, content: bytes) -> None:
        try:
            # Atomic: exactly one of several writers succeeds.
            obstore.put(self.store, self._path(name), content, mode="create")
        except AlreadyExistsError:
            raise ConflictError(f"{self._where} was written by another process meanwhile") from None

    def _delete_export(self, manifest: Mapping[str, Any]) -> None:
        """Delete the marker first: without it the rest is no export."""
        self._delete([MANIFEST])
        names = self._names_of(manifest)
        present = self._sizes(names)
        self._delete([name for name in names if name in present and name != MANIFEST])

    @staticmethod
    def _names_of(manifest: Mapping[str, Any]) -> list[str]:
        """Names of an export's files. Whoever can write at the key may have written anything."""
        files = manifest.get("files")
        found = files if isinstance(files, list) else ()
        return [str(file.get("name", "")) for file in found if isinstance(file, dict)]

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                obstore.delete(self.store, self._path(name))

    def _sizes(self, names: Collection[str]) -> dict[str, int]:
        """The size of each of these files that is there. Others may lie below the key, in any
        number: they are passed over."""
        wanted = set(names)
        return {name: size_bytes for name, size_bytes in self._listed() if name in wanted}

    def _listed(self) -> Iterator[tuple[str, int]]:
        """(name, size) of each object below the key, one batch at a time in memory."""
        head = f"{self._prefix}/"
        for count, batch in enumerate(obstore.list(self.store, prefix=head, chunk_size=LISTED)):
            if count >= bounds.LISTED // LISTED:
                raise DataLossError(
                    f"{self._where} has over {bounds.LISTED:,} objects, more than any export; "
                    "choose another key"
                )
            for item in batch:
                yield str(item["path"]).removeprefix(head), int(item["size"])
