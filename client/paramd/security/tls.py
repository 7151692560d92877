"""The client side of TLS: trust settings, and addresses.

An address is "host:port", "grpcs://host:port" if its server speaks TLS with certificates of the
operator's, or "mtls://host:port" if it speaks mutual TLS within a job, whose own CA every rank and
client receives. Settings for grpcs:// and https://:

    PARAMD_TLS_CA            file of CA certificates to trust, instead of the system's
    PARAMD_TLS_CLIENT_CERT   our certificate, for servers that require one (mTLS)
    PARAMD_TLS_CLIENT_KEY    its private key
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paramd import bounds
from paramd.errors import DeniedError, UnreachableError, UsageError
from paramd.state_files import check_private

if TYPE_CHECKING:
    # Trainers have certificates and open no channels: gRPC stays out of their processes.
    import grpc
    import grpc.aio

SCHEME = "grpcs://"
JOB_SCHEME = "mtls://"
PIN = "sha256:"
"""Prefix of the fingerprint of a CA's public key, which may replace a file of CA certificates."""

CA_PATH = "/ca.pem"
"""Path at which a control plane with its own CA shows it."""

RANK_NAME = "paramd rank "
"""Prefix of the rank in the name of a rank's certificate."""

IF_MOVED = (
    " If a job's control plane was started again at another port, its new url is in "
    "<state dir>/JOB/endpoint.json on its host; token and fingerprint are the same"
)
"""Advice for a url that was given and does not answer."""

PINNED_S = bounds.CA_FILE.within_s
MAX_FILE_BYTES = bounds.CA_FILE.most_bytes

_ADDRESS = re.compile(
    r"(grpcs://|mtls://)?(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}"
)

