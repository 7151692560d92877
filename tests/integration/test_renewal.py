"""Certificates of a job's own CA are renewed while everything goes on, or said to have ended."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest

from paramd.mesh.peers.control import JobDocument, PeerAddress
from paramd.mesh.peers.grpc import Background, Channels, RankUnreachableError
from paramd.mesh.peers.sidecars import Sidecars
from paramd.security.job_authority import JobAuthority, NextKey, validity
from paramd.security.tickets import Role
from paramd.security.tls import JOB_SCHEME, ClientTls, Pems, open_channel
from paramd.v1 import control_pb2, control_pb2_grpc, sidecar_pb2_grpc
from tests.integration.control_process import (
    JOB,
    PRIVATE_KEY,
    FakeSidecar,
    control_plane,
    first_grpc_use,
    site_plane,
    site_token,
    ticket,
)
from tests.integration.fake_trainer import TrainerSettings, attach
from tests.integration.sidecar_process import Client, sidecar, wait_until
from tests.integration.sidecar_process import ticket as sidecar_ticket

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def warm() -> Iterator[None]:
    with first_grpc_use():
        yield


def shown(address: str) -> str:
    """The certificate that a server shows in a new handshake."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


def is_healthy(url: str, verify: ssl.SSLContext) -> bool:
    """Over a new connection; a certificate that ended a moment ago is one that is late."""
    try:
        return httpx2.get(f"{url}/healthz", verify=verify, trust_env=False).status_code == 200
    except httpx2.ConnectError:
        return False


def renewal(pems: Pems, *, rank: int, incarnation: int = 1) -> control_pb2.RenewCertificateRequest:
    key = NextKey(pems)
    return control_pb2.RenewCertificateRequest(
        job=JOB,
        incarnation=incarnation,
        rank=rank,
        certificate=pems.cert,
        public_key=key.public_key,
        proof=key.proof,
    )


async def refusal(address: str, pems: Pems, request: Any, metadata: Any) -> tuple[str, str]:
    """How the control plane refuses who connects with `pems`: the status, and its words."""
    async with open_channel(address, ClientTls(pems=pems)) as channel:
        stub: Any = control_pb2_grpc.ControlServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.RenewCertificate(request, metadata=metadata, timeout=10.0)
    return error.value.code().name, str(error.value.details())


async def test_the_control_plane_renews_each_ranks_certificate_and_nobody_elses() -> None:
    made = JobAuthority(PRIVATE_KEY, job=JOB, incarnation=1)
    zero, one = made.issue_ranks([HOST, HOST])
    with control_plane(own_tls=True) as control:
        address = control.grpc_address
        key = NextKey(one)
        asked = control_pb2.RenewCertificateRequest(
            job=JOB, incarnation=1, rank=1,
            certificate=one.cert, public_key=key.public_key, proof=key.proof,
        )  # fmt: skip
        mine = ticket(Role.SIDECAR, rank=1)
        async with open_channel(address, ClientTls(pems=one)) as channel:
            stub: Any = control_pb2_grpc.ControlServiceStub(channel)
            answer = await stub.RenewCertificate(asked, metadata=mine, timeout=10.0)
        following = key.certified(answer.certificate)
        assert following.cert != one.cert
        # What is refused: each but for one word the same as what was granted, with the new one.
        theirs = ticket(Role.SIDECAR, rank=0)
        right = renewal(following, rank=1)
        code, why = await refusal(address, following, renewal(following, rank=0), mine)
        assert (code, "not valid for rank 0" in why) == ("PERMISSION_DENIED", True), why
        code, why = await refusal(address, following, right, theirs)
        assert (code, "not valid for rank 1" in why) == ("PERMISSION_DENIED", True), why
        # Rank 1 with rank 0's ticket, in its name: its certificate gives it away.
        code, why = await refusal(address, following, renewal(zero, rank=0), theirs)
        assert "'paramd rank 1' calls as rank 0" in why, (code, why)
        code, why = await refusal(address, following, renewal(zero, rank=1), mine)
        assert "rank 1 shows another one's certificate" in why, (code, why)
        code, why = await refusal(address, following, renewal(following, rank=1), ticket(rank=1))
        assert (code, "may not call" in why) == ("PERMISSION_DENIED", True), why
        code, why = await refusal(
            address, following, renewal(following, rank=1, incarnation=2), mine
        )
        assert code == "FAILED_PRECONDITION", why
        # A next incarnation's rank has another CA, and is not let in at all.
        later = JobAuthority(PRIVATE_KEY, job=JOB, incarnation=2).issue_ranks([HOST, HOST])[1]
        mixed = Pems(ca=made.pem, cert=later.cert, key=later.key)
        assert (await refusal(address, mixed, right, mine))[0] == "UNAVAILABLE"


