"""Reads what others say by the bounds of `paramd.bounds`: files, HTTP answers, gRPC answers."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from paramd import bounds
from paramd.bounds import Bound, OverBoundError
from paramd.errors import DataLossError

if TYPE_CHECKING:
    import httpx2
    from google.protobuf.descriptor import Descriptor


# Files.


def read_file(path: str | os.PathLike[str], bound: Bound) -> bytes:
    """A whole file. Raises OSError; OverBoundError, a ValueError, for more than its bound."""
    # Non-blocking: a FIFO of that name must not hang its reader.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return read_descriptor(descriptor, bound)
    finally:
        os.close(descriptor)


def read_descriptor(descriptor: int, bound: Bound) -> bytes:
    """A whole open file, from its beginning. Raises as `read_file`."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OverBoundError(f"{bound.what} is not a regular file")
    data = bytearray()
    while part := os.pread(descriptor, bound.most_bytes + 1 - len(data), len(data)):
        data += part
        if len(data) > bound.most_bytes:
            raise bound.over()
    return bytes(data)


PROMPT_S = 0.5
"""Seconds of silence after which an unfinished line is passed on: it may be a prompt."""


def said(command: Sequence[str], bound: Bound, tell: Callable[[str], None]) -> tuple[int, bytes]:
    """(exit status, standard output) of a command that speaks for others, such as ssh.

    Args:
        command: Its words.
        bound: It is ended when it says more than this, or takes longer.
        tell: Called with each line of its standard error, as it comes.

    Raises:
        OverBoundError: It said more.
        TimeoutError: It took longer.
        OSError: It cannot be started.
    """
    import selectors
    import subprocess

    until_s, data, line, count = time.monotonic() + bound.within_s, bytearray(), bytearray(), 0
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        selectors.DefaultSelector() as either,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        either.register(process.stdout, selectors.EVENT_READ, data)
        either.register(process.stderr, selectors.EVENT_READ, line)
        try:
            # Until its standard output ends: what it leaves behind may keep the other one.
            while any(key.data is data for key in either.get_map().values()):
                left_s = max(until_s - time.monotonic(), 0.0)
                ready = either.select(min(left_s, PROMPT_S) if line else left_s)
                if not ready and (not line or left_s <= PROMPT_S):
                    raise TimeoutError(f"{bound.what} did not come within {bound.within_s:g} s")
                if not ready:
                    # It asks for something, and waits.
                    line += b"\n"
                for key, _ in ready:
                    part = os.read(key.fd, 1 << 16)
                    key.data.extend(part)
                    count += len(part)
                    if not part:
                        either.unregister(key.fileobj)
                if count > bound.most_bytes:
                    raise bound.over()
                _tell_whole(line, tell)
            code = process.wait(max(until_s - time.monotonic(), 0.1))
            for key, _ in either.select(0):
                line.extend(os.read(key.fd, 1 << 16))
            return code, bytes(data)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{bound.what} did not end within {bound.within_s:g} s") from None
        finally:
            process.kill()
            _tell_whole(line, tell)
            if line:
                tell(line.decode(errors="replace"))


def _tell_whole(line: bytearray, tell: Callable[[str], None]) -> None:
    """Tell the lines that have ended, and leave the rest."""
    *whole, rest = bytes(line).split(b"\n")
    line[:] = rest
    for each in whole:
        tell(each.decode(errors="replace"))


