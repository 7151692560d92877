"""Certificate authorities: a job's own, and one for trials and tests. ECDSA P-256.

A job's is for ranks on several hosts. Its key derives from the key that signs the incarnation's
tickets. So rank 0 and the control plane, which have that one, can both issue certificates, a
restarted control plane is the same authority without having recorded anything, and there is no new
secret. It ends with its incarnation. A certificate states only that its holder belongs to the job;
its ticket states the holder's rights.

The other one has PEM files in one directory, each replaced atomically, the key before its
certificate:

    ca.pem ca.key             the CA; created once, then kept
    server.pem server.key     for servers, with their names
    client.pem client.key     for clients of servers that require one (mTLS)
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paramd import state_files
from paramd.errors import ConflictError, UsageError
from paramd.security.tickets import RANK_TICKET_TTL_S
from paramd.security.tls import RANK_NAME, Pems, pin_of

CA_DAYS = 397
_TRIAL_BACKDATED = timedelta(minutes=5)

CLIENT_S = 2 * 86_400.0
"""Validity of a client's certificate; a new one comes with the job's document."""

BACKDATED = timedelta(days=1)
"""Certificates begin this long ago: hosts' clocks may differ by hours."""

_BOTH = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
_BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
_END = datetime(2200, 1, 1, tzinfo=UTC)
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names in every certificate: forwarded ports and clients on the host itself use them."""

Signed = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]


class JobAuthority:
    """Issues the certificates of one incarnation of a job. Holds a key: never log or pickle it."""

    __slots__ = ("_ca", "pem")

    def __init__(self, private_key: bytes, *, job: str, incarnation: int) -> None:
        """`private_key` signs the incarnation's tickets."""
        label = f"paramd job CA\0{job}\0{incarnation}".encode()
        # Twice the order's length: the remainder is as good as evenly distributed.
        seed = b"".join(
            hmac.digest(private_key, label + bytes([part]), hashlib.sha256) for part in range(2)
        )
        number = int.from_bytes(seed, "big") % (_P256_ORDER - 1) + 1
        key = ec.derive_private_key(number, ec.SECP256R1())
        name = common_name(f"paramd job {job[:40]}, run {incarnation}")
        self._ca: Signed = new_ca(key, name, begin=_BEGIN, end=_END)
        self.pem = _pem(self._ca[1])
        """The CA's certificate."""

    @property
    def pin(self) -> str:
        """Fingerprint of the CA's public key, "sha256:" and 64 hexadecimal digits."""
        return pin_of(self.pem)

    def issue(
        self, name: str, hosts: Sequence[str] = (), *, lifetime_s: float = RANK_TICKET_TTL_S
    ) -> Pems:
        """A certificate with a fresh key, for both ends of a connection.

        `name` is the holder's, for people. `hosts`: addresses and names that others connect to,
        beside those of loopback; a client has none.

        Raises:
            UsageError: If one of them is neither. Valid for `lifetime_s` from now on; a rank's
                as long as its ticket.
        """
        names = [*hosts, *LOOPBACK_NAMES] if hosts else []
        purposes = _BOTH if hosts else _BOTH[:1]
        key, certificate = sign_leaf(
            self._ca,
            name,
            [alternative(host) for host in dict.fromkeys(names)],
            purposes,
            begin=datetime.now(UTC) - BACKDATED,
            end=datetime.now(UTC) + timedelta(seconds=lifetime_s),
        )
        return Pems(ca=self.pem, cert=_pem(certificate), key=_private_pem(key))

    def issue_ranks(self, hosts: Sequence[str], first: int = 0) -> list[Pems]:
        """A certificate for each rank from `first` on, by its address. Raises as `issue`."""
        return [self.issue(f"{RANK_NAME}{rank}", [host]) for rank, host in enumerate(hosts, first)]


def write(directory: Path, *, names: Sequence[str], days: float) -> list[Path]:
    """Write the files above, creating a CA if there is none; return their paths.

    `names` are DNS names and IP addresses of the server, `days` the validity of the two
    certificates.

    Raises:
        UsageError: For an invalid name or a directory that cannot be written.
        ConflictError: If the directory's CA cannot be read.
    """
    alternatives = [alternative(name) for name in names]
    now = datetime.now(UTC)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(directory)
        begin, end = now - _TRIAL_BACKDATED, now + timedelta(days=days)
        for stem, names_of, purpose in (
            ("server", alternatives, ExtendedKeyUsageOID.SERVER_AUTH),
            ("client", [], ExtendedKeyUsageOID.CLIENT_AUTH),
        ):
            signed = sign_leaf(
                authority, f"paramd {stem}", names_of, [purpose], begin=begin, end=end
            )
            _save(directory, stem, signed)
    except OSError as error:
        raise UsageError(f"{directory} cannot be used: {error}") from error
    stems = ("ca", "server", "client")
    return [directory / f"{stem}{kind}" for stem in stems for kind in (".pem", ".key")]


def _authority(directory: Path) -> Signed:
    cert_path, key_path = directory / "ca.pem", directory / "ca.key"
    if not cert_path.exists() and not key_path.exists():
        now, new_key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
        begin, end = now - _TRIAL_BACKDATED, now + timedelta(days=CA_DAYS)
        made = new_ca(new_key, common_name("paramd test CA"), begin=begin, end=end)
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
        raise ConflictError(f"{key_path} was not made by paramd; name another directory")
    return key, certificate


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


def sign_leaf(
    authority: Signed,
    name: str,
    alternatives: Sequence[x509.GeneralName],
    purposes: Sequence[x509.ObjectIdentifier],
    *,
    begin: datetime,
    end: datetime,
) -> Signed:
    key, (ca_key, ca) = ec.generate_private_key(ec.SECP256R1()), authority
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = (
        _builder(common_name(name), ca.subject, key.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(issuer, critical=False)
    )
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return key, builder.sign(ca_key, hashes.SHA256())


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
    """A DNS name or an IP address.

    Raises:
        UsageError: If it is neither.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise UsageError(f"--name: {name!r} is not a DNS name or IP address ({error})") from None


def _save(directory: Path, stem: str, signed: Signed) -> None:
    key, certificate = signed
    state_files.replace(directory / f"{stem}.key", _private_pem(key))
    state_files.replace(directory / f"{stem}.pem", _pem(certificate), mode=0o644)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
