"""Bulk streams: bytes of a snapshot or an edit over plain TCP, beside gRPC (protos/README.md).

gRPC pins, authorises and describes; GrantStream gives a grant, valid for one stream. Its secret
never crosses the stream: either side proves knowledge of it, with an HMAC over its first words.
All integers are little-endian.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from paramd.errors import DataLossError, DeniedError, ParamdError, codes_of, error_of_grpc

MAGIC: Final = b"PBS1"
ID_BYTES: Final = 16
SECRET_BYTES: Final = 32
MAC_BYTES: Final = 32

WINDOW_BYTES: Final = 4 << 20
"""Most bytes of one window."""

MAX_TEXT_BYTES: Final = 4 << 10
"""Most bytes of an error's text."""

CHECKSUMS: Final = 1
"""Flag of an opening: every window is to carry a checksum."""

_OPENING = struct.Struct("<4sI16sQQ")
_REPLY = struct.Struct("<4sII")
_WINDOW = struct.Struct("<QIIQ")

OPENING_BYTES: Final = _OPENING.size + MAC_BYTES
REPLY_BYTES: Final = _REPLY.size + MAC_BYTES
WINDOW_HEADER_BYTES: Final = _WINDOW.size

_NAMES: Final[dict[int, str]] = {code.value[0]: code.name for code in grpc.StatusCode}

DATA, LAST, FAILED = 0, 1, 2
"""Kinds of windows: bytes; the end, after which all bytes count; an error and its text."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission for one stream, as GrantStream gave it."""

    grant_id: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Opening:
    """A client's request: bytes [begin, end) of the object that its grant is bound to."""

    grant_id: bytes
    begin: int
    end: int
    checksums: bool = False

    def _words(self) -> bytes:
        flags = CHECKSUMS if self.checksums else 0
        return _OPENING.pack(MAGIC, flags, self.grant_id, self.begin, self.end)

    def sealed(self, secret: bytes) -> bytes:
        words = self._words()
        return words + _mac(secret, b"open", words)

    def check(self, data: bytes, secret: bytes) -> None:
        """Raise DeniedError unless the sender of `data` knows the secret."""
        if not hmac.compare_digest(data[_OPENING.size :], _mac(secret, b"open", self._words())):
            raise DeniedError("the opening of a stream was not made with its grant's secret")


def read_opening(data: bytes) -> Opening:
    """Parse `OPENING_BYTES`; not to be trusted before `check`. DataLossError: it is no opening."""
    magic, flags, grant_id, begin, end = _unpacked(_OPENING, data, "the opening of a stream")
    if magic != MAGIC or flags & ~CHECKSUMS or len(data) != OPENING_BYTES or begin > end:
        raise DataLossError("not the opening of a stream")
    return Opening(grant_id, begin, end, bool(flags))


def reply(opening: bytes, secret: bytes) -> bytes:
    """The `REPLY_BYTES` of a sidecar that accepts an opening."""
    words = _REPLY.pack(MAGIC, 0, 0)
    return words + _mac(secret, b"reply", opening + words)


def refusal(error: ParamdError) -> bytes:
    """A reply that refuses, with its text; unauthenticated, as there may be no secret."""
    text = str(error).encode()[:MAX_TEXT_BYTES]
    return _REPLY.pack(MAGIC, _status(error), len(text)) + bytes(MAC_BYTES) + text


def read_reply(data: bytes, opening: bytes, secret: bytes) -> tuple[int, int]:
    """Status and size of the text that follows; (0, 0): accepted, by a sidecar with the secret.

    Raises:
        DataLossError: If another program, or another sidecar, answers at that port.
    """
    magic, status, size = _unpacked(_REPLY, data, "the reply to an opening")
    if magic != MAGIC or size > MAX_TEXT_BYTES or (not status and size):
        raise DataLossError("the process at the sidecar's stream port is not a sidecar")
    words, mac = data[: _REPLY.size], data[_REPLY.size : REPLY_BYTES]
    if not status and not hmac.compare_digest(mac, _mac(secret, b"reply", opening + words)):
        raise DataLossError("the process at the sidecar's stream port does not know the grant")
    return status, size


@dataclass(frozen=True, slots=True)
class Window:
    """Header of a window: `size` bytes that belong at `offset` follow it."""

    kind: int
    offset: int
    size: int
    xxh3: int = 0
    """XXH3 (64 bit) of the bytes, seeded with the offset, if the opening requested it; in a
    FAILED window the number of the gRPC status."""

    def packed(self) -> bytes:
        return _WINDOW.pack(self.offset, self.size, self.kind, self.xxh3)


def read_window(data: bytes | bytearray | memoryview) -> Window:
    """Parse `WINDOW_HEADER_BYTES`; DataLossError if it is no header, or beyond a limit."""
    if len(data) != _WINDOW.size:
        raise DataLossError(f"the header of a window has {len(data)} bytes, not {_WINDOW.size}")
    offset, size, kind, xxh3 = _WINDOW.unpack(data)
    most = {DATA: WINDOW_BYTES, LAST: 0, FAILED: MAX_TEXT_BYTES}.get(kind, -1)
    if size > most or (kind == DATA and not size):
        raise DataLossError(f"a window of kind {kind} with {size:,} bytes")
    return Window(kind, offset, size, xxh3)


def failure(error: ParamdError) -> bytes:
    text = str(error).encode()[:MAX_TEXT_BYTES]
    return Window(FAILED, 0, len(text), _status(error)).packed() + text


def error_of(number: int, text: bytes) -> ParamdError:
    """The error of a refusal or a FAILED window."""
    return error_of_grpc(_NAMES.get(number, ""))(text.decode(errors="replace"))


def _unpacked(form: struct.Struct, data: bytes | bytearray | memoryview, what: str) -> Any:
    try:
        return form.unpack_from(data)
    except struct.error as error:
        raise DataLossError(f"{what} is too short") from error


def _status(error: ParamdError) -> int:
    number: int = grpc.StatusCode[codes_of(error).grpc].value[0]
    return number


def _mac(secret: bytes, what: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, b"paramd stream " + what + data, "sha256")