def parsed_json(data: bytes | str, bound: Bound) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: For any that cannot be had, one of too many parts or levels among them.
    """
    text = data if isinstance(data, bytes) else data.encode(errors="surrogatepass")
    if len(text) > bound.most_bytes:
        raise bound.over()
    if len(text) > bound.parts and sum(map(text.count, (b",", b"[", b"{"))) > bound.parts:
        raise OverBoundError(f"{bound.what} has more than {bound.parts:,} values")
    try:
        return json.loads(data)
    except RecursionError:
        raise OverBoundError(f"{bound.what} is nested too deeply") from None


def unpacked(data: bytes, bound: Bound) -> Any:
    """The value of a JSON document that zlib has packed. Raises ValueError."""
    try:
        return parsed_json(zlib.decompressobj().decompress(data, bound.most_bytes), bound)
    except zlib.error as error:
        raise ValueError(f"{bound.what} cannot be unpacked: {error}") from None


# HTTP.

NOT_PACKED = {"accept-encoding": "identity"}
"""Header of a client whose answers are bounded: a packed one could unpack to a thousandfold."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to an HTTP request, read whole."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes
    bound: Bound

    @property
    def text(self) -> str:
        """The content as text; what is no UTF-8 is replaced."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """The content as JSON. Raises ValueError."""
        return parsed_json(self.content, self.bound)


async def asked(
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    bound: Bound,
    *,
    timeout_s: float,
    **request: Any,
) -> Answer:
    """Send one request; return its answer, read within the bound.

    `timeout_s`: how long the answer may take to begin; `bound.within_s` is for the rest.
    `request`: as httpx's. Raises httpx's errors; TimeoutError and OverBoundError.
    """
    data = bytearray()
    async with (
        asyncio.timeout(timeout_s + bound.within_s),
        client.stream(method, url, timeout=timeout_s, **request) as answer,
    ):
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise OverBoundError(f"{bound.what} is packed, though nobody asked for that")
        async for part in answer.aiter_bytes():
            data += part
            if len(data) > bound.most_bytes:
                raise bound.over()
    return Answer(answer.status_code, answer.headers, bytes(data), bound)


def asked_once(
    method: str,
    url: str,
    bound: Bound,
    *,
    timeout_s: float,
    transport: httpx2.AsyncBaseTransport,
    **request: Any,
) -> Answer:
    """As `asked`, over a transport of its own, which is closed; blocks. No proxy of the environment
    is used: it would see the token."""

    # Here, because most processes ask nobody in this way.
    from concurrent.futures import ThreadPoolExecutor

    import httpx2

    async def ask() -> Answer:
        async with httpx2.AsyncClient(
            transport=transport, trust_env=False, headers=NOT_PACKED
        ) as client:
            return await asked(client, method, url, bound, timeout_s=timeout_s, **request)

    # On a thread: the caller's may have a running event loop, such as a notebook's.
    with ThreadPoolExecutor(1, thread_name_prefix="paramd-ask") as thread:
        return thread.submit(lambda: asyncio.run(ask())).result()


# gRPC.


def parsed(method: str, parse: Any, data: bytes) -> Any:
    """The answer of a method; if it is over its bounds or no message of its kind, what raises
    DataLossError as soon as it is used. gRPC itself would log a traceback, and hand out None."""
    most = bounds.ANSWER_BYTES.get(method, bounds.GRPC_ANSWER_BYTES)
    if len(data) > most:
        return _Unreadable(f"its answer to {method} has {len(data):,} bytes, over {most:,}")
    kind = _kind_of(parse)
    if kind is not None and has_over(kind, data, bounds.GRPC_PARTS):
        return _Unreadable(f"its answer to {method} has over {bounds.GRPC_PARTS:,} parts")
    try:
        return parse(data)
    except Exception as error:
        return _Unreadable(f"its answer to {method} is no message of that kind ({error})")


class _Unreadable:
    """In place of an answer that cannot be read."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise DataLossError(self._why)


def _kind_of(parse: Any) -> Descriptor | None:
    """The kind of message that a generated parser parses; None for a parser of our own."""
    message = getattr(parse, "__self__", None)
    return message.DESCRIPTOR if message is not None else None


def has_over(kind: Descriptor, data: bytes, parts: int) -> bool:
    """Whether a serialized message has more fields than that; found before it is parsed.

    Each field takes tens of bytes of memory, and as few as two of these.
    """
    return len(data) > 2 * parts and _count_parts(kind, data, parts) < 0


def _count_parts(kind: Descriptor, data: bytes, left: int) -> int:
    """`left`, less the fields of a message and of its parts that can have many; negative if it has
    more. A malformed message ends the count: its parser refuses it."""
    at, fields = 0, kind.fields_by_number
    try:
        while at < len(data) and left >= 0:
            left -= 1
            tag, at = _varint(data, at)
            wire = tag & 7
            if wire != 2:
                # A group's fields count as the message's own.
                at = _varint(data, at)[1] if wire == 0 else at + {1: 8, 3: 0, 4: 0, 5: 4}[wire]
                continue
            size, at = _varint(data, at)
            inner = fields[tag >> 3].message_type if tag >> 3 in fields else None
            if inner is not None and _can_have_many(inner):
                left = _count_parts(inner, data[at : at + size], left)
            at += size
    except (IndexError, KeyError):
        pass
    return left


@lru_cache(maxsize=256)
def _can_have_many(kind: Descriptor) -> bool:
    """Whether a message, or a part of it, has as many fields as its sender likes."""
    return any(
        (one.is_repeated and one.cpp_type >= one.CPPTYPE_STRING)
        or (one.message_type not in (None, kind) and _can_have_many(one.message_type))
        for one in kind.fields
    )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends. Raises IndexError at the end of the data, KeyError if longer."""
    value = shift = 0
    while (byte := data[at]) > 127:
        if shift > 63:
            raise KeyError(shift)
        value |= (byte & 127) << shift
        shift, at = shift + 7, at + 1
    return value | byte << shift, at + 1
