"""A job's own certificate authority, for ranks on several hosts.

Its key derives from the key that signs the incarnation's tickets. So rank 0 and the control plane,
which have that one, can both issue certificates, a restarted control plane is the same authority
without having recorded anything, and nothing new is secret. It ends with its incarnation.

A certificate says only that its holder belongs to the job. What a caller may do is in its ticket.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from paramd.security.authority import Signed, alternative, common_name, new_ca, sign_leaf
from paramd.security.tickets import RANK_TICKET_TTL_S
from paramd.security.tls import RANK_NAME, Pems, pin_of

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
        self, name: str, hosts: Sequence[str] = (), *, lifetime_s: float = RANK_TICKET_TTL_S
    ) -> Pems:
        """A certificate with a fresh key, for both ends of a connection.

        Args:
            name: Whose it is, for people.
            hosts: Addresses and names that others connect to, beside those of loopback; a client
                has none.
            lifetime_s: How long from now on it is valid; a rank's as long as its ticket.

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

    def issue_ranks(self, hosts: Sequence[str]) -> list[Pems]:
        """A certificate for each rank, whose address is `hosts[rank]`. Raises as `issue`."""
        return [self.issue(f"{RANK_NAME}{rank}", [host]) for rank, host in enumerate(hosts)]


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
