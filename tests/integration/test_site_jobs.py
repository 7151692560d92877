"""A site's control plane as a real process: jobs register, are kept apart, and come back."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest

from paramd.v1 import common_pb2, control_pb2, control_pb2_grpc
from tests.integration.control_process import Control, site_plane, site_token, until

pytestmark = pytest.mark.usefixtures("grpc_is_up")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Control, Path]]:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(folder))
        with site_plane() as found:
            yield found, folder


@pytest.fixture
def control(shared: tuple[Control, Path], monkeypatch: pytest.MonkeyPatch) -> Control:
    """One site for all tests that leave it running; each has jobs of its own."""
    found, folder = shared
    monkeypatch.setenv("PARAMD_STATE_DIR", str(folder))
    return found


@dataclass(frozen=True)
class Incarnation:
    """A registered incarnation of a job."""

    job: str
    incarnation: int
    world_size: int
    tickets: list[str]
    control_address: str


def post(control: Control, token: str = "", **body: object) -> httpx2.Response:
    return control.ask("POST", "/jobs", token, json=body)


def register(control: Control, job: str, world_size: int, **more: int) -> Incarnation:
    return of_answer(post(control, job=job, world_size=world_size, **more))


def of_answer(answer: httpx2.Response) -> Incarnation:
    assert answer.status_code == 201, answer.text
    found = answer.json()
    tickets = found["rank_tickets"]
    return Incarnation(
        found["job"], found["incarnation"], len(tickets), tickets, found["control_address"]
    )


def document(control: Control, path: str) -> Any:
    answer = control.ask("GET", f"/jobs{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def report(
    incarnation: Incarnation,
    rank: int,
    *,
    phase: common_pb2.Phase.ValueType = common_pb2.PHASE_FORWARD_BACKWARD,
    leaving: bool = False,
) -> control_pb2.JoinRequest:
    return control_pb2.JoinRequest(
        header=common_pb2.Header(
            job=incarnation.job, incarnation=incarnation.incarnation, step=7, rank=rank
        ),
        world_size=incarnation.world_size,
        peer=common_pb2.Peer(rank=rank, address="127.0.0.1:1"),
        state=common_pb2.RankState(rank=rank, phase=phase, agreement_works=True),
        leaving=leaving,
    )


@asynccontextmanager
async def join(
    address: str,
    incarnation: Incarnation,
    rank: int,
    *,
    speaks_for: Incarnation | None = None,
    **said: Any,
) -> AsyncIterator[Any]:
    """A rank's stream, once it has been let in; yields it."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = control_pb2_grpc.ControlServiceStub(channel)
        metadata = (("authorization", f"Bearer {incarnation.tickets[rank]}"),)
        stream = stub.Join(metadata=metadata)
        try:
            await stream.write(
                report(speaks_for if speaks_for is not None else incarnation, rank, **said)
            )
            stream.welcome = await asyncio.wait_for(stream.read(), 60)
            if stream.welcome is grpc.aio.EOF:
                await stream  # raises its status
            yield stream
        finally:
            stream.cancel()


async def test_jobs_of_a_site_are_kept_apart(control: Control) -> None:
    one, two = register(control, "one", 1), register(control, "two", 2)
    assert (one.incarnation, two.incarnation) == (1, 1)
    assert one.control_address == control.grpc_address
    async with join(control.grpc_address, one, 0), join(control.grpc_address, two, 1):
        jobs = {job["job"]: job for job in document(control, "")["jobs"]}
        assert (jobs["one"]["state"], jobs["one"]["reason"]) == ("ok", "")
        assert (jobs["two"]["state"], jobs["two"]["joined_count"]) == ("starting", 1)
        for foreign in (two, one):
            other = one if foreign is two else two
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with join(control.grpc_address, other, 0, speaks_for=foreign):
                    pass
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert control.get("/api/v1/jobs/three", site_token()).status_code == 404


async def test_a_job_that_trains_keeps_its_name_and_one_that_ended_gets_a_new_incarnation(
    control: Control,
) -> None:
    first = register(control, "again", 2)
    async with join(control.grpc_address, first, 0) as stream:
        refused = post(control, job="again", world_size=2)
        assert refused.status_code == 409
        assert "is already training, in run 1" in refused.json()["detail"]
        await stream.write(report(first, 0, phase=common_pb2.PHASE_ORPHANED))
        await until(lambda: document(control, "/again/ranks")["ranks"][0]["phase"] == "orphaned")
        # The same job, restarted with another world size.
        second = register(control, "again", 3)
        assert second.incarnation == 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "run 2 has begun" in (caught.value.details() or "")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with join(control.grpc_address, first, 0):
            pass
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    incarnations = document(control, "/again/incarnations")["incarnations"]
    assert [(e["incarnation"], e["world_size"]) for e in incarnations] == [(1, 2), (2, 3)]
    assert "run 2 has begun" in incarnations[0]["reason"]
    assert incarnations[0]["step"] == 7
    assert (incarnations[1]["ended_s"], document(control, "/again")["world_size"]) == (None, 3)


async def test_an_incarnation_is_over_when_all_ranks_have_detached_and_the_site_goes_on(
    control: Control,
) -> None:
    first = register(control, "over", 1)
    async with join(control.grpc_address, first, 0, leaving=True):
        await until(lambda: document(control, "/over/incarnations")["incarnations"][0]["ended_s"])
    found = document(control, "/over")
    assert (found["state"], found["reason"][:27]) == ("ended", "all 1 ranks have detached; ")
    assert register(control, "over", 1, incarnation_floor=40).incarnation == 41


