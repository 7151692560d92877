"""Short-lived signed tickets: a caller's rights in one job and one incarnation.

A ticket is a JSON Web Token (RFC 7519) signed with Ed25519 (RFC 8037). Exactly one header is
accepted, byte for byte, so there is no algorithm to choose. Anyone with the job's public key can
verify it offline; only holders of the private key (the control plane, and rank 0's trainer, which
starts it) can mint one. A ticket is a bearer credential: it is never logged or put into a URL.

Each is good at one server alone. A user's names the root of a `KeyTree` and is good beside a key of
it, and each server has its own: the client derives all of them from one seed and shows a server no
other, "<ticket>~<key and path>". So what a rank is shown is useless elsewhere, at the price of one
signature for all ranks, and clients need no cryptography but hashes. The control plane shows none
twice: each of its calls has a ticket of its own, an order, which names the rank, the method, the
request (`Told`) and a number that the rank takes once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from paramd import clock
from paramd.errors import DeniedError, UsageError

# `cryptography` and `jwt` are loaded by signers and verifiers: readers only pass tickets on, and
# do not need them.

PREFIX = "pmd_"
"""Prefix of every token, so that scanners find leaked ones; 32 random bytes, base64url, follow."""

RANDOM_BYTES = 32
MAX_TOKEN_CHARS = 512
"""Longer text is refused before any computation on it."""

_SHAPE = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]{43}")

MAX_TICKET_BYTES = 1024
"""Longer text is refused before any computation on it."""

CLOCK_SKEW_S = 60.0
"""How long, in seconds, a ticket works past its expiry, to allow for clock skew between hosts."""

KEY_BYTES = 32
"""Size of a private or public key."""

RANK_TICKET_TTL_S = 366 * 86_400.0
"""Validity of a rank's own ticket and certificate, in seconds. The next incarnation ends them; they
have no short expiry, so that sidecars can rejoin after a control plane outage of any length,
without a renewal."""

CONTROL_PLACE = 0
"""Place of the control plane among those that a ticket is shown to; rank r's is r + 1."""

ORDER_BITS = 20
"""An order's number: the control plane's generation, which rises by the millisecond, and in as many
bits below it how many orders its process gave."""

GENERATION_STEP = 4096
"""A successor's generation is at least so much higher: where the clock went back, four thousand
million of its predecessor's orders are below its own."""

NONCE_BYTES = 32
"""What a sidecar has the control plane sign before it shows its ticket there."""

_HASH_BYTES = 16
_CACHED_TICKETS = 1024
_ALGORITHM = "EdDSA"
_FORM = re.compile(
    base64.urlsafe_b64encode(b'{"alg":"EdDSA","typ":"JWT"}').decode().rstrip("=")
    # The signature's last character has two bits: only so there is one spelling of its bytes.
    + r"\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]{85}[AQgw](?:~[A-Za-z0-9_-]+)?"
)
_ASK_AGAIN = "ask the control plane for a new one (GET /api/v1/jobs/{job})"


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def holds_token(text: str) -> bool:
    """Whether `text` contains a token, valid or not."""
    return _SHAPE.search(text) is not None


class Role(Enum):
    """The rights of a ticket's holder."""

    VIEWER = "viewer"
    """State, peers and layout of a sidecar; never parameter values."""
    READER = "reader"
    """All reading methods of a sidecar; ScheduleBoundary of the control plane."""
    EDITOR = "editor"
    """As reader, and staging and previewing edits, but not committing them."""
    CONTROL = "control"
    """As editor, and requests to all ranks together (ReachBoundary and the like): one call of the
    sidecar of the rank named in the ticket, once. So nobody gains anything by the tickets that a
    rank receives."""
    SIDECAR = "sidecar"
    """Join of the control plane as the rank named in the ticket."""
    GATHERER = "gatherer"
    """ReadSnapshot of the snapshots whose ids its holder was told, which nobody guesses. The rank
    that writes an export's file is handed one, to read its part of it from the others."""
    COPIER = "copier"
    """PutCopy of the sidecar that keeps copies of the rank named in the ticket; nothing else."""


OF_RANKS = frozenset({Role.SIDECAR, Role.COPIER, Role.CONTROL})
"""Roles whose tickets name a rank, and are good nowhere else: a sidecar's its own, the control
plane's the one it is for. All others have keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """The claims of a valid ticket."""

    job: str
    """Name of the job."""
    incarnation: int
    """Incarnation of the job."""
    role: Role
    """The holder's rights."""
    expires_s: float
    """End of validity, in seconds since the Unix epoch."""
    ticket_id: str
    """Names the ticket in logs and audit; 16 hexadecimal digits in our own tickets."""
    issued_s: float = 0.0
    """When it was minted, in seconds since the Unix epoch; 0 when not stated."""
    rank: int | None = None
    """The holder's rank; for role `control` the rank whose sidecar takes it; else None."""
    token_id: str | None = None
    """Id of the user's token it was issued for, of a rank's: which registered its job; or None."""
    keys: str | None = None
    """Root of the `KeyTree` of which each server is shown its key; None for roles of `OF_RANKS`."""
    number: int = 0
    """Of an order of the control plane, from 1 on; each is taken once. 0 for other roles."""
    told: str = ""
    """The digest of an order, by `Told`; empty for other roles."""


