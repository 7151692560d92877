"""Whose program listens at a loopback address, asked before a token goes there.

Any user of a host may listen on a loopback port as soon as it is free: the moment after a control
plane has died is enough. So clients on the host of a server of their own user call its Unix socket
instead (`state_files.beside_port`), in a folder that nobody else may enter. Where there is none, a
client looks at each new connection of its own before it sends a token over it. A program of this
user or of root is believed, as they can read the token anyway. Of anybody else (a site that runs as
a service user) the client asks a proof that it knows the token:

    GET /proof?id=<16 hexadecimal digits>&nonce=<32>      answer: {"proof": "<64>"}

The proof is an HMAC by the token's digest over the nonce and the address that the server itself was
reached at. A program in between that passes the question on, to the control plane at its new
port, therefore gets the proof of another address.

TLS needs none of this: its certificate is the proof.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from paramd import bounds
from paramd.accepting import Listener
from paramd.errors import ParamdError, UnreachableError
from paramd.security.tls import is_loopback
from paramd.state_files import beside_port, sockets_dir

PROOF_PATH = "/proof"
PROOF_S = bounds.PROOF.within_s
"""Time limit of the question and its answer."""
ID_CHARS = 16
NONCE_CHARS = 32
MAX_ANSWER_BYTES = bounds.PROOF.most_bytes
HEAD_END = b"\r\n\r\n"

MAX_PATH_BYTES = 100
"""Of a Unix socket: the kernel takes 107, and gRPC adds to them."""

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTEN = "0A"
_ANY = (ipaddress.ip_address("0.0.0.0"), ipaddress.ip_address("::"))

log = logging.getLogger("paramd")

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
Address = tuple[Ip, int]


class StrangerError(UnreachableError):
    """Somebody else listens there, who does not know the token; it was not sent."""


class TraceStream(Protocol):
    """A new connection, as `httpcore` gives it to a trace of its events."""

    async def read(self, max_bytes: int) -> bytes: ...
    async def write(self, buffer: bytes) -> None: ...
    async def aclose(self) -> None: ...
    def get_extra_info(self, info: str) -> Any: ...


def token_digest(token: str) -> str:
    """sha256 of a token, 64 hexadecimal digits: all that a control plane keeps of it."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def proof_of(digest: str, nonce: str, host: str, port: int) -> str:
    """The proof that whoever was reached at this address knows the token with this digest."""
    text = f"paramd proof\0{nonce}\0{plain_ip(host)}\0{port}"
    return hmac.digest(digest.encode(), text.encode(), hashlib.sha256).hex()


