"""Whoever answers is who was asked: addresses that lead to another rank give no answer at all."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import httpx2
import pytest
import torch
from google.protobuf.message_factory import GetMessageClass

import paramd
from paramd.errors import ASKED_BY_KEY, RANK_KEY, READS_KEY, ParamdError, UnreachableError
from paramd.layout.edits.kinds import EditKind
from paramd.memory import handover
from paramd.mesh.frames import stepping
from paramd.mesh.mesh import Mesh
from paramd.mesh.peers import control, discovery
from paramd.mesh.peers.control import JobDocument, parse_job
from paramd.places import host_id, job_dir
from paramd.security import tickets
from paramd.security.tickets import Role, Signer, new_private_key
from paramd.v1 import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    export_pb2,
    sidecar_pb2,
    sidecar_pb2_grpc,
)
from paramd_service.control.access.join import METHOD_ROLES
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.coordinator import BoundaryRequest
from paramd_service.control.mesh.sidecars import OwnChannels, SidecarCalls
from paramd_service.edits.runner import stage, withdrawn
from paramd_service.exports.group import made, part_of, stored
from paramd_service.sidecar.calls import ROLES, SERVICE
from paramd_service.sidecar.owner import Mesh as ExchangedMesh
from paramd_service.sidecar.rpc.control_link import may_be_at
from tests.edit_ops import edit_op
from tests.integration.client_job import DEADLINE_S, JOB, Job, halves, running_job, wait_for
from tests.longer import share
from tests.orders import bound, reads

HALF = 1 << 20
"""Each rank holds a half, at the same place of its arena: only its values tell whose it is."""

OTHER_EDIT = "f" * 32
SWAPS = ("addresses", "sockets", "both")


def fill(job: Job) -> None:
    for rank in job.ranks:
        torch.frombuffer(rank.arena.buffer, dtype=torch.float32).fill_(rank.rank + 3)


@pytest.fixture
def job() -> Iterator[Job]:
    with running_job(halves(HALF, "halves")) as job:
        fill(job)
        with paramd.connect(job=JOB) as mesh:
            # A rank that has not joined has no place that could be another's.
            wait_for(lambda: not any(row.reason for row in mesh.status()), "both ranks")
        yield job


def of(job: Job) -> Bootstrap:
    """What the job's control plane was told."""
    return Bootstrap(
        job=JOB, incarnation=1, world_size=2, private_key=job.private_key, token=job.token
    )


