"""Objects of a store as sinks and sources: multipart uploads, and reads of ranges."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from paramd.errors import AbortedError, ParamdError

PART_BYTES = 6 << 20
CONCURRENCY = 4
"""Parts under way at once: they and the one being filled bound the memory of an upload."""

_MAX_PARTS = 9_000


class Bucket(Protocol):
    """Where objects lie, as far as moving bytes needs to know."""

    @property
    def store(self) -> Any:
        """The obstore client."""

    def explain(self, error: BaseException) -> ParamdError:
        """What a store's error means for an export."""

    def explained(self) -> AbstractContextManager[None]:
        """Turns a store's errors into ours."""


class ObjectSink:
    """A multipart upload under way, fed through a queue of one part."""

    def __init__(self, place: Bucket, path: str, size_bytes: int) -> None:
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
            import obstore

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
            # The store drops the parts that it has when its source fails.
            raise AbortedError("the upload was given up")


class ObjectSource:
    """An object to read."""

    def __init__(self, place: Bucket, path: str, size_bytes: int) -> None:
        self._place = place
        self._path = path
        self.size_bytes = size_bytes

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        import obstore

        length = min(size_bytes, self.size_bytes - offset_bytes)
        if length <= 0:
            return b""
        with self._place.explained():
            found = obstore.get_range(
                self._place.store, self._path, start=offset_bytes, length=length
            )
            return bytes(found)

    def close(self) -> None:
        pass
