"""The client side of TLS: trust settings, and addresses.

An address is "host:port", or "grpcs://host:port" if its server speaks TLS. Settings:

    PARAMD_TLS_CA            file of CA certificates to trust, instead of the system's
    PARAMD_TLS_CLIENT_CERT   our certificate, for servers that require one (mTLS)
    PARAMD_TLS_CLIENT_KEY    its private key
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio

from paramd.errors import DeniedError, UsageError

SCHEME = "grpcs://"
MAX_FILE_BYTES = 1 << 20

_ADDRESS = re.compile(r"(grpcs://)?(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}")

Options = Sequence[tuple[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientTls:
    """A client's TLS files; all None uses the system's trust store."""

    ca: Path | None = None
    """CA certificates to trust."""
    cert: Path | None = None
    """Our own certificate, with the chain to its CA."""
    key: Path | None = None
    """Its private key."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise UsageError(
                "PARAMD_TLS_CLIENT_CERT and PARAMD_TLS_CLIENT_KEY belong together; set both"
            )

    @classmethod
    def from_environment(cls, ca: str | os.PathLike[str] | None = None) -> ClientTls:
        """The settings above; `ca` overrides its variable.

        Raises:
            UsageError: certificate without key, or key without certificate.
        """
        return cls(
            ca=Path(ca).expanduser() if ca is not None else _path("PARAMD_TLS_CA"),
            cert=_path("PARAMD_TLS_CLIENT_CERT"),
            key=_path("PARAMD_TLS_CLIENT_KEY"),
        )

    def stamp(self) -> tuple[int, ...]:
        """Changes when a file does, so that what was made from the files can be renewed."""
        return stamp_of(path for path in (self.ca, self.cert, self.key) if path is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For gRPC channels. Raises UsageError when a file cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=read_pem(self.ca) if self.ca is not None else None,
            private_key=read_pem(self.key) if self.key is not None else None,
            certificate_chain=read_pem(self.cert) if self.cert is not None else None,
        )

    def ssl_context(self, least: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2) -> ssl.SSLContext:
        """For HTTPS and streams. Raises UsageError when a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.minimum_version = least
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"TLS: the files of PARAMD_TLS_* cannot be used: {error}") from error
        return context


def check_address(address: str) -> str:
    """Return `address` if it has one of the two forms above; no other gRPC target passes.

    Raises:
        UsageError: any other text.
    """
    if not _ADDRESS.fullmatch(address):
        raise UsageError(
            f"address: {address[:200]!r}; expected host:port, or grpcs://host:port with TLS"
        )
    return address


def host_of(address: str) -> str:
    """Host of an address, without scheme, port and brackets."""
    host = address.removeprefix(SCHEME).rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")


def is_secure(address: str) -> bool:
    """Whether the server at a gRPC address speaks TLS."""
    return address.startswith(SCHEME)


def open_channel(
    address: str, tls: ClientTls | None = None, *, options: Options = ()
) -> grpc.aio.Channel:
    """An asyncio channel to an address. No I/O except reading the files.

    Args:
        tls: None takes it from the environment.

    Raises:
        DeniedError: another host without TLS: the ticket would cross the network in the clear.
        UsageError: a file cannot be read, or the address is invalid.
    """
    check_address(address)
    if is_secure(address):
        tls = tls if tls is not None else ClientTls.from_environment()
        target = address.removeprefix(SCHEME)
        return grpc.aio.secure_channel(target, tls.channel_credentials(), options=options)
    if not is_loopback(address.rpartition(":")[0]):
        raise DeniedError(
            f"{address[:200]} is on another host and has no TLS; a ticket would cross the network "
            "unencrypted. Give its server a certificate (PARAMD_TLS_CERT, PARAMD_TLS_KEY)"
        )
    return grpc.aio.insecure_channel(address, options=options)


def https_context(url: str, tls: ClientTls | None = None) -> ssl.SSLContext | bool:
    """The `verify` argument of an HTTP client for `url`; True is the client's own default.

    Args:
        tls: None takes it from the environment.

    Raises:
        UsageError: the URL would send a token unencrypted to another host, or a TLS file
            cannot be used.
    """
    parts = urlsplit(url)
    if parts.scheme == "https":
        return (tls if tls is not None else ClientTls.from_environment()).ssl_context()
    if not is_loopback(parts.hostname or ""):
        raise UsageError(
            f"url: {url!r} is on another host and not https; the token would cross the network "
            "unencrypted. Use https, or forward the port and use http://127.0.0.1"
        )
    return True


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, possibly in brackets) is this machine."""
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_pem(path: Path) -> bytes:
    """The bytes of a small file. Raises UsageError, whose message never contains them."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"TLS: {path} cannot be read: {error.strerror}") from error
    if not data or len(data) > MAX_FILE_BYTES:
        raise UsageError(f"TLS: {path} has {len(data)} bytes; expected PEM of up to 1 MiB")
    return data


def stamp_of(paths: Any) -> tuple[int, ...]:
    """Changes when one of the files is replaced or written; a missing one counts as 0."""
    found: list[int] = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            found.append(0)
            continue
        found += (status.st_mtime_ns, status.st_ino, status.st_size)
    return tuple(found)


def _path(name: str) -> Path | None:
    text = os.environ.get(name)
    return Path(text).expanduser() if text else None
