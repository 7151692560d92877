"""A job's own CA: the same for everyone who has its key, different for everyone else."""

import json
import socket
import ssl
import threading
from contextlib import suppress

import pytest

from paramd.errors import DeniedError, UsageError
from paramd.security.authority import CLIENT_S, JobAuthority
from paramd.security.tls import ClientTls, Pems, host_of, open_channel, pin_of, tls_for
from paramd_service.control.base.certificates import JobCertificates
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
    address, pems = "mtls://10.0.0.2:4000", authority().issue("a")
    assert host_of(address) == "10.0.0.2"
    assert tls_for(address, None, pems) == ClientTls(pems=pems)
    assert tls_for("grpcs://10.0.0.2:4000", None, pems) is None
    with pytest.raises(DeniedError, match="no certificate of the job"):
        open_channel(address, ClientTls())
    channel = open_channel(address, ClientTls(pems=pems))
    await channel.close()
