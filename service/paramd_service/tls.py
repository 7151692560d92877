"""Server-side TLS: certificate, key and client CA from files that may be replaced, or from memory.

The files are checked in every handshake: a new certificate takes effect with the next one, while
existing connections keep theirs. While files do not match (one of two has been replaced), the last
good ones stay in force.

    PARAMD_TLS_CERT        certificate, with the chain to its CA
    PARAMD_TLS_KEY         its private key
    PARAMD_TLS_CLIENT_CA   clients must present a certificate of this CA (mTLS)
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from paramd.errors import UsageError
from paramd.security.tls import (
    JOB_SCHEME,
    SCHEME,
    Pems,
    is_loopback,
    load_chain,
    read_pem,
    stamp_of,
)
from paramd.state_files import check_private

if TYPE_CHECKING:
    import grpc
    from cryptography.x509 import Certificate

log = logging.getLogger("paramd.security.tls")


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """Paths of a server's TLS files."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    """None: clients need no certificate, only their token or ticket."""

    def stamp(self) -> tuple[int, ...]:
        """Changes when any of the files does."""
        return stamp_of(path for path in (self.cert, self.key, self.client_ca) if path is not None)

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Certificate, key, client CA (None: clients need no certificate).

        Raises:
            UsageError: If one cannot be read, or if everybody can read the key.
        """
        check_private(self.key)
        client_ca = read_pem(self.client_ca) if self.client_ca is not None else None
        return read_pem(self.cert), read_pem(self.key), client_ca

    def __str__(self) -> str:
        return f"{self.cert}, {self.key} or the client CA"


class JobPems:
    """A job's own certificate, in memory."""

    def __init__(self, pems: Pems, *, mutual: bool) -> None:
        """With `mutual`, clients must also show a certificate of the job."""
        self.pems = pems
        """A replacement takes effect from the next handshake on."""
        self._mutual = mutual

    def stamp(self) -> tuple[int, ...]:
        return self.pems.stamp()

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        return self.pems.cert, self.pems.key, self.pems.ca if self._mutual else None

    def __str__(self) -> str:
        return "the job's certificate"


TlsSource: TypeAlias = TlsFiles | JobPems


def tls_files(cert: str, key: str, client_ca: str) -> TlsFiles | None:
    """The files named by options, else by the environment; None if there are none.

    Raises:
        UsageError: If only one of certificate and key is given, or a client CA without them.
    """
    names = ("PARAMD_TLS_CERT", "PARAMD_TLS_KEY", "PARAMD_TLS_CLIENT_CA")
    given = zip((cert, key, client_ca), names, strict=True)
    cert, key, client_ca = (value or os.environ.get(name, "") for value, name in given)
    if not cert and not key and not client_ca:
        return None
    if not cert or not key:
        raise UsageError(
            "TLS: --tls-cert and --tls-key (PARAMD_TLS_CERT, PARAMD_TLS_KEY) belong together, "
            "and a client CA needs both"
        )
    return TlsFiles(
        cert=Path(cert).expanduser(),
        key=Path(key).expanduser(),
        client_ca=Path(client_ca).expanduser() if client_ca else None,
    )


def check_exposure(host: str, *, option: str, tls: bool) -> None:
    """Return if a server may listen on `host`: every server takes tokens or tickets.

    Raises:
        UsageError: If other hosts could reach it, and there is no TLS.
    """
    if is_loopback(host):
        return
    if not tls:
        raise UsageError(
            f"{option}: {host!r} is not a loopback address, and there is no TLS: tokens, tickets "
            "and parameters would cross the network unencrypted. Give --tls-cert and --tls-key "
            "(try paramd certs init), or listen on 127.0.0.1 and forward the port, for example: "
            "ssh -L 8470:127.0.0.1:8470 HOST"
        )


@dataclass(frozen=True, slots=True)
class _Loaded:
    stamp: tuple[int, ...]
    cert: bytes
    key: bytes
    client_ca: bytes | None
    expires_s: float
    names: frozenset[str]


