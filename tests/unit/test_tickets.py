"""Tickets: only what this job's private key signed, for this incarnation, in its time, passes."""

import base64
import hmac
import json
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from paramd.errors import DeniedError, UsageError
from paramd.memory.control_page import PAGE_BYTES, ControlPage
from paramd.security import tickets
from paramd.security.tickets import (
    CLOCK_SKEW_S,
    Claims,
    KeyTree,
    Role,
    Signer,
    Verifier,
    key_from_hex,
    new_private_key,
)
from paramd_service.sidecar.orders import KEPT, Orders, ReplayedError

KEY = bytes(range(32))
SIGNER = Signer(KEY)
PUBLIC = SIGNER.public_key
NOW_S = 1_000_000.0


def ticket(**changed: Any) -> str:
    options: dict[str, Any] = {"job": "run", "incarnation": 3, "role": Role.COPIER, "ttl_s": 600.0}
    return SIGNER.mint(**({"rank": 5} | options | changed), now_s=NOW_S)


def verify(
    text: Any, *, job: str = "run", incarnation: int = 3, now_s: float | None = NOW_S
) -> Claims:
    return Verifier(PUBLIC).verify(text, job=job, incarnation=incarnation, now_s=now_s)


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed(claims: object, header: object = None) -> str:
    """A rightly signed token with any claims and header."""
    header = header if header is not None else {"alg": "EdDSA", "typ": "JWT"}
    parts = (json.dumps(part, separators=(",", ":")).encode() for part in (header, claims))
    text = ".".join(encoded(part) for part in parts)
    return f"{text}.{encoded(Ed25519PrivateKey.from_private_bytes(KEY).sign(text.encode()))}"


CLAIMS = {"job": "run", "incarnation": 3, "role": "copier", "exp": NOW_S, "jti": "x", "rank": 5}


def test_what_is_verified_has_every_claim_with_its_type() -> None:
    claims = verify(ticket(token_id="t-1"))
    assert (claims.issued_s, claims.token_id) == (NOW_S, "t-1")
    assert (verify(signed(CLAIMS)).issued_s, verify(signed(CLAIMS)).token_id) == (0.0, None)
    with pytest.raises(DeniedError, match="wrong types"):
        verify(signed(CLAIMS | {"token": 7}))


def test_a_known_ticket_ends_by_the_steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    text = SIGNER.mint(job="run", incarnation=3, role=Role.COPIER, rank=5, ttl_s=600.0)
    verifier, begin_s = Verifier(PUBLIC), time.monotonic()
    for _ in range(2):
        verifier.verify(text, job="run", incarnation=3)
    for later_s, good in ((655.0, True), (665.0, False)):
        monkeypatch.setattr(time, "monotonic", lambda at=begin_s + later_s: at)
        if good:
            verifier.verify(text, job="run", incarnation=3)
            continue
        with pytest.raises(DeniedError, match=r"expired 6[0-9] s ago"):
            verifier.verify(text, job="run", incarnation=3)


def test_expiry_tolerates_the_skew_and_not_more() -> None:
    edge_s = NOW_S + 600.0 + CLOCK_SKEW_S
    verify(ticket(), now_s=edge_s)
    with pytest.raises(DeniedError, match="expired 61 s ago"):
        verify(ticket(), now_s=edge_s + 1.0)


def test_a_ticket_that_was_good_expires_all_the_same() -> None:
    verifier, text = Verifier(PUBLIC), ticket()
    verifier.verify(text, job="run", incarnation=3, now_s=NOW_S)
    for wrong in ({"now_s": NOW_S + 1e6}, {"incarnation": 4}, {"job": "other"}):
        with pytest.raises(DeniedError):
            verifier.verify(text, **({"job": "run", "incarnation": 3, "now_s": NOW_S} | wrong))


def test_what_is_kept_of_good_tickets_is_bounded() -> None:
    verifier = Verifier(PUBLIC)
    for number in range(1100):
        verifier.verify(ticket(incarnation=number), job="run", incarnation=number, now_s=NOW_S)
        assert len(verifier._genuine) == number % 1024 + 1


@pytest.mark.parametrize(
    ("job", "incarnation", "reason"), [("other", 3, "for job 'run'"), ("run", 4, "for run 3")]
)
def test_another_job_or_incarnation_is_refused_with_the_reason(
    job: str, incarnation: int, reason: str
) -> None:
    with pytest.raises(DeniedError, match=reason):
        verify(ticket(), job=job, incarnation=incarnation)


def test_another_key_is_refused() -> None:
    other = Verifier(Signer(new_private_key()).public_key)
    with pytest.raises(DeniedError, match="not signed"):
        other.verify(ticket(), job="run", incarnation=3, now_s=NOW_S)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 4096])
