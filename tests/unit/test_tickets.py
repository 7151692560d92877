"""Tickets: only what this job's secret signed, for this epoch, in its time, passes."""

from __future__ import annotations

import base64
import hmac
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd.errors import DeniedError, UsageError
from paramd.tickets import CLOCK_SKEW_S, MAX_TICKET_BYTES, Role, mint, verify

SECRET = bytes(range(32))
NOW_S = 1_000_000.0


def ticket(**changed: Any) -> str:
    options: dict[str, Any] = {"job": "run", "epoch": 3, "role": Role.READER, "ttl_s": 600.0}
    return mint(SECRET, **(options | changed), now_s=NOW_S)


def signed(claims: object) -> str:
    """A rightly signed ticket with any claims."""
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=")
    mac = base64.urlsafe_b64encode(hmac.digest(SECRET, payload, "sha256")).rstrip(b"=")
    return f"{payload.decode()}.{mac.decode()}"


@pytest.mark.parametrize("role", Role)
def test_a_minted_ticket_verifies_with_its_claims(role: Role) -> None:
    claims = verify(SECRET, ticket(role=role), job="run", epoch=3, now_s=NOW_S)
    assert (claims.job, claims.epoch, claims.role) == ("run", 3, role)
    assert claims.expires_s == NOW_S + 600.0


def test_the_clock_is_used_when_no_time_is_given() -> None:
    text = mint(SECRET, job="run", epoch=1, role=Role.CONTROL, ttl_s=5.0)
    assert verify(SECRET, text, job="run", epoch=1).expires_s == pytest.approx(
        time.time() + 5.0, abs=2.0
    )


def test_expiry_tolerates_the_skew_and_not_more() -> None:
    edge_s = NOW_S + 600.0 + CLOCK_SKEW_S
    verify(SECRET, ticket(), job="run", epoch=3, now_s=edge_s)
    with pytest.raises(DeniedError, match="expired 61 s ago"):
        verify(SECRET, ticket(), job="run", epoch=3, now_s=edge_s + 1.0)


@pytest.mark.parametrize(
    ("job", "epoch", "reason"), [("other", 3, "for job 'run'"), ("run", 4, "for epoch 3")]
)
def test_another_job_or_epoch_is_refused_with_the_reason(job: str, epoch: int, reason: str) -> None:
    with pytest.raises(DeniedError, match=reason):
        verify(SECRET, ticket(), job=job, epoch=epoch, now_s=NOW_S)


def test_another_secret_is_refused() -> None:
    with pytest.raises(DeniedError, match="not signed"):
        verify(bytes(32), ticket(), job="run", epoch=3, now_s=NOW_S)


def test_every_changed_character_is_refused() -> None:
    text = ticket()
    for at in range(len(text)):
        other = "A" if text[at] != "A" else "B"
        with pytest.raises(DeniedError):
            verify(SECRET, text[:at] + other + text[at + 1 :], job="run", epoch=3, now_s=NOW_S)


@pytest.mark.parametrize(
    "text", ["", ".", "a.b", "\x00", "ä.ö", "\ud800", "a" * (MAX_TICKET_BYTES + 1), None, b"x", 7]
)
def test_garbage_is_denied_and_nothing_else_is_raised(text: Any) -> None:
    with pytest.raises(DeniedError):
        verify(SECRET, text, job="run", epoch=3, now_s=NOW_S)


@given(st.text(max_size=1100))
def test_any_text_is_denied(text: str) -> None:
    with pytest.raises(DeniedError):
        verify(SECRET, text, job="run", epoch=3, now_s=NOW_S)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = scalars | st.lists(scalars, max_size=2)
claim_sets = st.fixed_dictionaries(
    {},
    optional={
        "job": st.just("run") | values,
        "epoch": st.just(3) | values,
        "role": st.just("reader") | values,
        "exp": st.just(10**400) | values,
    },
)


@given(claim_sets | values)
def test_signed_claims_of_any_shape_raise_nothing_but_denied(claims: object) -> None:
    try:
        found = verify(SECRET, signed(claims), job="run", epoch=3, now_s=NOW_S)
    except DeniedError:
        return
    assert isinstance(claims, dict)
    assert (found.job, found.epoch, found.role.value) == ("run", 3, claims["role"])
    assert found.expires_s + CLOCK_SKEW_S >= NOW_S


def test_a_bool_is_no_epoch() -> None:
    claims = {"job": "run", "epoch": True, "role": "reader", "exp": NOW_S}
    with pytest.raises(DeniedError, match="wrong types"):
        verify(SECRET, signed(claims), job="run", epoch=1, now_s=NOW_S)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_useless_validity_is_a_usage_error(ttl_s: float) -> None:
    with pytest.raises(UsageError, match="ttl_s"):
        ticket(ttl_s=ttl_s)


def test_a_short_secret_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="secret"):
        mint(b"short", job="run", epoch=1, role=Role.READER, ttl_s=1.0)
