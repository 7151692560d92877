"""Exports into S3 and what is like it, through obstore: multipart, and a marker at the end.

An object store has no renaming, so files get their names at once, each when it is whole.
What makes them an export is the manifest, which is put last and only where none is. While
an export is under way, an object `.paramd-export` keeps others from the key.

Keys to the store come from the environment of this process (AWS_ACCESS_KEY_ID and so on).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from paramd.errors import (
    ConflictError,
    DataLossError,
    ParamdError,
    UsageError,
)
from paramd_service.exports.destinations import OPTIONS, check_file_name, check_key
from paramd_service.exports.object_errors import explained
from paramd_service.exports.object_streams import ObjectSink, ObjectSource
from paramd_service.exports.place import MANIFEST, AtPoint, Target

RESERVATION = ".paramd-export"
_RETRIES = 4
_RETRY_S = 30


class ObjectPlace:
    """One export at `<prefix>/<key>/`."""

    def __init__(self, root: str, target: Target) -> None:
        bucket, _, prefix = root.removeprefix("s3://").partition("/")
        unknown = set(target.options) - OPTIONS
        if unknown:
            raise UsageError(f"{target.destination}: no options {', '.join(sorted(unknown))}")
        check_key(target.key)
        self.target = target
        self._bucket = bucket
        self._prefix = f"{prefix}/{target.key}" if prefix else target.key
        self._store: Any = None

    @property
    def store(self) -> Any:
        """The obstore client; made when first needed."""
        if self._store is None:
            from obstore.store import S3Store

            options: Any = dict(self.target.options)
            self._store = S3Store(
                self._bucket,
                client_options={"allow_http": options.pop("allow_http", "false") == "true"},
                retry_config=_retry(),
                config=options,
            )
        return self._store

    def begin(self, size_bytes: int) -> None:
        with self.explained():
            manifest = self._manifest()
            if manifest is not None and manifest.get("export_id") == self.target.export_id:
                return
            self._reserve()
            names = [name for name in self._names() if name != RESERVATION]
            if not names:
                return
            if not self.target.overwrite:
                self._unreserve()
                raise ConflictError(
                    f"{self._where} exists; choose another key, or allow to overwrite it"
                )
            if manifest is None:
                self._unreserve()
                raise ConflictError(
                    f"{self._where} exists and is no export of paramd, so it is not replaced; "
                    "choose another key"
                )
            self._delete_export(manifest)

    def create(self, name: str, size_bytes: int) -> ObjectSink:
        return ObjectSink(self, self._path(name), size_bytes)

    def open(self, name: str, *, finished: bool) -> ObjectSource:
        import obstore

        with self.explained():
            found = obstore.head(self.store, self._path(name))
            return ObjectSource(self, self._path(name), int(found["size"]))

    def commit(
        self, small: Mapping[str, bytes], sizes: Mapping[str, int], at_point: AtPoint
    ) -> None:
        import obstore

        with self.explained():
            manifest = self._manifest()
            if manifest is not None and manifest.get("export_id") == self.target.export_id:
                self._unreserve()
                return
            found = self._sizes()
            for name, size_bytes in sizes.items():
                if found.get(name) != size_bytes:
                    raise DataLossError(
                        f"{name} has {found.get(name)} bytes there; {size_bytes} were written"
                    )
            *others, (last, marker) = small.items()
            for name, content in others:
                obstore.put(self.store, self._path(name), content, use_multipart=False)
            at_point("export-marker")
            self._put_new(last, marker)
            at_point("export-renamed")
            self._unreserve()

    def explain(self, error: BaseException) -> ParamdError:
        return explained(error, self.target)

    def drop(self, names: Sequence[str], *, finished: bool) -> None:
        with self.explained():
            manifest = self._manifest()
            ours = manifest is not None and manifest.get("export_id") == self.target.export_id
            if ours and finished:
                assert manifest is not None
                self._delete_export(manifest)
            elif not ours and self._reserved_by() == self.target.export_id:
                self._delete(names)
            self._unreserve()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns a store's errors into ours."""
        try:
            yield
        except ParamdError:
            raise
        except Exception as error:
            raise explained(error, self.target) from error

    @property
    def _where(self) -> str:
        return f"{self.target.destination}/{self.target.key}"

    def _path(self, name: str) -> str:
        known = (".metadata", RESERVATION)
        return f"{self._prefix}/{name if name in known else check_file_name(name)}"

    def _get(self, name: str) -> bytes | None:
        import obstore

        try:
            return bytes(obstore.get(self.store, self._path(name)).bytes())
        except FileNotFoundError:
            return None

    def _manifest(self) -> dict[str, Any] | None:
        content = self._get(MANIFEST)
        try:
            found = json.loads(content) if content is not None else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _reserved_by(self) -> str | None:
        content = self._get(RESERVATION)
        return content.decode("ascii", "replace") if content is not None else None

    def _reserve(self) -> None:
        if self._reserved_by() == self.target.export_id:
            return
        try:
            self._put_new(RESERVATION, self.target.export_id.encode())
        except ConflictError:
            if not self.target.overwrite:
                raise ConflictError(
                    f"another export into {self._where} is under way, or was left behind; "
                    "choose another key, or allow to overwrite it"
                ) from None
            import obstore

            content = self.target.export_id.encode()
            obstore.put(self.store, self._path(RESERVATION), content, use_multipart=False)

    def _unreserve(self) -> None:
        if self._reserved_by() == self.target.export_id:
            self._delete([RESERVATION])

    def _put_new(self, name: str, content: bytes) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            obstore.put(self.store, self._path(name), content, mode="create")
        except AlreadyExistsError:
            raise ConflictError(f"{self._where} was written by somebody else meanwhile") from None

    def _delete_export(self, manifest: Mapping[str, Any]) -> None:
        """The marker first: from then on nobody takes the rest for an export."""
        self._delete([MANIFEST])
        names = [str(file.get("name", "")) for file in manifest.get("files", ())]
        present = set(self._names())
        self._delete([name for name in names if name in present and name != MANIFEST])

    def _delete(self, names: Sequence[str]) -> None:
        import obstore

        for name in names:
            with suppress(FileNotFoundError):
                obstore.delete(self.store, self._path(name))

    def _names(self) -> list[str]:
        return list(self._sizes())

    def _sizes(self) -> dict[str, int]:
        import obstore

        head = f"{self._prefix}/"
        found = obstore.list(self.store, prefix=head)
        objects = [item for batch in found for item in batch]
        return {str(item["path"]).removeprefix(head): int(item["size"]) for item in objects}


def _retry() -> Any:
    from datetime import timedelta

    return {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
