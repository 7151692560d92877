"""A small certificate authority for trials and tests: ECDSA P-256, PEM files in one directory.

    ca.pem ca.key             the CA; created once, then kept
    server.pem server.key     for servers, with their names
    client.pem client.key     for clients of servers that require one (mTLS)

Each file is replaced atomically, the key before its certificate.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paramd.errors import ConflictError, UsageError

CA_DAYS = 397
_BACKDATED = timedelta(minutes=5)

Signed = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]


def write(directory: Path, *, names: Sequence[str], days: float) -> list[Path]:
    """Write the files above, creating a CA if there is none; return their paths.

    Args:
        names: DNS names and IP addresses of the server.
        days: Validity of the two certificates.

    Raises:
        UsageError: an invalid name, or the directory cannot be written.
        ConflictError: the directory's CA cannot be read.
    """
    alternatives = [alternative(name) for name in names]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(directory)
        server = _signed(
            authority, "paramd server", alternatives, ExtendedKeyUsageOID.SERVER_AUTH, days
        )
        client = _signed(authority, "paramd client", [], ExtendedKeyUsageOID.CLIENT_AUTH, days)
        _save(directory, "server", server)
        _save(directory, "client", client)
    except OSError as error:
        raise UsageError(f"{directory} cannot be used: {error}") from error
    stems = ("ca", "server", "client")
    return [directory / f"{stem}{kind}" for stem in stems for kind in (".pem", ".key")]


def _authority(directory: Path) -> Signed:
    cert_path, key_path = directory / "ca.pem", directory / "ca.key"
    if not cert_path.exists() and not key_path.exists():
        made = _new_authority()
        _save(directory, "ca", made)
        return made
    try:
        certificate = x509.load_pem_x509_certificate(cert_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConflictError(
            f"{directory} holds a CA that cannot be read ({type(error).__name__}); name another "
            "directory"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConflictError(f"{key_path} is not a key of ours; name another directory")
    return key, certificate


def _new_authority() -> Signed:
    now = datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    end = now + timedelta(days=CA_DAYS)
    return new_ca(key, common_name("paramd test CA"), begin=now - _BACKDATED, end=end)


def new_ca(
    key: ec.EllipticCurvePrivateKey, name: x509.Name, *, begin: datetime, end: datetime
) -> Signed:
    """A CA of this key, which signs end entities alone."""
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(name, name, key.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return key, builder.sign(key, hashes.SHA256())


def _signed(
    authority: Signed,
    name: str,
    alternatives: Sequence[x509.GeneralName],
    purpose: x509.ObjectIdentifier,
    days: float,
) -> Signed:
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    return sign_leaf(authority, name, alternatives, [purpose], begin=now - _BACKDATED, end=end)


def sign_leaf(
    authority: Signed,
    name: str,
    alternatives: Sequence[x509.GeneralName],
    purposes: Sequence[x509.ObjectIdentifier],
    *,
    begin: datetime,
    end: datetime,
) -> Signed:
    """A certificate with a fresh key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = common_name(name)
    return key, sign(
        authority, subject, key.public_key(), alternatives, purposes, begin=begin, end=end
    )


def sign(
    authority: Signed,
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    alternatives: Sequence[x509.GeneralName],
    purposes: Sequence[x509.ObjectIdentifier],
    *,
    begin: datetime,
    end: datetime,
) -> x509.Certificate:
    """A certificate for a key that somebody else may hold."""
    ca_key, ca = authority
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = (
        _builder(subject, ca.subject, key, begin, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(issuer, critical=False)
    )
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def common_name(text: str) -> x509.Name:
    """A subject of at most 64 characters."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def alternative(name: str) -> x509.GeneralName:
    """A DNS name or an IP address. Raises UsageError if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise UsageError(f"--name: {name!r} is no DNS name or IP address ({error})") from None


def _save(directory: Path, stem: str, signed: Signed) -> None:
    key, certificate = signed
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _replace(directory / f"{stem}.key", private, 0o600)
    _replace(directory / f"{stem}.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _replace(path: Path, data: bytes, mode: int) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