def test_a_keyed_ticket_is_good_at_each_place_with_its_own_key_alone(world_size: int) -> None:
    tree = KeyTree(b"seed", world_size)
    text = ticket(role=Role.READER, rank=None, keys=tree.root)
    places = {0, 1, world_size // 2, world_size}
    for place in places:
        verifier, shown = Verifier(PUBLIC, place), tree.shown(text, place)
        assert len(shown) < 1024
        assert verifier.verify(shown, job="run", incarnation=3, now_s=NOW_S).keys == tree.root
        others = [tree.shown(text, other) for other in places - {place}]
        forged = KeyTree(b"other", world_size).shown(text, place)
        keyless = tree.shown(ticket(), place)
        for wrong in (*others, text, forged, keyless, f"{text}~", shown[:-1], f"{shown}AA"):
            with pytest.raises(DeniedError):
                verifier.verify(wrong, job="run", incarnation=3, now_s=NOW_S)
    # A rank is shown hashes of the others' keys, never one of them; nor is an inner node a leaf.
    own = base64.urlsafe_b64decode(tree.shown(text, 1).rpartition("~")[2] + "==")
    for at in range(16, len(own), 16):
        wrong = f"{text}~{encoded(own[at : at + 16] + own[at + 16 :])}"
        for place in places:
            with pytest.raises(DeniedError):
                Verifier(PUBLIC, place).verify(wrong, job="run", incarnation=3, now_s=NOW_S)


def test_a_proof_is_of_one_address_and_one_question_alone() -> None:
    proof, verifier = SIGNER.prove("host:1", b"n" * 32), Verifier(PUBLIC)
    assert verifier.proves(proof, "host:1", b"n" * 32)
    assert not verifier.proves(proof, "host:2", b"n" * 32)
    assert not verifier.proves(proof, "host:1", b"m" * 32)
    assert not verifier.proves(Signer(new_private_key()).prove("a", b"n"), "a", b"n")
    assert not verifier.proves(b"", "host:1", b"n" * 32)


def test_what_a_sidecar_holds_cannot_sign() -> None:
    """Neither as a private key nor as the secret of another algorithm."""
    with pytest.raises(DeniedError, match="not signed"):
        verify(
            Signer(PUBLIC).mint(
                job="run", incarnation=3, role=Role.COPIER, rank=0, ttl_s=9, now_s=NOW_S
            )
        )
    for name in ("HS256", "none", "EdDSA"):
        head = json.dumps({"alg": name, "typ": "JWT"}, separators=(",", ":")).encode()
        text = f"{encoded(head)}.{encoded(json.dumps(CLAIMS).encode())}"
        forged = hmac.digest(PUBLIC, text.encode(), "sha256") if name == "HS256" else b""
        with pytest.raises(DeniedError, match="not"):
            verify(f"{text}.{encoded(forged)}")


@pytest.mark.parametrize(
    "header",
    [{"alg": "none"}, {"alg": "HS256", "typ": "JWT"}, {"alg": "EdDSA"}, {"typ": "JWT", "alg": "x"}],
)
def test_another_header_is_refused_though_it_is_signed(header: object) -> None:
    with pytest.raises(DeniedError, match="not a ticket"):
        verify(signed(CLAIMS, header))


def test_every_changed_character_is_refused() -> None:
    text = ticket()
    for at in range(len(text)):
        other = "A" if text[at] != "A" else "B"
        with pytest.raises(DeniedError):
            verify(text[:at] + other + text[at + 1 :])


def test_other_encodings_of_the_same_bytes_are_refused() -> None:
    text = ticket()
    for changed in (text + "=", text + "==", text + "\n", " " + text, text.replace(".", "..", 1)):
        with pytest.raises(DeniedError):
            verify(changed)


@given(st.text(max_size=1100))
def test_any_text_is_denied(text: str) -> None:
    with pytest.raises(DeniedError):
        verify(text)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = scalars | st.lists(scalars, max_size=2)
claim_sets = st.fixed_dictionaries(
    {},
    optional={
        "job": st.just("run") | values,
        "incarnation": st.just(3) | values,
        "role": st.sampled_from([role.value for role in Role]) | values,
        "keys": values,
        "number": values,
        "told": values,
        "exp": st.just(10**400) | values,
        "jti": st.just("x") | values,
        "rank": values,
    },
)


@given(claim_sets | values)
def test_signed_claims_of_any_shape_raise_nothing_but_denied(claims: object) -> None:
    try:
        found = verify(signed(claims))
    except DeniedError:
        return
    assert isinstance(claims, dict)
    assert (found.job, found.incarnation, found.role.value) == ("run", 3, claims["role"])
    assert found.expires_s + CLOCK_SKEW_S >= NOW_S


@pytest.mark.parametrize(
    "changed",
    [
        {"incarnation": True},
        {"rank": True},
        {"rank": 1.0},
        {"jti": 7},
        {"exp": float("inf")},
        {"number": True},
        {"told": 7},
        {"keys": 7},
    ],
)
def test_claims_of_wrong_types_are_denied(changed: dict[str, object]) -> None:
    with pytest.raises(DeniedError, match="wrong types"):
        verify(signed(CLAIMS | changed), incarnation=1 if "incarnation" in changed else 3)


BOUND = {"rank": 5, "keys": "k", "number": 1, "told": "x"}


@pytest.mark.parametrize(
    ("roles", "with_"),
    [
        ([Role.SIDECAR, Role.COPIER], {"rank"}),
        ([Role.VIEWER, Role.READER, Role.EDITOR, Role.GATHERER], {"keys"}),
        ([Role.CONTROL], {"rank", "number", "told"}),
    ],
)
def test_no_ticket_is_good_at_more_than_one_server_and_no_order_for_more_than_a_call(
    roles: list[Role], with_: set[str]
) -> None:
    bound = {name: BOUND[name] for name in with_}
    for role in roles:
        ticket(**({"role": role, "rank": None} | bound))
        for lacking in with_:
            loose = {name: value for name, value in bound.items() if name != lacking}
            with pytest.raises(UsageError, match=r"names|has a number"):
                ticket(**({"role": role, "rank": None} | loose))
            with pytest.raises(DeniedError, match=r"names|has a number"):
                verify(signed(CLAIMS | {"role": role.value, "rank": None} | loose))
    for more in {"keys"} - with_:
        with pytest.raises(DeniedError):
            verify(signed(CLAIMS | {"role": roles[0].value} | bound | {more: BOUND[more]}))


def test_what_is_handed_over_and_minted_is_good_where_it_says() -> None:
    seed, ranks = "ab" * 16, 3
    text = ticket(role=Role.GATHERER, rank=None, keys=tickets.key_root(seed, ranks))
    for rank, place in ((None, 0), (0, 1), (2, 3)):
        shown = tickets.shown_of(tickets.handed(text, seed), rank, ranks)
        Verifier(PUBLIC, place).verify(shown, job="run", incarnation=3, now_s=NOW_S)
    with pytest.raises(DeniedError, match="no ticket with its seed"):
        tickets.shown_of(f"{text}~no seed", 0, ranks)
    terms: dict[str, Any] = {"job": "run", "incarnation": 3, "token_id": "t", "ttl_s": 60.0}
    minted = tickets.mint_of_ranks(SIGNER, Role.SIDECAR, ranks=range(1, 3), **terms)
    found = [verify(one, now_s=None) for one in minted]
    assert [(one.rank, one.role, one.token_id) for one in found] == [
        (1, Role.SIDECAR, "t"), (2, Role.SIDECAR, "t"),
    ]  # fmt: skip
    assert tickets.claimed(minted[0]) == ("run", 3)
    assert tickets.life_s(minted[0]) == pytest.approx(60.0)
    order = verify(ticket(role=Role.CONTROL, number=2**63 - 1, told="x", ttl_s=0.5))
    assert (order.number, order.told, order.rank) == (2**63 - 1, "x", 5)
    with pytest.raises(UsageError, match=r"from 1 to 2\*\*63 - 1"):
        ticket(role=Role.CONTROL, number=2**63, told="x")
    assert tickets.holds_token(f"x{tickets.new_token()}y")
    assert not tickets.holds_token(tickets.new_token()[:46])


def test_an_order_is_taken_once_also_by_the_next_process(tmp_path: Path) -> None:
    with (tmp_path / "page").open("w+b") as file:
        file.truncate(PAGE_BYTES)
        page = ControlPage(file.fileno())
        orders = Orders(page)
        for number in (7, 5, 2**62):
            orders.take(number)
            with pytest.raises(ReplayedError):
                orders.take(number)
        after = Orders(page)
        for number in (5, 6, 7, 2**62):
            # Of a control plane whose clock is behind that of the one before it.
            behind = f"{2**42 / 1000:.0f} s behind" if number < 2**62 else "taken already"
            with pytest.raises(ReplayedError, match=behind):
                after.take(number)
        after.take(2**62 + 1)
        # What is too old to be known is refused as well.
        for number in range(KEPT):
            after.take(2**62 + 2 + number)
        with pytest.raises(ReplayedError):
            after.take(2**62 + 1)
        assert len(after._taken) == KEPT
        page.close()


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_useless_validity_is_a_usage_error(ttl_s: float) -> None:
    with pytest.raises(UsageError, match="ttl_s"):
        ticket(ttl_s=ttl_s)


@pytest.mark.parametrize("value", ["", "ab", "zz" * 32, "ab" * 33, None, 7])
def test_a_malformed_key_is_refused_without_showing_it(value: object) -> None:
    with pytest.raises(UsageError, match=r"^private_key: (0|1|33) bytes; expected 32") as refused:
        key_from_hex({"private_key": value}, "private_key")
    assert "abab" not in str(refused.value)
    assert key_from_hex({"key": KEY.hex()}, "key") == KEY


def test_the_private_key_shows_nowhere() -> None:
    assert KEY.hex() not in repr(SIGNER)
    assert not hasattr(SIGNER, "__dict__")
