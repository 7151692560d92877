"""A job's own CA: the same for everyone who has its key, different for everyone else."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from contextlib import suppress

import pytest
from cryptography import x509

from paramd.errors import DeniedError, UsageError
from paramd.security.job_authority import (
    BACKDATED,
    CLIENT_S,
    RENEWED_AT,
    JobAuthority,
    NextKey,
    renew_at_s,
    validity,
)
from paramd.security.tls import (
    CERTIFICATE_S,
    ClientTls,
    Pems,
    host_of,
    open_channel,
    pin_of,
    tls_for,
)
from paramd_service.control.base.certificates import JobCertificates, ServedCertificate
from paramd_service.tls import JobPems, ServerTls

KEY = bytes(range(32))


def authority(key: bytes = KEY, incarnation: int = 1) -> JobAuthority:
    return JobAuthority(key, job="run", incarnation=incarnation)


def shaken(server: Pems, client: Pems, host: str) -> str:
    """The client's name as a mutual server sees it; raises what the client raises."""
    ours, theirs = socket.socketpair()
    seen = []

    def serve() -> None:
        context = ServerTls(JobPems(server, mutual=True)).ssl_context()
        with suppress(OSError), context.wrap_socket(theirs, server_side=True) as secure:
            found = secure.getpeercert()
            assert found is not None
            subject: tuple[tuple[tuple[str, str], ...], ...] = found["subject"]  # type: ignore[assignment]
            seen.append(subject[0][0][1])
            secure.sendall(b"!")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        context = ClientTls(pems=client).ssl_context()
        with context.wrap_socket(ours, server_hostname=host) as secure:
            # In TLS 1.3 a server that refuses us says so only after the handshake.
            if secure.recv(1) != b"!":
                raise ssl.SSLError("refused")
    finally:
        ours.close()
        thread.join()
        theirs.close()
    return seen[0]


def test_two_processes_with_the_key_are_the_same_authority() -> None:
    one, two = authority(), authority()
    assert one.pin == two.pin == pin_of(one.pem)
    # Issued by the one, checked with the CA of the other.
    rank = one.issue("paramd rank 1", ["10.0.0.2"])
    client = two.issue("paramd client")
    assert shaken(rank, client, "10.0.0.2") == "paramd client"


@pytest.mark.parametrize("host", ["10.0.0.2", "127.0.0.1", "localhost"])
def test_a_certificate_is_for_its_host_and_for_forwarded_ports(host: str) -> None:
    rank = authority().issue("paramd rank 1", ["10.0.0.2"])
    assert shaken(rank, rank, host) == "paramd rank 1"
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(rank, rank, "10.0.0.3")


@pytest.mark.parametrize("other", [authority(bytes(32)), authority(incarnation=2)])
def test_another_key_or_incarnation_is_refused_at_both_ends(other: JobAuthority) -> None:
    assert other.pin != authority().pin
    mine = authority().issue("paramd rank 1", ["10.0.0.2"])
    theirs = other.issue("paramd rank 1", ["10.0.0.2"])
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(theirs, mine, "10.0.0.2")
    # It trusts us, but shows what it has.
    with pytest.raises((ssl.SSLError, OSError)):
        shaken(mine, Pems(ca=mine.ca, cert=theirs.cert, key=theirs.key), "10.0.0.2")
    with pytest.raises((ssl.SSLError, OSError)):
        shaken(mine, Pems(ca=mine.ca), "10.0.0.2")


def test_a_client_certificate_cannot_serve() -> None:
    client = authority().issue("paramd client")
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(client, client, "127.0.0.1")


def test_certificates_hold_with_clocks_hours_apart() -> None:
    found = x509.load_pem_x509_certificate(authority().issue("x", ["h"]).cert)
    ca = x509.load_pem_x509_certificate(authority().pem)
    assert (found.not_valid_after_utc - found.not_valid_before_utc).days == 8
    assert ca.not_valid_before_utc < found.not_valid_before_utc
    assert ca.not_valid_after_utc > found.not_valid_after_utc


def test_a_clients_certificate_is_kept_and_renewed_in_time() -> None:
    now_s = [0.0]
    made = JobCertificates(KEY, job="run", incarnation=1, clock=lambda: now_s[0])
    first = made.client("t")
    assert made.client("t") is first
    assert made.client("u") != first
    now_s[0] = 0.45 * CLIENT_S
    assert made.client("t") is first
    now_s[0] = 0.55 * CLIENT_S
    assert made.client("t") != first
    assert made.authority.pin == authority().pin


def renewed(present: Pems, *, rank: int = 1, lifetime_s: float = CERTIFICATE_S) -> Pems:
    key = NextKey(present)
    found = authority().renew(rank, present.cert, key.public_key, key.proof, lifetime_s=lifetime_s)
    return key.certified(found)


def rank_pems(rank: int = 1, *, of: JobAuthority | None = None) -> Pems:
    made = of if of is not None else authority()
    return made.issue(f"paramd rank {rank}", ["10.0.0.2"])


