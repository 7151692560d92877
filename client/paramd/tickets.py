"""Short-lived signed tickets: who may call what, in one job and one epoch.

A ticket is `<claims>.<mac>`, both base64url: claims are canonical JSON, the mac is
HMAC-SHA256 of the encoded claims under the job's secret. Nothing in a ticket is secret
but the right that it carries, so it is never logged and never put into a URL.
"""

from __future__ import annotations

import base64
import hmac
import json
import math
import time
from dataclasses import dataclass
from enum import Enum

from paramd.errors import DeniedError, UsageError

MAX_TICKET_BYTES = 1024
"""Longer text is refused before anything is computed over it."""

CLOCK_SKEW_S = 60.0
"""How long after its expiry a ticket still works: hosts' clocks differ."""

MIN_SECRET_BYTES = 16
"""A shorter secret is refused; jobs use 32 random bytes."""

_ASK_AGAIN = "ask the control plane for a new one (GET /api/v1/jobs/{job})"


class Role(Enum):
    """What a ticket's holder may do."""

    READER = "reader"
    """All reading methods of a sidecar; ScheduleBoundary of the control plane."""
    CONTROL = "control"
    """What a reader may, and CaptureBoundary of a sidecar."""
    SIDECAR = "sidecar"
    """Join and ScheduleBoundary of the control plane; a reader towards its peers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """What a valid ticket says."""

    job: str
    """Name of the job."""
    epoch: int
    """Incarnation of the job."""
    role: Role
    """What the holder may do."""
    expires_s: float
    """End of validity, in seconds since the Unix epoch."""


def mint(
    secret: bytes, *, job: str, epoch: int, role: Role, ttl_s: float, now_s: float | None = None
) -> str:
    """A ticket that is valid for `ttl_s` seconds from now on.

    Args:
        secret: The job's secret, at least `MIN_SECRET_BYTES` long.
        ttl_s: Validity in seconds, above 0.
        now_s: Seconds since the Unix epoch; the clock when None.

    Raises:
        UsageError: the secret is too short or `ttl_s` is not a positive number.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise UsageError(f"secret: {len(secret)} bytes; expected at least {MIN_SECRET_BYTES}")
    if not (math.isfinite(ttl_s) and ttl_s > 0):
        raise UsageError(f"ttl_s: {ttl_s}; expected a finite number above 0")
    now_s = now_s if now_s is not None else time.time()
    claims = {"job": job, "epoch": epoch, "role": role.value, "exp": now_s + ttl_s}
    text = json.dumps(claims, sort_keys=True, separators=(",", ":"))
    payload = _encode(text.encode())
    return f"{payload.decode()}.{_mac(secret, payload).decode()}"


def verify(
    secret: bytes, ticket: str, *, job: str, epoch: int, now_s: float | None = None
) -> Claims:
    """The claims of a ticket that is genuine, of this job and epoch, and not expired.

    Whether the role suffices is the caller's question.

    Raises:
        DeniedError: for anything else, whatever the input; the text says why.
    """
    payload = _authentic_payload(secret, ticket)
    claims = _parse(payload)
    if claims.job != job:
        raise DeniedError(f"the ticket is for job {claims.job!r}, this is {job!r}; {_ASK_AGAIN}")
    if claims.epoch != epoch:
        raise DeniedError(
            f"the ticket is for epoch {claims.epoch}, the job is in {epoch}; {_ASK_AGAIN}"
        )
    now_s = now_s if now_s is not None else time.time()
    if now_s > claims.expires_s + CLOCK_SKEW_S:
        raise DeniedError(f"the ticket expired {now_s - claims.expires_s:.0f} s ago; {_ASK_AGAIN}")
    return claims


def _authentic_payload(secret: bytes, ticket: str) -> bytes:
    """The encoded claims, once their signature has been found right."""
    if not isinstance(ticket, str) or not ticket:
        raise DeniedError(f"no ticket was given; {_ASK_AGAIN}")
    if len(ticket) > MAX_TICKET_BYTES or not ticket.isascii():
        raise DeniedError(
            f"the ticket is not ASCII text of at most {MAX_TICKET_BYTES} bytes; {_ASK_AGAIN}"
        )
    payload, dot, mac = ticket.encode().partition(b".")
    if not dot or not hmac.compare_digest(_mac(secret, payload), mac):
        raise DeniedError(f"the ticket is not signed by this job's present epoch; {_ASK_AGAIN}")
    return payload


def _parse(payload: bytes) -> Claims:
    """Claims of a signed payload. Ours are always well-formed; another signer's may not be."""
    try:
        found = json.loads(base64.urlsafe_b64decode(payload + b"=" * (-len(payload) % 4)))
        job, epoch, expires_s = found["job"], found["epoch"], float(found["exp"])
        role = Role(found["role"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise DeniedError(f"the ticket's claims cannot be read; {_ASK_AGAIN}") from None
    if not (isinstance(job, str) and type(epoch) is int and math.isfinite(expires_s)):
        raise DeniedError(f"the ticket's claims have wrong types; {_ASK_AGAIN}")
    return Claims(job=job, epoch=epoch, role=role, expires_s=expires_s)


def _mac(secret: bytes, payload: bytes) -> bytes:
    return _encode(hmac.digest(secret, payload, "sha256"))


def _encode(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
