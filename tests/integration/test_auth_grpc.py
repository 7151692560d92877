"""Every gRPC method of both servers x every role: default deny, from tables written out here."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paramd import places
from paramd.memory import handover
from paramd.security.tickets import Role, Signer
from paramd.v1 import control_pb2, sidecar_pb2
from tests.integration.control_process import TOKEN, Control, control_plane
from tests.integration.control_process import ticket as control_ticket
from tests.integration.fake_trainer import SIGNER, attached
from tests.integration.sidecar_process import sidecar, ticket
from tests.orders import bound, ordered

V, R, E, C, S = Role.VIEWER, Role.READER, Role.EDITOR, Role.CONTROL, Role.SIDECAR
K, G = Role.COPIER, Role.GATHERER
ALL = {V, R, E, C, S, K, G}
OK_TO_ASK = {V, R, E, C}
READS = {R, E, C}
EDITS = {E, C}
EXPORTS = (
    "BeginExport", "WriteExportFile", "StoreExportFile", "VerifyExportFile", "ReadExportFile",
    "FinishExport", "DropExport",
)  # fmt: skip

SIDECAR: dict[str, set[Role]] = {
    "GetState": OK_TO_ASK, "GetMesh": OK_TO_ASK, "GetLayout": OK_TO_ASK, "GetMetrics": OK_TO_ASK,
    "ReachPeers": OK_TO_ASK, "PinSnapshot": READS, "ReadSnapshot": READS | {G},
    "GrantStream": READS, "RenewSnapshot": READS, "ReleaseSnapshot": READS, "ListSnapshots": READS,
    "ComputeStats": READS, "PoolSnapshot": READS, "DigestSnapshot": READS, "DeltaSnapshot": READS,
    "ProfileSnapshot": READS, "MultiplySnapshot": READS, "ReplayUpdate": READS,
    "InspectTrainer": READS, "GetLogged": READS, "GetLog": {C}, "Summon": READS,
    "StreamGradients": READS, "StageEdit": EDITS, "GetEdit": EDITS, "PreviewEdit": EDITS,
    "DropEdit": {C}, "ReachBoundary": {C}, "WithdrawBoundary": {C}, "RenewHold": {C},
    "PutCopy": {K}, "MakeMark": {C}, "DropMark": {C}, "ListKeptStates": ALL - {S, K, G},
    **{method: {C} for method in EXPORTS},
}  # fmt: skip
CONTROL: dict[str, set[Role]] = {"Join": {S}, "ScheduleBoundary": READS - {C}}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
OPEN = {f"/grpc.health.v1.Health/{method}" for method in ("Check", "List", "Watch")}
FIND, PROVE = "/paramd.v1.SidecarService/FindControl", "/paramd.v1.ControlService/ProveControl"
"""What ranks ask before they show a ticket."""
FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="module")
def sidecar_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        sidecar(tmp_path_factory.mktemp("s") / "s") as process,
        # The buddy of rank 0, so that its tickets are good for PutCopy.
        attached(process.socket_path, buddies=[0]) as trainer,
    ):
        yield trainer.address


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        places.state_dir().mkdir(exist_ok=True)
        with control_plane() as found:
            yield found


def code(
    address: str, path: str, *authorizations: str | None, data: bytes = b""
) -> grpc.StatusCode:
    """Status of a call of raw bytes, streaming both ways: any method can be called so."""
    metadata = [("authorization", one) for one in authorizations if one is not None]
    metadata = list(ordered(SIGNER, path, metadata, [data]))
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        call = channel.stream_stream(path)(iter([data]), timeout=10, metadata=metadata)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                # It has answered; what it would say at its end may never come.
                call.cancel()
                return grpc.StatusCode.OK
        found = call.code()
        assert isinstance(found, grpc.StatusCode)
        return found


def served(address: str, authorization: str) -> set[str]:
    """The methods that a server itself says it has."""
    files: dict[str, FileDescriptor] = {
        "paramd.v1.SidecarService": sidecar_pb2.DESCRIPTOR,
        "paramd.v1.ControlService": control_pb2.DESCRIPTOR,
        "grpc.health.v1.Health": health_pb2.DESCRIPTOR,
        "grpc.reflection.v1alpha.ServerReflection": reflection_pb2.DESCRIPTOR,
    }
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        metadata = (("authorization", authorization),)
        (answer,) = stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=10)
    return {
        f"/{service.name}/{method}"
        for service in answer.list_services_response.service
        for method in files[service.name]
        .services_by_name[service.name.rpartition(".")[2]]
        .methods_by_name
    }


def bearer(text: str) -> str:
    return f"Bearer {text}"


def check_roles(
    address: str, expected: dict[str, set[Role]], signer: Signer, job: str, rank: int | None = 0
) -> None:
    """Each method x each role; unknown ones are refused to all."""
    unknown = {
        "/paramd.v1.SidecarService/StageEverything": set[Role](),
        "/paramd.v1.SidecarService/getstate": set[Role](),
        "/paramd.v1.SidecarService/": set[Role](),
        "/x.Y/Z": set[Role](),
    }
    for role in Role:
        text = bound(signer, role, rank, job=job)
        for path, roles in (expected | unknown).items():
            denied = code(address, path, bearer(text)) is PERMISSION_DENIED
            assert denied == (role not in roles), (path, role)


def test_every_method_of_a_sidecar_for_every_role(sidecar_address: str) -> None:
    service = "/paramd.v1.SidecarService/"
    expected = {service + name: roles for name, roles in SIDECAR.items()}
    expected[REFLECTION] = OK_TO_ASK - {C}
    found = served(sidecar_address, bearer(ticket()))
    assert found - OPEN == {FIND, *expected}
    check_roles(sidecar_address, expected, SIGNER, "job")


def test_every_method_of_the_control_plane_for_every_role(control: Control) -> None:
    service = "/paramd.v1.ControlService/"
    expected = {service + name: roles for name, roles in CONTROL.items()}
    expected[REFLECTION] = ALL - {C, G}
    ((_, authorization),) = control_ticket()
    found = served(control.grpc_address, authorization)
    assert found - OPEN == {PROVE, *expected}
    check_roles(control.grpc_address, expected, Signer(bytes(range(32))), "run", None)


@pytest.mark.parametrize(
    "kind",
    ["none", "empty", "bare", "other-scheme", "garbage", "changed", "user-token", "other-key",
     "other-job", "other-incarnation", "expired"],
)  # fmt: skip
def test_every_method_refuses_who_has_no_good_ticket(
    sidecar_address: str, control: Control, kind: str
) -> None:
    def offered(job: str, signer: Signer) -> str | None:
        options: dict[str, Any] = {
            "job": job, "incarnation": 1, "role": S, "rank": 0, "ttl_s": 60.0,
        }  # fmt: skip
        changed: dict[str, dict[str, Any]] = {
            "other-job": {"job": "other"},
            "other-incarnation": {"incarnation": 2},
            "expired": {"now_s": 1.0},
        }
        signer = Signer(bytes(32)) if kind == "other-key" else signer
        text = signer.mint(**(options | changed.get(kind, {})))
        return {
            "none": None,
            "empty": "",
            "bare": text,
            "other-scheme": f"Basic {text}",
            "garbage": "Bearer garbage",
            "changed": bearer(text[:-1] + ("A" if text[-1] != "A" else "Q")),
            "user-token": bearer(TOKEN),
        }.get(kind, bearer(text))

    own = Signer(bytes(range(32)))
    for method in SIDECAR:
        path = f"/paramd.v1.SidecarService/{method}"
        assert code(sidecar_address, path, offered("job", SIGNER)) is UNAUTHENTICATED, method
    for method in CONTROL:
        path = f"/paramd.v1.ControlService/{method}"
        found = code(control.grpc_address, path, offered("run", own))
        if kind == "other-incarnation":
            # The job's own key has signed it for a later run, which a rank may begin
            # (attachment.refresh): it is a rank's, and no report of that run came with it.
            wanted = FAILED_PRECONDITION if method == "Join" else PERMISSION_DENIED
            assert found is wanted, method
        else:
            assert found is UNAUTHENTICATED, method
    for address, signer in ((sidecar_address, SIGNER), (control.grpc_address, own)):
        for path in (REFLECTION, "/paramd.v1.SidecarService/Unknown", "/x.Y/Z"):
            found = code(address, path, offered("job", signer))
            assert found in (UNAUTHENTICATED, PERMISSION_DENIED), path


def test_bytes_that_are_no_message_end_only_their_call(
    sidecar_address: str, control: Control
) -> None:
    own, chance = Signer(bytes(range(32))), random.Random(7)
    for address, signer, job, service, methods in (
        (sidecar_address, SIGNER, "job", "SidecarService", SIDECAR),
        (control.grpc_address, own, "run", "ControlService", CONTROL),
    ):
        paths = {f"/paramd.v1.{service}/{name}": roles for name, roles in methods.items()}
        for path, roles in (paths | {REFLECTION: {R}} | {path: {R} for path in OPEN}).items():
            role = min(roles - {C} or {C}, key=list(Role).index)
            text = bound(
                signer, role, 0 if service == "SidecarService" or role is S else None, job=job
            )
            for size in (1, 300, 70_000):
                data = b"\xff" + chance.randbytes(size)
                found = code(address, path, bearer(text), data=data)
                assert found is grpc.StatusCode.INVALID_ARGUMENT, (path, size)
        assert code(address, "/grpc.health.v1.Health/Check") is grpc.StatusCode.OK
    for log in places.state_dir().rglob("*.log"):
        assert "Traceback" not in log.read_text(), log


def test_two_tickets_are_no_ticket(sidecar_address: str, control: Control) -> None:
    ((_, own),) = control_ticket()
    for address, path, good in (
        (sidecar_address, "/paramd.v1.SidecarService/GetState", bearer(ticket())),
        (control.grpc_address, "/paramd.v1.ControlService/ScheduleBoundary", own),
    ):
        for both in ((good, good), (good, "Bearer x"), ("Bearer x", good)):
            assert code(address, path, *both) is UNAUTHENTICATED, (path, both)
        assert code(address, path, good) is not UNAUTHENTICATED


def test_a_rank_cannot_join_as_another_rank(control: Control) -> None:
    from paramd.v1 import common_pb2

    header = common_pb2.Header(job="run", incarnation=1, rank=1)
    report = control_pb2.JoinRequest(
        header=header,
        world_size=2,
        peer=common_pb2.Peer(rank=1, address="127.0.0.1:1"),
        state=common_pb2.RankState(rank=1),
    )
    with grpc.insecure_channel(control.grpc_address) as channel:
        call = channel.stream_stream("/paramd.v1.ControlService/Join")(
            iter([report.SerializeToString()]), timeout=10, metadata=control_ticket(S, rank=0)
        )
        with pytest.raises(grpc.RpcError, match="is not valid for rank 1"):
            list(call)
        assert call.code() is PERMISSION_DENIED


@pytest.mark.parametrize("role", [V, S])
def test_a_snapshot_is_not_mapped_for_who_may_not_read(tmp_path: Path, role: Role) -> None:
    with (
        sidecar(tmp_path / "s") as process,
        attached(process.socket_path),
        handover.connect(process.socket_path, timeout_s=10) as connection,
    ):
        message = {"op": "map", "ticket": ticket(role), "snapshot_id": "x"}
        handover.send(connection, message)
        answer, _ = handover.receive(connection)
        assert (answer["op"], answer["code"]) == ("error", "PERMISSION_DENIED")
        handover.send(connection, message | {"ticket": ticket(R)})
        answer, _ = handover.receive(connection)
        assert answer["code"] == "NOT_FOUND"