class Told:
    """What a call says, as one digest: its method, whom it is for, and all of its messages."""

    def __init__(self, method: str, *others: str) -> None:
        """`method` is its path, "/package.Service/Method"."""
        self._hash = hashlib.sha256()
        for text in (method, *others):
            self.add(text.encode())

    def add(self, message: bytes) -> None:
        self._hash.update(len(message).to_bytes(8, "big"))
        self._hash.update(message)

    @property
    def digest(self) -> str:
        return _text(self._hash.digest())


class KeyTree:
    """A key for each place that one ticket is shown to, and a short proof that it is that one's.

    A Merkle tree (Merkle 1987): leaves are hashes of the keys, and the ticket names the root. Of
    4,096 ranks it takes 5 ms, once per token and incarnation.
    """

    def __init__(self, seed: bytes, world_size: int) -> None:
        level = self._keys = hashlib.shake_256(seed).digest(_HASH_BYTES * (world_size + 1))
        level = b"".join(_hashed(b"key", one) for one in _split(level, _HASH_BYTES))
        self._levels = []
        while len(level) > _HASH_BYTES:
            level += bytes(len(level) % (2 * _HASH_BYTES))
            self._levels.append(level)
            level = b"".join(_hashed(b"two", pair) for pair in _split(level, 2 * _HASH_BYTES))
        self.root = _text(level)

    def shown(self, ticket: str, place: int) -> str:
        path = [_nth(level, (place >> up) ^ 1) for up, level in enumerate(self._levels)]
        return f"{ticket}~{_text(_nth(self._keys, place) + b''.join(path))}"


@lru_cache(maxsize=16)
def key_tree(seed: str, world_size: int) -> KeyTree:
    """The keys of a seed, in hexadecimal digits, which whoever has the ticket keeps for itself."""
    return KeyTree(bytes.fromhex(seed), world_size)


@lru_cache(maxsize=1024)
def key_root(seed: str, world_size: int) -> str:
    """The root of a seed's keys, which a ticket names; 0.1 s for 65,536 ranks, the first time."""
    return key_tree(seed, world_size).root


def handed(ticket: str, seed: str) -> str:
    """A ticket with the seed of its keys, for a rank that is to read others with it."""
    return f"{ticket}~{seed}"


def shown_of(given: str, rank: int | None, world_size: int) -> str:
    """What the server of `rank`, None the control plane, is shown of what `handed` made.

    Raises:
        DeniedError: For anything else.
    """
    ticket, _, seed = given.partition("~")
    place = rank + 1 if rank is not None else CONTROL_PLACE
    try:
        return key_tree(seed, world_size).shown(ticket, place)
    except ValueError:
        raise DeniedError("what is to be read with is no ticket with its seed") from None


def _fits(proof: str, place: int, root: str) -> bool:
    """Whether a key and its path are those of this place."""
    try:
        told = base64.urlsafe_b64decode(proof + "==")
    except ValueError:
        return False
    node = _hashed(b"key", told[:_HASH_BYTES])
    for other in _split(told[_HASH_BYTES:], _HASH_BYTES):
        node = _hashed(b"two", other + node if place & 1 else node + other)
        place >>= 1
    # One spelling alone: the last character has bits to spare.
    return not place and _text(told) == proof and hmac.compare_digest(_text(node), root)


def _hashed(what: bytes, data: bytes) -> bytes:
    return hashlib.sha256(what + data).digest()[:_HASH_BYTES]