@pytest.mark.parametrize("lifetime_s", [CERTIFICATE_S, -1.0])
def test_a_renewed_certificate_has_another_key_and_serial_and_the_same_names(
    lifetime_s: float,
) -> None:
    """Also of one that has expired: where it can still ask, its ticket says who it is."""
    present = authority().issue("paramd rank 1", ["10.0.0.2"], lifetime_s=lifetime_s)
    following = renewed(present)
    assert following.ca == present.ca
    assert following.key != present.key
    certificates = [x509.load_pem_x509_certificate(one.cert) for one in (present, following)]
    assert len({one.serial_number for one in certificates}) == 2
    # As the first: clocks may differ by hours.
    begin = certificates[1].not_valid_before_utc.timestamp()
    assert begin + BACKDATED.total_seconds() == pytest.approx(time.time(), abs=60.0)
    for host in ("10.0.0.2", "localhost"):
        assert shaken(following, following, host) == "paramd rank 1"
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(following, following, "10.0.0.3")
    # And once more, with the new key.
    assert renewed(following).key != following.key


def test_another_ranks_certificate_renews_nothing() -> None:
    with pytest.raises(DeniedError, match="rank 0 shows another one's certificate"):
        renewed(rank_pems(1), rank=0)
    # A client's name is none of a rank's, and it may not serve.
    with pytest.raises(DeniedError, match="of rank 1 is not renewed"):
        renewed(authority().issue("paramd rank 1"))


@pytest.mark.parametrize(
    "present",
    [
        rank_pems(of=authority(bytes(32))),
        rank_pems(of=authority(incarnation=2)),
        Pems(ca=authority().pem, cert=rank_pems().cert, key=rank_pems().key),
        Pems(ca=authority().pem, cert=b"nothing", key=rank_pems().key),
    ],
    ids=["another key", "another incarnation", "a key that is not its own", "no certificate"],
)
def test_what_is_no_proof_of_the_present_certificate_renews_nothing(present: Pems) -> None:
    with pytest.raises(DeniedError, match="what was shown is not its own"):
        renewed(present)


def test_only_keys_of_our_kind_are_certified_and_only_ones_own_is_taken() -> None:
    present = rank_pems()
    key, other = NextKey(present), NextKey(present)
    for wrong in (b"", b"nothing", key.public_key[:-1], other.public_key):
        with pytest.raises(DeniedError, match="is not renewed"):
            authority().renew(1, present.cert, wrong, key.proof, lifetime_s=60.0)
    certificate = authority().renew(1, present.cert, key.public_key, key.proof, lifetime_s=60.0)
    for wrong in (b"", rank_pems().cert, rank_pems(of=authority(bytes(32))).cert):
        with pytest.raises(DeniedError, match="another key or CA"):
            key.certified(wrong)
    with pytest.raises(DeniedError, match="another key or CA"):
        other.certified(certificate)


def test_a_certificate_is_due_after_two_thirds_of_its_validity() -> None:
    begin_s, end_s = validity(rank_pems().cert)
    assert end_s - begin_s == CERTIFICATE_S
    assert abs(begin_s - time.time()) < 60.0
    assert renew_at_s(rank_pems().cert) - begin_s == pytest.approx(RENEWED_AT * CERTIFICATE_S)


def test_the_control_planes_own_is_issued_again_once_it_is_due() -> None:
    made = JobCertificates(KEY, job="run", incarnation=1)
    for lifetime_s, again in ((CERTIFICATE_S, False), (0.0, True)):
        served = ServedCertificate(made, ["10.0.0.1"], lifetime_s=lifetime_s)
        before = served.rest.pems
        served.keep_valid()
        assert (served.rest.pems is not before) == again
        assert served.grpc.pems is served.rest.pems
        assert pin_of(served.rest.pems.ca) == authority().pin


def test_a_replaced_certificate_is_in_force_at_the_next_handshake() -> None:
    source = JobPems(authority().issue("a", ["h"]), mutual=True)
    tls = ServerTls(source)
    assert not tls.refresh()
    source.replace(authority(incarnation=2).issue("b", ["h", "new.example"]))
    assert tls.refresh()
    assert "new.example" in tls.names


@pytest.mark.parametrize(
    "found", [None, {}, {"ca": 1, "cert": "", "key": ""}, {"ca": "", "cert": "", "key": ""}]
)
def test_what_is_no_certificate_is_refused_without_being_quoted(found: object) -> None:
    with pytest.raises(UsageError, match="ca, cert and key"):
        Pems.of_json(found)


def test_a_key_is_in_no_text_of_its_object() -> None:
    pems = authority().issue("a", ["h"])
    assert Pems.of_json(json.loads(json.dumps(pems.to_json()))) == pems
    assert "PRIVATE" not in f"{pems!r} {ClientTls(pems=pems)!r} {JobPems(pems, mutual=True)}"


async def test_an_address_within_a_job_needs_the_jobs_certificate() -> None:
    address = "mtls://10.0.0.2:4000"
    pems = authority().issue("a")
    assert host_of(address) == "10.0.0.2"
    assert tls_for(address, None, pems) == ClientTls(pems=pems)
    assert tls_for("grpcs://10.0.0.2:4000", None, pems) is None
    with pytest.raises(DeniedError, match="no certificate of the job"):
        open_channel(address, ClientTls())
    channel = open_channel(address, ClientTls(pems=pems))
    await channel.close()


@pytest.mark.parametrize("pin", ["sha256:", "sha256:12", "sha256:" + "g" * 64])
def test_a_bad_fingerprint_is_refused(pin: str) -> None:
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        ClientTls.from_environment(pin)