class ServerTls:
    """TLS of one server; its credentials follow the files as they are replaced."""

    def __init__(self, source: TlsSource) -> None:
        """Read the source.

        Raises:
            UsageError: If it is unusable.
        """
        self._source = source
        self._loaded = _load(source)
        self._tried = self._loaded.stamp
        self.failure = ""
        """Why the current files are not in force; empty while they are."""

    @property
    def expires_s(self) -> float:
        """When the certificate in force expires, in seconds since the Unix epoch."""
        return self._loaded.expires_s

    @property
    def names(self) -> frozenset[str]:
        """The certificate's DNS names and IP addresses, in lower case."""
        return self._loaded.names

    def refresh(self) -> bool:
        """Load files that were replaced; return whether it did. Never raises."""
        stamp = self._source.stamp()
        if stamp in (self._loaded.stamp, self._tried):
            return False
        self._tried = stamp
        try:
            self._loaded = _load(self._source)
        except UsageError as error:
            self.failure = str(error)
            log.error("%s; the last good certificate stays in force", error)
            return False
        self.failure = ""
        log.info("TLS: a new certificate is in force (%s)", self._source)
        return True

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for one call of `add_secure_port`; checks the files in every handshake.

        gRPC takes the initial certificate only once from each credentials object, so a second
        port needs a new object, even one tried because the first was taken.
        """
        # Imported only here: a control plane publishes its addresses before it loads gRPC.
        import grpc

        seen = [self._loaded]

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            self.refresh()
            if self._loaded is seen[0]:
                return None
            seen[0] = self._loaded
            return _grpc_configuration(self._loaded)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(self._loaded),
            renewed,  # type: ignore[arg-type] # None means unchanged
            require_client_authentication=self._loaded.client_ca is not None,
        )

    def ssl_context(self, least: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2) -> ssl.SSLContext:
        """For HTTPS and streams, of `least` or newer; checks the files in every handshake."""
        outer = self._context(least)
        seen, current = [self._loaded], [outer]

        def at_handshake(sock: ssl.SSLObject, _name: str | None, _old: ssl.SSLContext) -> None:
            self.refresh()
            if self._loaded is not seen[0]:
                current[0], seen[0] = self._context(least), self._loaded
            sock.context = current[0]

        outer.sni_callback = at_handshake
        return outer

    def _context(self, least: ssl.TLSVersion) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = least
        context.set_alpn_protocols(["http/1.1"])
        load_chain(context, self._loaded.cert, self._loaded.key)
        if self._loaded.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=self._loaded.client_ca.decode())
        return context


def advertised(listen_host: str, advertise: str, *, tls: bool) -> str:
    """The host that others connect to: `advertise` (or PARAMD_ADVERTISE), else where it listens.

    Raises:
        UsageError: If it listens on every address with TLS, and no name was given.
    """
    advertise = advertise or os.environ.get("PARAMD_ADVERTISE", "")
    if advertise:
        return advertise
    try:
        everywhere = ipaddress.ip_address(listen_host).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere and tls:
        raise UsageError(
            f"listen: {listen_host} is every address of this host; say under which name others "
            "find it, as its certificate has it: --advertise HOST (PARAMD_ADVERTISE)"
        )
    return listen_host


def grpc_address(host: str, port: int, *, tls: bool, of_job: bool = False) -> str:
    """The address given to clients: "host:port", "grpcs://host:port" or "mtls://host:port"."""
    name = f"[{host}]" if ":" in host else host
    scheme = JOB_SCHEME if of_job else SCHEME
    return f"{scheme if tls else ''}{name}:{port}"


def _load(source: TlsSource) -> _Loaded:
    # Imported only with TLS: a tenth of a sidecar's memory.
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    # Before reading, so that files replaced meanwhile count as changed again.
    stamp = source.stamp()
    cert, key, client_ca = source.read()
    try:
        first = x509.load_pem_x509_certificates(cert)[0]
        fits = load_pem_private_key(key, None).public_key() == first.public_key()
        if client_ca is not None:
            x509.load_pem_x509_certificates(client_ca)
    except (ValueError, TypeError) as error:
        # Not the error's text, which may quote the key.
        raise UsageError(
            f"TLS: {source} is not readable PEM ({type(error).__name__}); keys must not "
            "be encrypted"
        ) from None
    if not fits:
        raise UsageError(f"TLS: the key in {source} is not the key of the certificate there")
    expires_s = first.not_valid_after_utc.timestamp()
    return _Loaded(stamp, cert, key, client_ca, expires_s, _names(first))


def _names(certificate: Certificate) -> frozenset[str]:
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    dns = found.get_values_for_type(x509.DNSName)
    addresses = found.get_values_for_type(x509.IPAddress)
    return frozenset(str(name).lower() for name in (*dns, *addresses))


def _grpc_configuration(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
    import grpc

    return grpc.ssl_server_certificate_configuration(
        [(loaded.key, loaded.cert)], root_certificates=loaded.client_ca
    )