def _split(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def _nth(data: bytes, number: int) -> bytes:
    return data[number * _HASH_BYTES : (number + 1) * _HASH_BYTES]


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def new_private_key() -> bytes:
    """A fresh random key of `KEY_BYTES`."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes_raw()


class Signer:
    """Mints tickets. Holds the incarnation's private key: never log or pickle it."""

    __slots__ = ("_key",)

    def __init__(self, private_key: bytes) -> None:
        """Raises UsageError unless the key has `KEY_BYTES`."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        _check_key("private_key", private_key)
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)

    @property
    def public_key(self) -> bytes:
        """The key that verifies this signer's tickets, `KEY_BYTES` long."""
        return self._key.public_key().public_bytes_raw()

    def mint(
        self,
        *,
        job: str,
        incarnation: int,
        role: Role,
        ttl_s: float,
        rank: int | None = None,
        token_id: str | None = None,
        keys: str | None = None,
        number: int = 0,
        told: str = "",
        now_s: float | None = None,
    ) -> str:
        """Mint a ticket valid for `ttl_s` seconds, above 0, from now.

        `rank`, `keys`, `number` and `told` are as in `Claims`: the roles of `OF_RANKS` need `rank`,
        all others `keys`; role `control` needs `number` and `told`. `token_id`: of the token it is
        issued for, so that it ends with it; never the token itself. `now_s`: seconds since the Unix
        epoch; the clock when None.

        Raises:
            UsageError: If `ttl_s` is not a positive number, or nothing binds the ticket to a
                server.
        """
        if not (math.isfinite(ttl_s) and ttl_s > 0):
            raise UsageError(f"ttl_s: {ttl_s}; expected a finite number above 0")
        if why := _unbound(role, rank=rank, keys=keys, number=number, told=told):
            raise UsageError(f"rank, keys, number, told: {why}")
        import jwt

        now_s = now_s if now_s is not None else clock.now_s()
        claims: dict[str, str | int | float] = {
            "job": job,
            "incarnation": incarnation,
            "role": role.value,
            "exp": now_s + ttl_s,
            "iat": now_s,
            "jti": secrets.token_hex(8),
        }
        if rank is not None:
            claims["rank"] = rank
        if token_id is not None:
            claims["token"] = token_id
        if keys is not None:
            claims["keys"] = keys
        if number:
            claims |= {"number": number, "told": told}
        return jwt.encode(dict(sorted(claims.items())), self._key, _ALGORITHM)

    def prove(self, address: str, nonce: bytes) -> bytes:
        """A signature which says that the control plane is at `address`, now."""
        return self._key.sign(_proven(address, nonce))


def _unbound(role: Role, *, rank: int | None, keys: str | None, number: int, told: str) -> str:
    """Why a ticket is not bound to one server, and an order not to one call; empty if it is."""
    bound = rank is not None and keys is None if role in OF_RANKS else keys is not None
    if not bound:
        what = "a rank, and no keys" if role in OF_RANKS else "keys, one for each server"
        return f"a ticket of role {role.value} names {what}"
    if (role is Role.CONTROL) is not (0 < number < 1 << 63 and bool(told)):
        return "an order, and nothing else, has a number from 1 to 2**63 - 1 and what it says"
    return ""


def _proven(address: str, nonce: bytes) -> bytes:
    # No ticket, whose text is ASCII without zeros.
    return b"paramd control plane\0" + nonce + address.encode()


class Verifier:
    """Verifies tickets of one key, offline. Not thread-safe."""

    def __init__(self, public_key: bytes, place: int = CONTROL_PLACE) -> None:
        """`place` is the server's own.

        Raises:
            UsageError: Unless the key has `KEY_BYTES`.
        """
        import jwt
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        _check_key("public_key", public_key)
        self._place = place
        self._key = Ed25519PublicKey.from_public_bytes(public_key)
        # Only the signature: times are compared with our own clock.
        self._jws = jwt.PyJWS([_ALGORITHM])
        # Checking a signature costs about 100 us, and clients send the same ticket with every
        # call. Expiry is kept on the monotonic clock: later jumps of the wall clock don't count.
        self._genuine: dict[str, tuple[Claims, float]] = {}

    def verify(
        self, ticket: str, *, job: str, incarnation: int, now_s: float | None = None
    ) -> Claims:
        """The claims of a genuine, unexpired ticket of this job and incarnation, shown here.

        The caller checks the role. Raises DeniedError, with the reason, for anything else, whatever
        the input.
        """
        claims, ends_s = self._claims(ticket)
        if claims.job != job:
            raise DeniedError(
                f"the ticket is for job {claims.job[:64]!r}, this is {job!r}; {_ASK_AGAIN}"
            )
        if claims.incarnation != incarnation:
            raise DeniedError(
                f"the ticket is for run {claims.incarnation}, the job is in "
                f"{incarnation}; {_ASK_AGAIN}"
            )
        late_s = time.monotonic() - ends_s if now_s is None else now_s - claims.expires_s
        if late_s > CLOCK_SKEW_S:
            raise DeniedError(f"the ticket expired {late_s:.0f} s ago; {_ASK_AGAIN}")
        return claims

    def proves(self, signature: bytes, address: str, nonce: bytes) -> bool:
        """Whether `Signer.prove` of this key made the signature."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, _proven(address, nonce))
        except InvalidSignature:
            return False
        return True

    def _claims(self, shown: str) -> tuple[Claims, float]:
        """A ticket's claims, and its end on the monotonic clock."""
        from jwt import InvalidTokenError

        payload = _payload(shown)
        known = self._genuine.get(shown)
        if known is not None:
            return known
        ticket, _, proof = shown.partition("~")
        try:
            self._jws.decode(ticket, self._key, [_ALGORITHM])
        except InvalidTokenError:
            raise DeniedError(
                f"the ticket is not signed by this job's present run; {_ASK_AGAIN}"
            ) from None
        claims = _parse(payload)
        if not (_fits(proof, self._place, claims.keys) if claims.keys is not None else not proof):
            raise DeniedError(
                "the ticket is not shown with the key of this server; derive the key from "
                "ticket_seed, or ask for this rank's (GET /api/v1/jobs/{job}?rank=R)"
            )
        found = claims, time.monotonic() + claims.expires_s - clock.now_s()
        if claims.role is not Role.CONTROL:  # an order comes once
            if len(self._genuine) >= _CACHED_TICKETS:
                self._genuine.clear()
            self._genuine[shown] = found
        return found


def mint_of_ranks(
    signer: Signer,
    role: Role,
    *,
    job: str,
    incarnation: int,
    ranks: range,
    token_id: str | None = None,
    ttl_s: float = RANK_TICKET_TTL_S,
) -> list[str]:
    """A ticket for the sidecar of each of the ranks; `token_id` and `ttl_s` as in `mint`."""
    shared = {"job": job, "incarnation": incarnation, "token_id": token_id, "ttl_s": ttl_s}
    return [signer.mint(role=role, rank=rank, **shared) for rank in ranks]  # type: ignore[arg-type]


def life_s(ticket: str) -> float:
    """A ticket's total validity in seconds, unverified; DeniedError if it is no ticket."""
    claims = _parse(_payload(ticket))
    return max(claims.expires_s - claims.issued_s, 0.0)


def claimed(ticket: str) -> tuple[str, int]:
    """The job and incarnation a ticket claims, to find the key to verify it with.

    Unverified; `Verifier.verify` does that.

    Raises:
        DeniedError: If it is no ticket.
    """
    claims = _parse(_payload(ticket))
    return claims.job, claims.incarnation


def _payload(ticket: str) -> str:
    """The encoded claims."""
    if not isinstance(ticket, str) or not ticket:
        raise DeniedError(f"no ticket was given; {_ASK_AGAIN}")
    if len(ticket) > MAX_TICKET_BYTES or not ticket.isascii():
        raise DeniedError(
            f"the ticket is not ASCII text of at most {MAX_TICKET_BYTES} bytes; {_ASK_AGAIN}"
        )
    found = _FORM.fullmatch(ticket)
    if found is None:
        raise DeniedError(f"the text is not a ticket of paramd; {_ASK_AGAIN}")
    return found[1]


def _parse(payload: str) -> Claims:
    """Parse a payload's claims. Ours are always well-formed; another signer's may not be."""
    try:
        found = json.loads(base64.urlsafe_b64decode(payload + "=="))
        claims = Claims(
            job=found["job"],
            incarnation=found["incarnation"],
            role=Role(found["role"]),
            expires_s=float(found["exp"]),
            issued_s=float(found.get("iat", 0.0)),
            ticket_id=found["jti"],
            rank=found.get("rank"),
            token_id=found.get("token"),
            keys=found.get("keys"),
            number=found.get("number", 0),
            told=found.get("told", ""),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise DeniedError(f"the ticket's claims cannot be read; {_ASK_AGAIN}") from None
    texts = all(isinstance(one, str) for one in (claims.job, claims.ticket_id, claims.told))
    texts = texts and all(isinstance(one, str | None) for one in (claims.token_id, claims.keys))
    numbers = type(claims.incarnation) is int and type(claims.number) is int
    numbers = numbers and type(claims.rank) in (int, type(None))
    finite = math.isfinite(claims.expires_s) and math.isfinite(claims.issued_s)
    if not (texts and numbers and finite):
        raise DeniedError(f"the ticket's claims have wrong types; {_ASK_AGAIN}")
    if why := _unbound(
        claims.role, rank=claims.rank, keys=claims.keys, number=claims.number, told=claims.told
    ):
        raise DeniedError(f"{why}, this does not; {_ASK_AGAIN}")
    return claims


def key_from_hex(message: Mapping[str, object], name: str) -> bytes:
    """The key in a message's field of hexadecimal digits.

    Raises:
        UsageError: If missing or malformed. The message never contains the field's content.
    """
    text = message.get(name)
    try:
        key = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        key = b""
    _check_key(name, key)
    return key


def _check_key(name: str, key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise UsageError(f"{name}: {len(key)} bytes; expected {KEY_BYTES}, as hexadecimal digits")