@contextmanager
def swapped(what: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What clients hear of the job has its two ranks at each other's places."""

    def parsed(found: Any) -> JobDocument:
        document = parse_job(found)
        one, other = document.peers[0], document.peers[1]
        if what != "sockets":
            one, other = replace(one, address=other.address), replace(other, address=one.address)
        if what != "addresses":
            paths = one.socket_path, other.socket_path
            one, other = replace(one, socket_path=paths[1]), replace(other, socket_path=paths[0])
        return replace(document, peers={0: one, 1: other})

    with monkeypatch.context() as patch:
        patch.setattr(control, "parse_job", parsed)
        patch.setattr(discovery, "RECOVERY_S", 0.2)
        patch.setattr(stepping, "OUTAGE_S", 0.2)
        yield


def refused(read: Callable[[], Any]) -> None:
    with pytest.raises(UnreachableError, match=r"rank [01].*(not rank|not there|not at its)"):
        read()


def check_halves(found: torch.Tensor) -> None:
    assert bool((found[:HALF] == 3).all())
    assert bool((found[HALF:] == 4).all())


@pytest.mark.parametrize("what", share(list(SWAPS), 2))
def test_ranks_at_each_others_places_are_refused_and_never_read(
    job: Job, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swapped(what, monkeypatch), paramd.connect(job=JOB) as mesh:
        if what == "sockets":
            # gRPC is right, so what is found there is too; the sockets are not even tried on.
            check_halves(mesh.summon("halves")["halves"])
            refused(lambda: mesh.summon("halves", transport="same-host"))
            refused(lambda: edit(mesh, transport="same-host"))
            return
        refused(lambda: mesh.summon("halves"))
        refused(lambda: mesh.summon("halves", transport="grpc"))
        refused(lambda: mesh.summon("halves", transport="same-host"))
        refused(lambda: mesh.stats("halves"))
        refused(lambda: mesh.view("halves").__enter__())
        refused(lambda: mesh.layout)
        refused(lambda: next(iter(mesh.grads("halves"))))
        refused(lambda: next(iter(mesh.follow("halves"))))
        refused(lambda: edit(mesh, transport="grpc"))
        assert {row.phase for row in mesh.status()} == {"unreachable"}
        assert {one.state for one in mesh.edits()} == {"ABORTED"}


def edit(mesh: Mesh, transport: Any) -> None:
    mesh.edit("halves", set=torch.zeros(2 * HALF), transport=transport, timeout=10)


def test_a_job_whose_ranks_changed_places_is_found_again(job: Job) -> None:
    """Ports are used again: what a client knows of a job is then another rank's."""
    with paramd.connect(job=JOB) as mesh:
        check_halves(mesh.summon("halves", transport="grpc")["halves"])
        places = [rank.address for rank in job.ranks]
        for rank in job.ranks:
            rank.process.kill()
            rank.process.wait()
        for rank in job.ranks:
            rank.listen = places[1 - rank.rank]
            job.respawn(rank)
        assert [rank.address for rank in job.ranks] == places[::-1]
        job.send_mesh(job.ranks[0])
        check_halves(mesh.summon("halves", transport="grpc", timeout=20)["halves"])


def test_the_control_plane_takes_no_answer_of_another_rank(job: Job) -> None:
    bootstrap = of(job)
    manifest = sidecar_pb2.EditManifest(edit_id="e", incarnation=1)
    target = export_pb2.ExportTarget()

    async def ask_all() -> None:
        calls = SidecarCalls(bootstrap, generation=1)
        request = BoundaryRequest(number=1, token=1)
        write, verify = export_pb2.WriteExportFileRequest(), export_pb2.VerifyExportFileRequest()
        there = job.ranks[1].address
        asked: list[Coroutine[Any, Any, Any]] = [
            calls.reach(0, there, request, (), 5.0),
            calls.layout(0, there),
            stage(calls, 0, there, manifest),
            withdrawn(calls, 0, there, 1),
            calls.ask(0, there, sidecar_pb2.GetStateRequest()),
            calls.ask_long(0, there, export_pb2.BeginExportRequest(), timeout_s=5.0),
            made(calls, 0, there, write, timeout_s=5.0),
            made(calls, 0, there, verify, timeout_s=5.0),
            stored(calls, 0, there, target, "f", b""),
            part_of(calls, 0, there, target, "f", 0),
        ]
        try:
            for call in asked:
                with pytest.raises(UnreachableError, match="rank 0"):
                    await call
            # And of the rank itself it does.
            found = await calls.ask(1, there, sidecar_pb2.GetStateRequest())
            assert found.header.rank == 1
        finally:
            await calls.close()

    asyncio.run(ask_all())


def test_a_gateway_sends_what_all_ranks_have_and_takes_no_answer_of_another_rank(job: Job) -> None:
    """A sidecar that gathers for a thin client asks its peers as any client does."""
    one, other = job.ranks
    bearer = ("authorization", f"Bearer {bound(job.signer, Role.READER, 0, job=JOB)}")
    handed = (READS_KEY, reads(job.signer, Role.READER, 2, job=JOB))
    with grpc.insecure_channel(one.address) as channel:
        stub: Any = sidecar_pb2_grpc.SidecarServiceStub(channel)

        def gathered(pattern: str, *metadata: tuple[str, str]) -> torch.Tensor:
            request = sidecar_pb2.SummonRequest(pattern=pattern)
            answer = stub.Summon(request, timeout=10, metadata=(bearer, *metadata))
            data = bytearray(b"".join(message.data for message in answer))
            return torch.frombuffer(data, dtype=torch.float32)

        check_halves(gathered("halves", handed))
        assert gathered(f"halves[{HALF - 1}:{HALF + 2}]", handed).tolist() == [3, 4, 4]
        other.address = one.address
        job.send_mesh(one)
        for pattern, told, why in (
            ("nothing", (handed,), "no parameter matches"),
            ("halves", (), "good at this one alone"),
            ("halves", (handed,), "not rank 1"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                gathered(pattern, *told)
            error: Any = caught.value
            assert why in error.details()


class Spy(grpc.GenericRpcHandler):
    """A rank that was taken over: it keeps all that it is shown, and answers as it is told to."""

    def __init__(self) -> None:
        self.shown: set[str] = set()
        self.asked: list[str] = []
        self.answers: dict[str, Callable[[bytes], bytes]] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        self.asked.append(str(details.method).rpartition("/")[2])
        for key, value in details.invocation_metadata or ():
            if key in ("authorization", READS_KEY) and value != "Bearer ":
                self.shown.add(str(value).removeprefix("Bearer "))
        answer = self.answers.get(self.asked[-1])
        return answer and grpc.unary_unary_rpc_method_handler(lambda data, context: answer(data))


@pytest.fixture
def spy() -> Iterator[tuple[Spy, str]]:
    spy = Spy()
    server = grpc.server(ThreadPoolExecutor(4), handlers=[spy])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield spy, address
    server.stop(None).wait()


def played(job: Job, ticket: str) -> int:
    """Shows what another rank was shown to every method of every server; nothing is answered."""
    count, shown = 0, (("authorization", f"Bearer {ticket}"),)
    for address, methods in ((job.ranks[0].address, ROLES), (job.control_address, METHOD_ROLES)):
        with grpc.insecure_channel(address) as channel:
            for method in methods:
                many: Any = channel.stream_stream(method)
                call = many(iter([b""]), timeout=DEADLINE_S, metadata=shown)
                with pytest.raises(grpc.RpcError):
                    next(call)
                there = "not rank 1", "not shown with the key", "may not call", "no such snapshot"
                assert any(one in call.details() for one in there), (method, call.details())
                count += 1
    for op in ("map", "live", "lend", "stage"):
        with handover.connect(job.ranks[0].socket_path, timeout_s=DEADLINE_S) as connection:
            handover.send(connection, {"op": op, "ticket": ticket, "rank": 0})
            assert handover.receive(connection)[0]["op"] == "error"
            count += 1
    path = f"{job.url}/api/v1/jobs/{JOB}"
    assert httpx2.get(path, headers={"authorization": f"Bearer {ticket}"}).status_code == 401
    return count + 1


def test_what_a_rank_is_ever_shown_is_good_for_nothing_elsewhere(
    job: Job, spy: tuple[Spy, str]
) -> None:
    """It joins as itself, at an address of its own; clients and the control plane come by."""
    mine, (spying, there) = job.ranks[1], spy
    mine.process.kill()
    mine.process.wait()
    ticket = job.signer.mint(job=JOB, incarnation=1, role=Role.SIDECAR, rank=1, ttl_s=600)
    ended = threading.Event()

    def reports() -> Iterator[control_pb2.JoinRequest]:
        header = common_pb2.Header(
            job=JOB, incarnation=1, rank=1, step=0, layout_digest=job._digest
        )
        peer = common_pb2.Peer(rank=1, address=there, host_id=host_id())
        state = common_pb2.RankState(rank=1, agreement_works=True)
        report = control_pb2.JoinRequest(header=header, peer=peer, state=state, world_size=2)
        yield report
        while not ended.wait(0.5):
            yield report

    with grpc.insecure_channel(job.control_address) as channel, suppress(grpc.RpcError):
        stub: Any = control_pb2_grpc.ControlServiceStub(channel)
        bearer = (("authorization", f"Bearer {ticket}"),)
        joined = stub.Join(reports(), metadata=bearer)
        next(joined)
        with paramd.connect(job=JOB) as mesh, pytest.MonkeyPatch.context() as patch:
            patch.setattr(discovery, "RECOVERY_S", 0.2)
            for call in (
                lambda: mesh.summon("halves", transport="grpc", timeout=5),
                lambda: edit(mesh, transport="grpc"),
                lambda: mesh.summon("halves", buffers=True, timeout=5),
                lambda: mesh.stats("halves", timeout=5),
                lambda: mesh.logs(1),
                lambda: httpx2.get(
                    f"{job.url}/api/v1/jobs/{JOB}/params/stats?filter=halves",
                    headers={"authorization": f"Bearer {job.token}"}, timeout=DEADLINE_S,
                ),
            ):  # fmt: skip
                with suppress(ParamdError):
                    call()
        ended.set()
        joined.cancel()
    # As in an export, whose writers read from the others.
    bootstrap = of(job)

    async def export() -> None:
        calls = SidecarCalls(bootstrap, reads=True)
        with suppress(ParamdError):
            await calls.ask(1, there, export_pb2.BeginExportRequest())
        await calls.close()

    asyncio.run(export())
    roles = {tickets._parse(tickets._payload(one)).role for one in spying.shown}
    assert roles == {Role.EDITOR, Role.READER, Role.CONTROL, Role.GATHERER}
    assert sum(played(job, one) for one in [*spying.shown]) > 150


Heard = tuple[str, list[tuple[str, str]], list[bytes]]
"""Method, metadata and messages of a call."""
STREAMS = ("/StageEdit", "/StoreExportFile")


class Wire(grpc.GenericRpcHandler):
    """Who sees a rank's traffic, as without TLS, or is that rank: keeps all, and passes it on."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.seen: list[Heard] = []
        self.passes, self.loses = True, 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        kept = ("authorization", READS_KEY, RANK_KEY, ASKED_BY_KEY)
        shown = [(k, str(v)) for k, v in details.invocation_metadata or () if k in kept]

        def passed(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            data = list(requests)
            self.seen.append((str(details.method), shown, data))
            if not self.passes:
                context.abort(grpc.StatusCode.ABORTED, "withheld")
            try:
                answers = self.play(str(details.method), shown, data)
                if self.loses:
                    self.loses -= len(list(answers))
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
                yield from answers
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(passed)

    def play(self, method: str, shown: list[tuple[str, str]], data: list[bytes]) -> Any:
        many: Any = self.channel.stream_stream(method)
        return many(iter(data), timeout=DEADLINE_S, metadata=shown)


@contextmanager
def wired(address: str) -> Iterator[tuple[Wire, str]]:
    """A wire to a rank, and where it is called."""
    wire = Wire(address)
    server = grpc.server(ThreadPoolExecutor(4), handlers=[wire])
    there = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield wire, there
    wire.channel.close()
    server.stop(None).wait()


async def ordered_all(job: Job, address: str) -> int:
    """Has the control plane order of rank 1 all that it may, by reflection; how many that is."""
    bootstrap = of(job)
    manifest = sidecar_pb2.EditManifest(
        edit_id="e" * 32, incarnation=1, layout_digest=job._digest,
        ops=[edit_op("halves", EditKind.FILL, value=7.0)],
    )  # fmt: skip
    told = {"StageEdit": sidecar_pb2.StageEditRequest(manifest=manifest)}
    channels = OwnChannels(bootstrap, generation=1 << 42, reads=True)
    methods = sidecar_pb2.DESCRIPTOR.services_by_name["SidecarService"].methods
    wanted = [one for one in methods if Role.CONTROL in ROLES.get(f"/{SERVICE}/{one.name}", ())]
    for method in wanted:
        request = told.get(method.name, GetMessageClass(method.input_type)())
        call = channels.open(
            bootstrap.asked(1, address), method.name,
            [request] if method.client_streaming else request, timeout_s=DEADLINE_S,
        )  # fmt: skip
        with suppress(grpc.RpcError):
            if method.server_streaming:
                await call.read()
                call.cancel()
            else:
                await call
    await channels.close()
    return len(wanted)


def changed(what: str, method: str, shown: list[tuple[str, str]], data: list[bytes]) -> Heard:
    """A call that is not quite what was ordered."""
    if what == "method" and "GetMesh" not in method and not method.endswith(STREAMS):
        return f"/{SERVICE}/GetMesh", shown, data
    if what == "more" and method.endswith("/StageEdit"):
        return method, shown, [*data, b""]
    if what == "name":
        return method, [*shown, (ASKED_BY_KEY, "a" * 16)], data
    if what == "reads":
        return method, [(k, v if k != READS_KEY else v + "0") for k, v in shown], data
    if what == "another" and method.endswith("/StageEdit"):
        told = sidecar_pb2.StageEditRequest.FromString(data[0])
        told.manifest.edit_id = OTHER_EDIT
        return method, shown, [told.SerializeToString()]
    return method, shown, [data[0] + b"\xf8\x7f\x01"]


def test_a_read_whose_answer_is_lost_is_ordered_again(job: Job) -> None:
    async def asked(there: str) -> Any:
        channels, to = OwnChannels(of(job), generation=1 << 42), of(job).asked(1, there)
        try:
            request = sidecar_pb2.GetStateRequest()
            return await channels.ask(to, "GetState", request, timeout_s=DEADLINE_S)
        finally:
            await channels.close()

    with wired(job.ranks[1].address) as (wire, there):
        wire.loses = 2
        assert asyncio.run(asked(there)).header.rank == 1
    orders = [dict(shown)["authorization"] for _, shown, _ in wire.seen]
    assert len(set(orders)) == len(orders) == 3


def test_no_order_is_obeyed_twice_nor_for_another_request(job: Job) -> None:
    """Played at the very rank it was for, and at its successor; and changed on the way there."""
    with wired(job.ranks[1].address) as (wire, there):
        play_orders(job, wire, there)


def play_orders(job: Job, wire: Wire, there: str) -> None:
    one = job.ranks[1]
    count = asyncio.run(ordered_all(job, there))
    assert len(wire.seen) == count > 30

    def refused(method: str, shown: Any, data: list[bytes], code: str, why: str) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            next(wire.play(method, shown, data))
        error: Any = caught.value
        assert (error.code().name, why in error.details()) == (code, True), (method, str(error))

    taken = "UNAVAILABLE", "taken already"
    played = list(wire.seen)
    for method, shown, data in played:
        refused(method, shown, data, *taken)
    # Withheld, and used for another request or method, or in another's name.
    wire.passes, other = False, "ordered another thing"
    for what in ("request", "more", "another", "method", "name", "reads"):
        wire.seen.clear()
        asyncio.run(ordered_all(job, there))
        for kept in wire.seen:
            method, shown, data = changed(what, *kept)
            # Of a stream it is known at its end, and a faulty message may end it before.
            faulty = method.endswith("/StoreExportFile") or data[0][:1] == b"\xf8"
            with pytest.raises(grpc.RpcError) as caught:
                next(wire.play(method, shown, data))
            error: Any = caught.value
            assert faulty or other in error.details(), (what, method, str(error))
            refused(*kept, *taken)
    bearer = ("authorization", f"Bearer {bound(job.signer, Role.EDITOR, 1, job=JOB)}")
    with grpc.insecure_channel(one.address) as channel:
        stub: Any = sidecar_pb2_grpc.SidecarServiceStub(channel)
        asked = sidecar_pb2.GetEditRequest(edit_id=OTHER_EDIT)
        with pytest.raises(grpc.RpcError, match="unknown on this rank"):
            stub.GetEdit(asked, metadata=(bearer,), timeout=DEADLINE_S)
    one.process.kill()
    one.process.wait()
    one.listen = one.address
    job.respawn(one)
    job.send_mesh(one)
    for method, shown, data in played:
        refused(method, shown, data, *taken)


def test_a_rank_that_lies_has_no_other_connect_where_it_says() -> None:
    """The control plane may move to another port of its host, or of rank 0's; nowhere else."""
    mesh = ExchangedMesh(
        layout=b"",
        layout_digest="",
        control_address="mtls://10.0.0.1:8471",
        peers=(common_pb2.Peer(rank=0, address="mtls://10.0.0.2:4000"),),
    )
    for address in ("mtls://10.0.0.1:9000", "mtls://10.0.0.2:65535"):
        assert may_be_at(address, mesh)
    for address in (
        "", "10.0.0.1:9000", "mtls://10.0.0.3:9000", "mtls://10.0.0.1:22", "mtls://10.0.0.1:",
        "mtls://10.0.0.1:99999999999", "mtls://10.0.0.1", "unix:/tmp/x", "mtls://x/10.0.0.1:9000",
        "mtls://10.0.0.1:9000,10.0.0.3:9000", "https://10.0.0.1:9000", "mtls://10.0.0.1:9_000",
    ):  # fmt: skip
        assert not may_be_at(address, mesh), address


def test_a_control_plane_that_was_late_is_looked_for_as_rank_0_is_reached() -> None:
    """At attach it had no address: its scheme and host are those of rank 0."""
    for scheme, other in (("mtls://", ""), ("", "mtls://")):
        mesh = ExchangedMesh(
            layout=b"",
            layout_digest="",
            control_address="",
            peers=(common_pb2.Peer(rank=0, address=f"{scheme}10.0.0.2:4000"),),
        )
        assert may_be_at(f"{scheme}10.0.0.2:8471", mesh)
        for address in (f"{other}10.0.0.2:8471", f"{scheme}10.0.0.3:8471", f"{scheme}:8471"):
            assert not may_be_at(address, mesh), address


@pytest.mark.parametrize("lie", ["passed on", "of another key", "replayed"])
def test_a_rank_shows_its_ticket_to_no_control_plane_of_another_rank(
    job: Job, spy: tuple[Spy, str], lie: str
) -> None:
    """Rank 0 was taken over, and tells the others that the control plane is there."""
    spying, there = spy
    mine, genuine = job.ranks[1], job.control_address
    with grpc.insecure_channel(genuine) as channel:
        prove: Any = control_pb2_grpc.ControlServiceStub(channel).ProveControl
        Question, Answer = control_pb2.ProveControlRequest, control_pb2.ProveControlResponse
        old: Any = prove(Question(job=JOB, incarnation=1, address=genuine, nonce=bytes(32)))

        def proof(data: bytes) -> bytes:
            asked = Question.FromString(data)
            if lie == "passed on":
                with pytest.raises(grpc.RpcError, match="and nowhere else"):
                    prove(asked)
                asked.address = genuine
                return bytes(prove(asked).SerializeToString())
            forged = Signer(new_private_key()).prove(there, asked.nonce)
            signature = forged if lie == "of another key" else old.signature
            return Answer(header=old.header, signature=signature).SerializeToString()

        def found(address: str) -> bytes:
            header = common_pb2.Header(job=JOB, incarnation=1, rank=0)
            return sidecar_pb2.FindControlResponse(
                header=header, control_address=address
            ).SerializeToString()

        spying.answers = {"FindControl": lambda _: found(there), "ProveControl": proof}
        (job_dir(JOB) / "endpoint.json").unlink()
        job.ranks[0].address, job.control_address = there, "127.0.0.1:9"
        job.send_mesh(mine)
        wait_for(lambda: spying.asked.count("ProveControl") > 1, "it is asked for its proof")
        assert not spying.shown
        assert set(spying.asked) == {"FindControl", "ProveControl"}
        # Nor does it connect to another host, whatever listens there.
        with socket.create_server(("127.0.0.2", 0)) as victim:
            elsewhere, told = f"127.0.0.2:{victim.getsockname()[1]}", spying.asked.count
            spying.answers["FindControl"] = lambda _: found(elsewhere)
            before = told("FindControl")
            wait_for(lambda: told("FindControl") > before + 1, "it has heard of the other host")
            victim.settimeout(0.0)
            with pytest.raises(BlockingIOError):
                victim.accept()
        # What it says is only a hint: where the control plane is in truth, the rank joins.
        joined = lambda: f'"address": "{genuine}"' in (job_dir(JOB) / "rank-1.log").read_text()  # noqa: E731
        assert not joined()
        spying.answers["FindControl"] = lambda _: found(genuine)
        wait_for(joined, "it joins the control plane")