async def test_a_restarted_site_knows_its_sidecars_again_and_hands_out_higher_incarnations() -> (
    None
):
    with site_plane() as first:
        register(first, "run", 1)
        incarnation = register(first, "run", 1)
        async with join(first.grpc_address, incarnation, 0) as stream:
            generation = stream.welcome.generation
            runs = document(first, "/run/incarnations")["incarnations"]
            first.process.kill()
            first.wait()
    with site_plane() as second:
        assert document(second, "")["jobs"] == []
        async with join(second.grpc_address, incarnation, 0) as stream:
            assert stream.welcome.generation > generation
            found = document(second, "/run")
            assert (found["incarnation"], found["world_size"], found["state"]) == (2, 1, "ok")
            assert document(second, "/run/incarnations")["incarnations"] == runs
        assert register(second, "run", 1, incarnation_floor=0).incarnation == 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with join(second.grpc_address, incarnation, 0):
                pass
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


CUT_SHORT = "Internal error from Core"
"""What gRPC says when a server ends a stream while the client still writes to it."""


async def test_ranks_end_with_the_token_that_registered_them(control: Control) -> None:
    mine, other = (control.new_token("trainer", name=name) for name in ("mine", "other"))
    incarnation = of_answer(post(control, mine, job="mine", world_size=2))
    taken = post(control, other, job="mine", world_size=1)
    assert (taken.status_code, "another token" in taken.json()["detail"]) == (403, True)
    async with join(control.grpc_address, incarnation, 0) as stream:
        assert control.ask("DELETE", "/tokens/mine").status_code == 200
        # It is told of the revocation, too, before its own stream ends.
        with suppress(grpc.aio.AioRpcError):
            while await asyncio.wait_for(stream.read(), 60) is not grpc.aio.EOF:
                pass
        assert "revoked or has expired" in (await stream.details() or "")
    details = CUT_SHORT
    while details == CUT_SHORT:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with join(control.grpc_address, incarnation, 1):
                pass
        details = caught.value.details() or ""
    assert "revoked or has expired" in details
    assert of_answer(post(control, other, job="mine", world_size=1)).incarnation == 2


def test_a_token_for_some_jobs_sees_and_registers_no_other(control: Control) -> None:
    register(control, "b-one", 1)
    tokens = {
        role: control.new_token(role, name=f"a-{role}", jobs="a-*,shared")
        for role in ("trainer", "viewer", "editor", "reader", "exporter")
    }
    assert post(control, tokens["trainer"], job="a-one", world_size=1).status_code == 201
    for job in ("b-one", "b-two", "A-one", "shared2"):
        assert post(control, tokens["trainer"], job=job, world_size=1).status_code == 404
    described = control.get("/api/v1/openapi.json", site_token()).json()["paths"]
    operations = [(m, path) for path in described if "{job}" in path for m in described[path]]
    for role, token in tokens.items():
        found = control.get("/api/v1/jobs", token).json()["jobs"]
        assert [job["job"] for job in found] == ["a-one"]
        assert "b-one" not in control.get("/api/v1/jobs/a-two", token).text
        assert control.get("/metrics", token).status_code == 403
        headers = {"authorization": f"Bearer {token}"}
        with httpx2.Client(base_url=control.url, headers=headers, trust_env=False) as client:
            for method, path in operations:
                answer = client.request(method, path.replace("{job}", "b-one"))
                # Whatever the role, and before anything of the request is looked at.
                assert answer.status_code in (404, 422), (role, method, path)
                assert "your token is for jobs a-*,shared" in answer.text, (role, method, path)
    for other in ("b-one", "b-nowhere"):
        answer = control.get(f"/api/v1/jobs/a-one/diff?a=now&b=job:{other}", tokens["reader"])
        assert answer.status_code == 404
        assert "your token is for" in answer.text, "it does not tell whether there is such a job"


async def test_registrations_of_thousands_keep_nobody_waiting_and_end_with_their_callers(
    control: Control,
) -> None:
    crowd, other = (control.new_token("trainer", name=name) for name in ("crowd", "bystander"))
    host, port = control.url.removeprefix("http://").split(":")
    writers, answers = [], []
    for number in range(6):
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"job": f"big{number}", "world_size": 65_536})
        head = f"POST /api/v1/jobs HTTP/1.1\r\nhost: {host}:{port}\r\n"
        head += f"authorization: Bearer {crowd}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        writers.append(writer)
        answers.append(asyncio.create_task(reader.read(1)))
    small = await asyncio.to_thread(post, control, other, job="small", world_size=8)
    assert small.status_code == 201
    assert not all(one.done() for one in answers), "it waited for all of them"
    for writer, answer in zip(writers, answers, strict=True):
        answer.cancel()
        writer.close()
        await writer.wait_closed()
    again = await asyncio.to_thread(post, control, crowd, job="small", world_size=8)
    assert again.status_code == 403, "a job is its token's"
    known = [job["job"] for job in document(control, "")["jobs"] if job["job"].startswith("big")]
    assert len(known) == 1, "its six would be more ranks than one token may have"
    again = await asyncio.to_thread(post, control, crowd, job="theirs", world_size=8)
    assert again.status_code == 201, "the six have ended with their callers"
