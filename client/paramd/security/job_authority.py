"""A job's own certificate authority, for ranks on several hosts.

Its key derives from the key that signs the incarnation's tickets. So rank 0 and the control plane,
which have that one, can both issue certificates, a restarted control plane is the same authority
without having recorded anything, and nothing new is secret. It ends with its incarnation.

A certificate says only that its holder belongs to the job. What a caller may do is in its ticket.
It is renewed after two thirds of its validity: its holder makes the next key, and has the key that
it has sign it (`NextKey`); who has the authority's signs the certificate (`renew`). So its private
key crosses no network.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from paramd.errors import DeniedError
from paramd.security.authority import Signed, alternative, common_name, new_ca, sign, sign_leaf
from paramd.security.tls import CERTIFICATE_S, RANK_NAME, Pems, pin_of

CLIENT_S = 2 * 86_400.0
"""Validity of a client's certificate; a new one comes with the job's document."""

RENEWED_AT = 2 / 3
"""Part of its validity after which a certificate is renewed."""

BACKDATED = timedelta(days=1)
"""Certificates begin this long ago: hosts' clocks may differ by hours."""

_PROOF = b"paramd renews\0"
_BOTH = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
_BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
_END = datetime(2200, 1, 1, tzinfo=UTC)
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names in every certificate: forwarded ports and clients on the host itself use them."""


class JobAuthority:
    """Issues the certificates of one incarnation of a job. Holds a key: never log or pickle it."""

    __slots__ = ("_ca", "_pem")

    def __init__(self, private_key: bytes, *, job: str, incarnation: int) -> None:
        """`private_key` signs the incarnation's tickets."""
        label = f"paramd job CA\0{job}\0{incarnation}".encode()
        # Twice the order's length: the remainder is as good as evenly distributed.
        seed = b"".join(
            hmac.digest(private_key, label + bytes([part]), hashlib.sha256) for part in range(2)
        )
        number = int.from_bytes(seed, "big") % (_P256_ORDER - 1) + 1
        key = ec.derive_private_key(number, ec.SECP256R1())
        name = common_name(f"paramd job {job[:40]}, incarnation {incarnation}")
        self._ca: Signed = new_ca(key, name, begin=_BEGIN, end=_END)
        self._pem = self._ca[1].public_bytes(serialization.Encoding.PEM)

    @property
    def pem(self) -> bytes:
        """The CA's certificate."""
        return self._pem

    @property
    def pin(self) -> str:
        """Fingerprint of the CA's public key, "sha256:" and 64 hexadecimal digits."""
        return pin_of(self._pem)

    def issue(
        self, name: str, hosts: Sequence[str] = (), *, lifetime_s: float = CERTIFICATE_S
    ) -> Pems:
        """A certificate with a fresh key, for both ends of a connection.

        Args:
            name: Whose it is, for people.
            hosts: Addresses and names that others connect to, beside those of loopback; a client
                has none.
            lifetime_s: How long from now on it is valid.

        Raises:
            UsageError: one of `hosts` is no name and no address.
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
        cert = certificate.public_bytes(serialization.Encoding.PEM)
        return Pems(ca=self._pem, cert=cert, key=_private_pem(key))

    def issue_ranks(self, hosts: Sequence[str], *, lifetime_s: float = CERTIFICATE_S) -> list[Pems]:
        """A certificate for each rank, whose address is `hosts[rank]`. Raises as `issue`."""
        return [
            self.issue(f"{RANK_NAME}{rank}", [host], lifetime_s=lifetime_s)
            for rank, host in enumerate(hosts)
        ]

    def renew(
        self, rank: int, present: bytes, public_key: bytes, proof: bytes, *, lifetime_s: float
    ) -> bytes:
        """The next certificate (PEM) of a rank, for the names of its `present` one.

        One that has expired is renewed, too, where such a rank can still ask (at a site, whose own
        certificate is the operator's): its ticket says who asks, and ends with the incarnation.

        Args:
            public_key, proof: See `NextKey`.

        Raises:
            DeniedError: the certificate is not this rank's, or not of this CA; the proof is not
                by its key, or the next key is none of ours.
        """
        try:
            old = x509.load_pem_x509_certificate(present)
            old.verify_directly_issued_by(self._ca[1])
            shown = old.public_key()
            new = serialization.load_der_public_key(public_key)
            if not isinstance(shown, ec.EllipticCurvePublicKey):
                raise ValueError("no elliptic curve")
            shown.verify(proof, _PROOF + public_key, ec.ECDSA(hashes.SHA256()))
            names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            if not isinstance(new, ec.EllipticCurvePublicKey) or new.curve.name != shown.curve.name:
                raise ValueError("another kind of key")
        except (
            ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.ExtensionNotFound
        ) as error:  # fmt: skip
            # Not the error's text, which may quote what was sent.
            raise DeniedError(
                f"the certificate of rank {rank} is not renewed: what was shown is not its own "
                f"with a proof by its key ({type(error).__name__})"
            ) from None
        if old.subject != common_name(f"{RANK_NAME}{rank}"):
            raise DeniedError(f"rank {rank} shows another one's certificate; each has its own")
        certificate = sign(
            self._ca,
            old.subject,
            new,
            list(names),
            _BOTH,
            begin=datetime.now(UTC) - BACKDATED,
            end=datetime.now(UTC) + timedelta(seconds=lifetime_s),
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


class NextKey:
    """The key of a rank's next certificate. Never log or pickle it."""

    __slots__ = ("_key", "_present", "proof", "public_key")

    def __init__(self, present: Pems) -> None:
        """Make one, which the key of the `present` certificate vouches for."""
        self._present = present
        self._key = ec.generate_private_key(ec.SECP256R1())
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        self.public_key = self._key.public_key().public_bytes(serialization.Encoding.DER, form)
        """DER (SubjectPublicKeyInfo)."""
        old = serialization.load_pem_private_key(present.key, None)
        assert isinstance(old, ec.EllipticCurvePrivateKey)
        self.proof = old.sign(_PROOF + self.public_key, ec.ECDSA(hashes.SHA256()))

    def certified(self, certificate: bytes) -> Pems:
        """Key and certificate (PEM) together, under the CA of the present one.

        Raises:
            DeniedError: it is not for this key, or not of that CA.
        """
        ca = x509.load_pem_x509_certificate(self._present.ca)
        try:
            found = x509.load_pem_x509_certificate(certificate)
            found.verify_directly_issued_by(ca)
            fits = found.public_key() == self._key.public_key()
        except (ValueError, TypeError, InvalidSignature):
            fits = False
        if not fits:
            raise DeniedError("the control plane answered with a certificate for another key or CA")
        return Pems(ca=self._present.ca, cert=certificate, key=_private_pem(self._key))


def validity(certificate: bytes) -> tuple[float, float]:
    """When a certificate of ours (PEM) was issued, and when it ends; by the wall clock."""
    found = x509.load_pem_x509_certificate(certificate)
    begin = found.not_valid_before_utc + BACKDATED
    return begin.timestamp(), found.not_valid_after_utc.timestamp()


def renew_at_s(certificate: bytes) -> float:
    """When a certificate of ours (PEM) is due to be renewed, by the wall clock."""
    begin_s, end_s = validity(certificate)
    return begin_s + RENEWED_AT * (end_s - begin_s)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