async def test_a_site_renews_also_what_has_ended_while_it_was_away() -> None:
    """Its own certificate is the operator's, so who has an expired one still reaches it."""
    with site_plane("--certificate-s", "1") as site:
        answer = httpx2.post(
            f"{site.url}/api/v1/jobs",
            json={"job": JOB, "world_size": 2, "rank_hosts": [HOST, "10.0.0.2"]},
            headers={"authorization": f"Bearer {site_token()}"},
            trust_env=False,
        )
        found = answer.json()
        assert answer.status_code == 201, found
        one = Pems.of_json(found["rank_tls"][1])
        begin_s, end_s = validity(one.cert)
        assert end_s - begin_s == 1.0
        wait_until(lambda: time.time() > end_s, "its end")
        key = NextKey(one)
        request = control_pb2.RenewCertificateRequest(
            job=JOB, incarnation=found["incarnation"], rank=1,
            certificate=one.cert, public_key=key.public_key, proof=key.proof,
        )  # fmt: skip
        async with open_channel(site.grpc_address) as channel:
            stub: Any = control_pb2_grpc.ControlServiceStub(channel)
            answers = [
                await stub.RenewCertificate(
                    request, metadata=(("authorization", f"Bearer {mine}"),), timeout=10.0
                )
                for mine in found["rank_tickets"][1:]
            ]
            with pytest.raises(grpc.aio.AioRpcError, match="not valid for rank 1"):
                await stub.RenewCertificate(
                    request,
                    metadata=(("authorization", f"Bearer {found['rank_tickets'][0]}"),),
                    timeout=10.0,
                )
        assert validity(key.certified(answers[0].certificate).cert)[1] > end_s


async def test_the_control_planes_own_certificate_is_renewed_while_connections_go_on() -> None:
    made = JobAuthority(PRIVATE_KEY, job=JOB, incarnation=1)
    (pems,) = made.issue_ranks([HOST])
    verify = ClientTls(pems=Pems(ca=made.pem)).ssl_context()
    with control_plane("--certificate-s", "6", own_tls=True) as control:
        addresses = (control.url, control.grpc_address)
        first = [shown(address) for address in addresses]
        begun_s = time.monotonic()
        reporter = FakeSidecar(0, address="127.0.0.1:1")
        async with (
            httpx2.AsyncClient(verify=verify, trust_env=False) as client,
            open_channel(control.grpc_address, ClientTls(pems=pems)) as channel,
        ):
            stub: Any = control_pb2_grpc.ControlServiceStub(channel)
            stream = stub.Join(metadata=ticket(Role.SIDECAR))
            await stream.write(reporter.report())
            assert await stream.read() is not grpc.aio.EOF
            for _ in range(2):
                before = [shown(address) for address in addresses]
                wait_until(
                    lambda: all(shown(a) != b for a, b in zip(addresses, before, strict=True)),  # noqa: B023
                    "another certificate",
                    30.0,
                )
            assert [shown(address) for address in addresses] != first
            # By now the first one has ended.
            wait_until(lambda: time.monotonic() - begun_s > 6.5, "its end", 30.0)
            assert (await client.get(f"{control.url}/healthz")).status_code == 200
            wait_until(lambda: is_healthy(control.url, verify), "a new connection", 30.0)
            await stream.write(reporter.report())
            assert not stream.done()
            stream.cancel()


def reads(client: Client) -> bool:
    found = client.pin()
    client.release(found.snapshot_id)
    return bool(found.size_bytes)


async def probed(document: JobDocument, mine: Pems) -> str:
    """What a client with this certificate is told about rank 0."""
    channels = Channels(lambda: document.ticket, job_tls=lambda: mine)
    try:
        with pytest.raises(RankUnreachableError) as error:
            await Sidecars(channels, document, Background()).probe(0)
    finally:
        await channels.close()
    return str(error.value)


async def test_without_a_control_plane_a_certificate_is_good_until_its_end_and_then_named(
    tmp_path: Path,
) -> None:
    made = JobAuthority(PRIVATE_KEY, job="job", incarnation=1)
    pems = made.issue("paramd rank 0", [HOST], lifetime_s=12.0)
    reader = made.issue("paramd client")
    stdin = json.dumps(pems.to_json()).encode() + b"\n"
    with sidecar(tmp_path / "s", "--job-tls", stdin=stdin) as process:
        trainer = attach(
            process.socket_path, TrainerSettings(control_address=f"{JOB_SCHEME}{HOST}:1")
        )
        address = trainer.address.removeprefix(JOB_SCHEME)
        credentials = ClientTls(pems=reader).channel_credentials()
        with (
            contextlib.closing(trainer),
            contextlib.closing(Client(address)) as client,
            grpc.secure_channel(address, credentials) as channel,
        ):
            client.stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
            trainer.send_mesh()
            trainer.update()
            assert reads(client)
            wait_until(lambda: '"certificate-not-renewed"' in process.log, "it asks", 30.0)
            assert reads(client)
            wait_until(lambda: '"certificate-expired"' in process.log, "its end", 30.0)
            assert "attaches again" in process.log
            # Connections that there are go on.
            assert reads(client)
            document = JobDocument(
                job="job", incarnation=1, world_size=1, control_address="", layout_digest="",
                peers={0: PeerAddress(0, trainer.address, "", "")},
                ticket=sidecar_ticket(), ticket_expires_s=0.0, tls=reader,
            )  # fmt: skip
            error = await probed(document, reader)
            for words in (
                trainer.address,
                "rank 0",
                "has expired",
                "clock",
                "no control plane",
                "attach again",
            ):
                assert words in error, error
            assert "restarting" not in error
            other = JobAuthority(bytes(32), job="job", incarnation=1).issue("paramd client")
            assert "of another CA" in await probed(document, other)