Options = Sequence[tuple[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pems:
    """CA, certificate and private key as PEM, in memory only; made by `authority`."""

    ca: bytes
    """The job's CA certificate."""
    cert: bytes = b""
    """Our own certificate; empty: none, for connections that need no client certificate."""
    key: bytes = field(default=b"", repr=False)

    def to_json(self) -> dict[str, str]:
        """For a pipe, a Unix socket or a TLS connection; it includes the key."""
        return {"ca": self.ca.decode(), "cert": self.cert.decode(), "key": self.key.decode()}

    @classmethod
    def of_json(cls, found: object) -> Pems:
        """The inverse of `to_json`; UsageError, which never quotes `found`, for anything else."""
        try:
            assert isinstance(found, Mapping)
            parts = [found[name].encode("ascii") for name in ("ca", "cert", "key")]
        except (AssertionError, KeyError, AttributeError, ValueError):
            raise UsageError("tls: expected the PEM texts ca, cert and key") from None
        if any(len(part) > MAX_FILE_BYTES for part in parts) or not parts[0]:
            raise UsageError("tls: the PEM texts ca, cert and key are missing or too long")
        return cls(ca=parts[0], cert=parts[1], key=parts[2])

    def stamp(self) -> tuple[int, ...]:
        """Differs for other certificates."""
        return (int.from_bytes(hashlib.sha256(self.ca + b"\0" + self.cert).digest()[:8], "big"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientTls:
    """A client's TLS files; all None uses the system's trust store."""

    ca: Path | None = None
    """CA certificates to trust."""
    cert: Path | None = None
    """Our own certificate, with the chain to its CA."""
    key: Path | None = None
    """The certificate's private key."""
    pems: Pems | None = None
    """A job's own, instead of all files."""
    pin: str = ""
    """Fingerprint of a job's own CA, "sha256:..."; its control plane provides the CA."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise UsageError(
                "PARAMD_TLS_CLIENT_CERT and PARAMD_TLS_CLIENT_KEY belong together; set both"
            )

    @classmethod
    def from_environment(cls, ca: str | os.PathLike[str] | None = None) -> ClientTls:
        """The settings above; `ca` overrides its variable. UsageError: half a pair, or bad pin."""
        named = str(ca) if ca is not None else os.environ.get("PARAMD_TLS_CA", "")
        pin = named.lower() if named.startswith(PIN) else ""
        if pin and not re.fullmatch(r"sha256:[0-9a-f]{64}", pin):
            raise UsageError(f"tls_ca: {named[:80]!r}; expected sha256: and 64 hexadecimal digits")
        return cls(
            ca=Path(named).expanduser() if named and not pin else None,
            pin=pin,
            cert=_path("PARAMD_TLS_CLIENT_CERT"),
            key=_path("PARAMD_TLS_CLIENT_KEY"),
        )

    def stamp(self) -> tuple[int, ...]:
        """Changes when a file does, so that what was made from the files can be renewed."""
        if self.pems is not None:
            return self.pems.stamp()
        return stamp_of(path for path in (self.ca, self.cert, self.key) if path is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For gRPC channels.

        Raises:
            UsageError: When a file cannot be read.
        """
        import grpc

        if self.key is not None:
            check_private(self.key)
        if self.pems is not None:
            pems = self.pems
            return grpc.ssl_channel_credentials(pems.ca, pems.key or None, pems.cert or None)
        files = (self.ca, self.key, self.cert)
        return grpc.ssl_channel_credentials(*(read_pem(one) if one else None for one in files))

    def ssl_context(self, least: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2) -> ssl.SSLContext:
        """For HTTPS and streams.

        Raises:
            UsageError: When a file cannot be used.
        """
        try:
            if self.pems is not None:
                context = ssl.create_default_context(cadata=self.pems.ca.decode())
                if self.pems.cert:
                    load_chain(context, self.pems.cert, self.pems.key)
            else:
                context = ssl.create_default_context(cafile=self.ca)
            context.minimum_version = least
            if self.key is not None:
                check_private(self.key)
            if self.pems is None and self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"TLS: the files of PARAMD_TLS_* cannot be used: {error}") from error
        return context


def check_address(address: str) -> str:
    """Return `address` if it has one of the forms above; UsageError for any other target."""
    if not _ADDRESS.fullmatch(address):
        raise UsageError(
            f"address: {address[:200]!r}; expected host:port, or grpcs://host:port with TLS"
        )
    return address


def host_of(address: str) -> str:
    """Host of an address, without scheme, port and brackets."""
    return address.rpartition("://")[2].rpartition(":")[0].removeprefix("[").removesuffix("]")


def is_secure(address: str) -> bool:
    """Whether the server at a gRPC address speaks TLS."""
    return address.startswith((SCHEME, JOB_SCHEME))


def is_of_job(address: str) -> bool:
    """Whether the server at an address speaks mutual TLS within a job."""
    return address.startswith(JOB_SCHEME)


def tls_for(address: str, tls: ClientTls | None, pems: Pems | None) -> ClientTls | None:
    """The TLS for a connection to `address`: the job's `pems` if it is of a job, else `tls`."""
    return ClientTls(pems=pems) if is_of_job(address) and pems is not None else tls


def open_channel(
    address: str, tls: ClientTls | None = None, *, options: Options = (), way: str = ""
) -> grpc.aio.Channel:
    """An asyncio channel to an address. No I/O except reading the files.

    `tls`: None takes it from the environment; for mtls:// it must be the job's. `way`: gRPC target
    to connect to instead, such as "unix:...": bytes written there arrive at the address.

    Raises:
        DeniedError: For another host without TLS: the ticket would cross the network in the
            clear.
        UsageError: If a file cannot be read, or the address is invalid.
    """
    from paramd.security.channel import open_bounded

    check_address(address)
    if is_secure(address):
        tls = tls if tls is not None else ClientTls.from_environment()
        if is_of_job(address) and tls.pems is None:
            raise DeniedError(
                f"{address[:200]} speaks TLS within its job, and no certificate of the job is "
                "known here; connect to the job again, with the same version of paramd as it has"
            )
        target = address.rpartition("://")[2]
        if way:
            options = (*options, ("grpc.ssl_target_name_override", host_of(address)))
        return open_bounded(way or target, tls.channel_credentials(), options)
    if way:
        return open_bounded(way, None, options)
    if not is_loopback(address.rpartition(":")[0]):
        raise DeniedError(
            f"{address[:200]} is on another host and has no TLS; a ticket would cross the network "
            "unencrypted. Give its server a certificate (PARAMD_TLS_CERT, PARAMD_TLS_KEY)"
        )
    return open_bounded(address, None, options)


def https_context(url: str, tls: ClientTls | None = None) -> ssl.SSLContext | bool:
    """The `verify` argument of an HTTP client for `url`; True is the client's own default.

    `tls` None takes it from the environment.

    Raises:
        UsageError: If the URL would send a token unencrypted to another host, or a TLS file
            cannot be used, else as `pinned`.
    """
    parts = urlsplit(url)
    if parts.scheme == "https":
        tls = tls if tls is not None else ClientTls.from_environment()
        return (tls if not tls.pin else pinned(url, tls.pin)).ssl_context()
    if not is_loopback(parts.hostname or ""):
        raise UsageError(
            f"url: {url!r} is on another host and not https; the token would cross the network "
            "unencrypted. Use https, or forward the port and use http://127.0.0.1"
        )
    return True


def pinned(url: str, pin: str) -> ClientTls:
    """Trust in the CA of this fingerprint, which the control plane at `url` shows. Blocks.

    The CA is public and is checked against `pin`; no token is sent.

    Raises:
        UnreachableError: Without an answer.
        UsageError: For another CA, or none.
    """
    import http.client  # here, because sidecars and ranks pin nothing

    parts = urlsplit(url)
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port, timeout=PINNED_S, context=unchecked
    )
    try:
        connection.request("GET", CA_PATH)
        answer = connection.getresponse()
        found = answer.read(MAX_FILE_BYTES) if answer.status == 200 else b""
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(
            f"tls_ca: {url} does not show its CA ({error}); is the job running?{IF_MOVED}"
        ) from error
    finally:
        connection.close()
    shown = pin_of(found) if found else "none"
    if shown != pin:
        raise UsageError(
            f"tls_ca: {url} has another CA ({shown}) than {pin}: it is another run of the "
            "job, or another program; take the fingerprint from its endpoint.json"
        )
    return ClientTls(pems=Pems(ca=found))


def verify_advice(code: int, ca: Path | None) -> str:
    """The remedy for OpenSSL's `code`; `ca`: the file of trusted CAs, None for the system's."""
    expired, not_yet, wrong_name, wrong_ip = 10, 9, 62, 64
    if code in (expired, not_yet):
        return "renew its certificate, or correct this machine's clock"
    if code in (wrong_name, wrong_ip):
        return "use a name in its certificate, or issue one for this name"
    used = f"{ca} is not its CA" if ca is not None else "the system does not trust its CA"
    return f"{used}; give the right one with --tls-ca FILE or PARAMD_TLS_CA"


def not_accepted(error: BaseException | None, ca: Path | None) -> str:
    """The problem with a server's certificate, and the remedy, if that caused an error."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"{error.verify_message}; {verify_advice(error.verify_code, ca)}"
        error = error.__cause__ or error.__context__
    return ""


def pin_of(ca: bytes) -> str:
    """Fingerprint of the public key of a CA certificate (PEM): "sha256:" and 64 digits.

    Of the key, as every process of a CA signs its certificate again. UsageError: no certificate.
    """
    # Imported only with a job's own CA: it is slow to load.
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        key = x509.load_pem_x509_certificate(ca).public_key()
    except ValueError:
        raise UsageError("tls: the text of the CA is not a certificate") from None
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return PIN + hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, possibly in brackets) is this machine."""
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bindable(listen: str) -> str:
    """`listen`; on ::1 where it names 127.0.0.1, and this machine's loopback has ::1 alone."""
    host, _, port = listen.rpartition(":")
    if host != "127.0.0.1" or _binds(socket.AF_INET, host) or not _binds(socket.AF_INET6, "::1"):
        return listen
    return f"[::1]:{port}"


def _binds(family: socket.AddressFamily, host: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def load_chain(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Give a context our certificate and key from memory; `ssl` itself only takes files.

    Raises ssl.SSLError if they do not fit, or are no PEM.
    """
    # In memory: they are on no disk. OpenSSL reads it, and maps nothing that could shrink.
    descriptor = os.memfd_create("paramd-tls", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.pwrite(descriptor, cert + b"\n" + key, 0)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


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