def plain_ip(text: str) -> Ip:
    """An IP address without its zone, and as IPv4 where IPv6 maps it. Raises ValueError."""
    found = ipaddress.ip_address(text.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped if mapped is not None else found


@dataclass(frozen=True, slots=True)
class Question:
    """One question for a proof, over a connection from `local` to `peer`."""

    url: str
    token: str
    local: Address
    peer: Address
    uids: frozenset[int]
    """Who listens there; empty when nobody of this network namespace is known to."""
    nonce: str

    def head(self) -> bytes:
        """The request."""
        key = token_digest(self.token)[:ID_CHARS]
        return (
            f"GET {PROOF_PATH}?id={key}&nonce={self.nonce} HTTP/1.1\r\n"
            f"host: {urlsplit(self.url).netloc}\r\naccept: application/json\r\n\r\n"
        ).encode("latin-1")

    def check(self, head: bytes, body: bytes) -> None:
        """Raise StrangerError unless the answer holds the proof."""
        host, port = self.peer
        wanted = proof_of(token_digest(self.token), self.nonce, str(host), port)
        try:
            found = json.loads(body)["proof"] if head.split(b" ", 2)[1] == b"200" else ""
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            found = ""
        # JSON may hold any text, lone surrogates too; `compare_digest` takes ASCII alone.
        if not isinstance(found, str) or not found.isascii():
            raise self.refusal()
        if not hmac.compare_digest(found, wanted):
            raise self.refusal()

    def refusal(self) -> StrangerError:
        """Why no token was sent."""
        who = ", ".join(f"uid {uid}" for uid in sorted(self.uids)) or "an unknown user"
        return StrangerError(
            f"{self.url} belongs to {who} now, whose program does not know the token, so the token "
            "was not sent; the control plane may have ended, or come back at another port. "
            "Run: paramd status"
        )


def question(url: str, token: str, sock: socket.socket) -> Question | None:
    """What to ask over a new connection before the token; None where nothing is to be asked.

    Reads this network namespace's table of sockets, which may take milliseconds.

    Raises:
        UnreachableError: If the connection has ended already.
    """
    if urlsplit(url).scheme != "http" or not token:
        return None
    try:
        peer, local = sock.getpeername(), sock.getsockname()
    except OSError as error:
        raise UnreachableError(f"{url}: the connection was closed at once; try again") from error
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    to, by = (plain_ip(peer[0]), int(peer[1])), (plain_ip(local[0]), int(local[1]))
    if not to[0].is_loopback:
        return None
    uids = frozenset(owners(by, to))
    if uids and uids <= {0, os.geteuid()}:
        return None
    return Question(url, token, by, to, uids, secrets.token_hex(NONCE_CHARS // 2))


@dataclass(slots=True)
class Acquaintance:
    """Who listened at a loopback url when it was first called with a key: a server of another
    program, which cannot prove anything, but whose place another user could take once it ends."""

    url: str
    _known: set[int] = field(default_factory=lambda: {0, os.geteuid()})
    _is_new: bool = True

    async def trace(self, event: str, info: dict[str, Any]) -> None:
        """For `extensions={"trace": ...}` of a request: closes a new connection with StrangerError
        before the request is sent if it ends at a user that did not listen there before."""
        if event != "connection.connect_tcp.complete":
            return
        stream: TraceStream = info["return_value"]
        try:
            await asyncio.to_thread(self._look, stream.get_extra_info("socket"))
        except BaseException:
            # The pool has not taken it yet, and would not close it.
            await stream.aclose()
            raise

    def _look(self, sock: socket.socket) -> None:
        try:
            peer, local = sock.getpeername(), sock.getsockname()
        except OSError as error:
            raise UnreachableError(f"{self.url}: the connection was closed at once") from error
        to, by = (plain_ip(peer[0]), int(peer[1])), (plain_ip(local[0]), int(local[1]))
        if not to[0].is_loopback:
            return
        others = owners(by, to) - self._known
        if others and not self._is_new:
            who = ", ".join(f"uid {uid}" for uid in sorted(others))
            raise StrangerError(
                f"{self.url} belongs to {who} now, who did not listen there before, so the key was "
                "not sent; if that is right, start this command again"
            )
        self._is_new = False
        self._known |= others


def owners(local: Address, peer: Address) -> set[int]:
    """Uids of the sockets that a connection from `local` to `peer` of this host ends at.

    That is whoever has accepted it, and all that listen there: the kernel knows no user of a
    connection that waits to be accepted, and shows root's.
    """
    # Looked at first: one that accepts and stops listening meanwhile is among these already. The
    # other way round it would be in neither, as its connection was root's before.
    found = listeners(*peer)
    return found | {uid for here, there, _, uid in _sockets() if (here, there) == (peer, local)}


def way_to(host: str, port: int) -> str:
    """The gRPC target that leads to our own server at a loopback port, "unix:..."; "" without one.

    Its socket outlives the server, so a port that somebody else takes later is not asked instead.

    Raises:
        StrangerError: If the socket is left over, and another user listens at the port.
    """
    path = _private_socket(host, port)
    if not path:
        return ""
    with socket.socket(socket.AF_UNIX) as probe:
        # A server that is stopped, with a full backlog, would have a blocking call wait for ever.
        probe.setblocking(False)
        if probe.connect_ex(path) in (0, errno.EAGAIN):
            return f"unix:{path}"
    # Left over: of a server that has died, or whose port another program has now.
    uids = listeners(plain_ip(host), port)
    if uids <= {0, os.geteuid()}:
        return ""
    who = ", ".join(f"uid {uid}" for uid in sorted(uids))
    raise StrangerError(f"{host}:{port} belongs to {who} now; nothing was sent there")


def socket_beside(url: str) -> str:
    """Return the path of our own Unix socket beside the loopback port of an http url; "" if there
    is none. It may be left over: whoever cannot connect to it uses the port, whose listener
    identifies itself (`question`)."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port if parts.port is not None else 80
        if parts.scheme != "http":
            return ""
        return _private_socket("127.0.0.1" if host == "localhost" else host, port)
    except ValueError:  # a name, or no port
        return ""


def connected_beside(url: str, timeout_s: float) -> socket.socket | None:
    """Connect to our own Unix socket beside `url`; None if there is none, or nobody listens."""
    path = socket_beside(url)
    if not path:
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def place_beside(host: str, port: int) -> Path | None:
    """Free the name of the Unix socket beside a port at which the caller listens already, and
    return it; None: the host is not on loopback, or the path is too long for a socket.

    Without a socket clients use the port. The socket stays when its server ends: so its port is not
    asked in its place, whoever has that by then. Raises OSError and as `sockets_dir`.
    """
    if not is_loopback(host):
        return None
    path = beside_port(str(plain_ip("127.0.0.1" if host == "localhost" else host)), port)
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        return None
    sockets_dir()
    # Another server of ours had the port before.
    path.unlink(missing_ok=True)
    return path


def listener_beside(host: str, port: int) -> Listener | None:
    """Listen at the Unix socket beside a port of ours on loopback; None if there can be none."""
    listener = Listener(socket.AF_UNIX)
    try:
        path = place_beside(host, port)
        if path is not None:
            listener.bind(str(path))
            listener.keep_backlog()
            return listener
    except (OSError, ParamdError) as error:
        log.info("no Unix socket beside port %d: %s", port, error)
    listener.close()
    return None


def _private_socket(host: str, port: int) -> str:
    """Path of the Unix socket beside a loopback port, in a folder of ours alone; "" without one.
    Raises ValueError: the host is no IP address."""
    path = beside_port(str(plain_ip(host)), port)
    try:
        found, folder = path.lstat(), path.parent.lstat()
    except OSError:
        return ""
    is_private = folder.st_uid == os.geteuid() and not stat.S_IMODE(folder.st_mode) & 0o077
    fits = len(bytes(path)) <= MAX_PATH_BYTES
    return str(path) if is_private and fits and stat.S_ISSOCK(found.st_mode) else ""


def listeners(host: Ip, port: int) -> set[int]:
    """Uids of the sockets that listen at an address of this network namespace."""
    return {
        uid
        for here, _, state, uid in _sockets()
        if state == _LISTEN and here[1] == port and here[0] in (host, *_ANY)
    }


def _sockets() -> Iterator[tuple[Address, Address, str, int]]:
    """(local address, remote address, state, uid) of each TCP socket of this network namespace."""
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            yield _address(fields[1]), _address(fields[2]), fields[3], int(fields[7])


def _address(text: str) -> Address:
    """An address of the kernel's table: words in the host's byte order, in hexadecimal digits."""
    host, _, port = text.partition(":")
    words = re.findall("." * 8, host)
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    return plain_ip(str(ipaddress.ip_address(packed))), int(port, 16)


def trace_of(url: str, token: str) -> Callable[[str, dict[str, Any]], Awaitable[None]]:
    """For `extensions={"trace": ...}` of a request: asks over each new connection, and closes it
    with StrangerError before the request is sent if the answer is not the control plane's."""

    async def trace(event: str, info: dict[str, Any]) -> None:
        if event != "connection.connect_tcp.complete":
            return
        stream: TraceStream = info["return_value"]
        sock = stream.get_extra_info("socket")
        try:
            asked = await asyncio.to_thread(question, url, token, sock)
            if asked is not None:
                asked.check(*await _asked_over(stream, asked))
        except BaseException:
            # The pool has not taken it yet, and would not close it.
            await stream.aclose()
            raise

    return trace


async def _asked_over(stream: TraceStream, asked: Question) -> tuple[bytes, bytes]:
    """(head, body) of the answer. Raises StrangerError without one."""
    taken = b""
    try:
        async with asyncio.timeout(PROOF_S):
            await stream.write(asked.head())
            while (answer := answer_of(taken)) is None:
                part = await stream.read(MAX_ANSWER_BYTES)
                if not part:
                    raise EOFError
                taken += part
    except Exception as error:  # those of httpcore among them, which this package does not know
        raise asked.refusal() from error
    return answer


def answer_of(taken: bytes) -> tuple[bytes, bytes] | None:
    """(head, body) of a whole answer; None while there is more to come.

    Raises:
        ValueError: It is no answer, or too long.
    """
    if len(taken) > MAX_ANSWER_BYTES:
        raise ValueError("the answer is too long")
    head, end, body = taken.partition(HEAD_END)
    if not end:
        return None
    size = length_of(head)
    return (head, body[:size]) if len(body) >= size else None


def length_of(head: bytes) -> int:
    """Bytes of the body behind this head.

    Raises:
        ValueError: Without a length, or a long one.
    """
    length = re.search(rb"(?im)^content-length: *(\d{1,4})\s*$", head)
    if length is None:
        raise ValueError("the answer has no length, or is too long")
    return int(length[1])


def ask_over(sock: socket.socket, url: str, token: str) -> None:
    """As `trace_of`, over a connected blocking socket, which stays open. Raises StrangerError."""
    asked = question(url, token, sock)
    if asked is None:
        return
    before_s, until_s = sock.gettimeout(), time.monotonic() + PROOF_S
    sock.settimeout(PROOF_S)
    try:
        sock.sendall(asked.head())
        taken = b""
        while (answer := answer_of(taken)) is None:
            # Of all of it: a stranger may send a byte at a time.
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            sock.settimeout(left_s)
            part = sock.recv(MAX_ANSWER_BYTES)
            if not part:
                raise EOFError
            taken += part
    except (OSError, EOFError, ValueError) as error:
        raise asked.refusal() from error
    finally:
        sock.settimeout(before_s)
    asked.check(*answer)
