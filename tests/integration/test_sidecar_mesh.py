"""A sidecar among others: the gateway's gathering, and the stream to a control plane."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramd.layout.merge import layout_digest
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.memory import handover
from paramd.security.tickets import Role, Verifier
from paramd.v1 import common_pb2, control_pb2, control_pb2_grpc
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.fake_trainer import SIGNER, FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import Client, sidecar, wait_until

ROWS, COLUMNS = 4, 6
PIECE_BYTES = ROWS * COLUMNS // 2 * 4
GET_S = 10.0


def columns_layout() -> Layout:
    """Two tensors over two ranks: "w" split by columns, "b" whole on both."""
    half = COLUMNS // 2
    w = (
        Piece(0, 0, Box((0, 0), (ROWS, half))),
        Piece(1, 0, Box((0, half), (ROWS, COLUMNS))),
    )
    b = tuple(Piece(rank, PIECE_BYTES, Box((0,), (2,))) for rank in range(2))
    arena_bytes = PIECE_BYTES + 16
    return Layout(
        2,
        (arena_bytes, arena_bytes),
        (
            TensorLayout("w", "int32", (ROWS, COLUMNS), TensorKind.PARAMETER, w),
            TensorLayout("b", "int64", (2,), TensorKind.PARAMETER, b, aliases=("tied",)),
        ),
    )


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[FakeTrainer]]:
    """Two ranks of one mesh, both at step 0; `w[i, j] == 10 * i + j`, `b == [7, 8]`."""
    layout = columns_layout()
    with ExitStack() as stack:
        trainers = []
        for rank in range(2):
            process = stack.enter_context(sidecar(tmp_path / "s", rank=rank))
            settings = TrainerSettings(
                rank=rank, world_size=2, arena_bytes=layout.arena_bytes[rank]
            )
            trainer = attach(process.socket_path, settings)
            stack.callback(trainer.close)
            words = trainer.arena.buffer.cast("i")
            for i in range(ROWS):
                for j in range(COLUMNS // 2):
                    words[i * COLUMNS // 2 + j] = 10 * i + j + rank * COLUMNS // 2
            words.release()
            trainer.arena.buffer[PIECE_BYTES:].cast("q")[0] = 7
            trainer.arena.buffer[PIECE_BYTES:].cast("q")[1] = 8
            trainers.append(trainer)
        for trainer in trainers:
            trainer.send_mesh(layout, [one.peer() for one in trainers])
        yield trainers


@pytest.fixture
def client(ranks: list[FakeTrainer]) -> Iterator[Client]:
    connected = Client(ranks[1].address)
    connected.digest = layout_digest(columns_layout())
    yield connected
    connected.close()


def summon(client: Client, pattern: str) -> dict[str, tuple[list[int], bytes]]:
    """Shapes and bytes by name."""
    found: dict[str, tuple[list[int], bytes]] = {}
    name = ""
    for message in client.call("Summon", pb.SummonRequest(pattern=pattern), 30):
        if message.HasField("tensor"):
            name = message.tensor.fqn
            found[name] = (list(message.tensor.shape), b"")
        elif message.data:
            shape, data = found[name]
            found[name] = (shape, data + message.data)
        else:
            assert message.header.step == 0
    return found


def test_the_gateway_sends_whole_tensors_of_all_ranks(client: Client) -> None:
    found = summon(client, "*")
    assert list(found) == ["w", "b"]
    shape, data = found["w"]
    assert shape == [ROWS, COLUMNS]
    assert list(memoryview(data).cast("i")) == [10 * i + j for i in range(4) for j in range(6)]
    assert list(memoryview(found["b"][1]).cast("q")) == [7, 8]


def test_the_gateway_sends_slices(client: Client) -> None:
    shape, data = summon(client, "w[1:3, 2:5]")["w"]
    assert shape == [2, 3]
    assert list(memoryview(data).cast("i")) == [12, 13, 14, 22, 23, 24]


def test_the_gateway_names_what_it_does_not_find(client: Client) -> None:
    with pytest.raises(grpc.RpcError, match="no parameter matches") as refused:
        summon(client, "nothing")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_mesh_and_layout_are_answered(client: Client) -> None:
    mesh = client.call("GetMesh", pb.GetMeshRequest())
    assert [peer.rank for peer in mesh.peers] == [0, 1]
    assert mesh.world_size == 2
    (batch,) = client.call("GetLayout", pb.GetLayoutRequest())
    assert [tensor.fqn for tensor in batch.layout.tensors] == ["w", "b"]
    assert batch.header.layout_digest == client.digest


class Control(control_pb2_grpc.ControlServiceServicer):
    """Keeps reports; refuses who has no sidecar's ticket."""

    def __init__(self) -> None:
        self.reports: queue.Queue[Any] = queue.Queue()
        self.stop = threading.Event()

    def Join(self, request_iterator: Any, context: Any) -> Iterator[control_pb2.JoinResponse]:
        (authorization,) = [v for k, v in context.invocation_metadata() if k == "authorization"]
        verifier = Verifier(SIGNER.public_key)
        claims = verifier.verify(authorization.removeprefix("Bearer "), job="job", incarnation=1)
        assert claims.role is Role.SIDECAR
        yield control_pb2.JoinResponse(header=common_pb2.Header(job="job", incarnation=1))
        for report in request_iterator:
            self.reports.put(report)

    def until(self, condition: Any) -> Any:
        """The first report that fulfils the condition."""
        while True:
            report = self.reports.get(timeout=GET_S)
            if condition(report):
                return report


@pytest.fixture
def control() -> Iterator[tuple[Control, str]]:
    with ThreadPoolExecutor(2) as pool:
        servicer = Control()
        server = grpc.server(pool)
        control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield servicer, f"127.0.0.1:{port}"
        server.stop(0).wait()


def test_a_sidecar_reports_itself_and_says_goodbye(
    tmp_path: Path, control: tuple[Control, str]
) -> None:
    servicer, address = control
    with sidecar(tmp_path / "s") as process:
        trainer = attach(process.socket_path, TrainerSettings(control_address=address))
        try:
            trainer.send_mesh()
            first = servicer.reports.get(timeout=GET_S)
            assert first.header.job == "job"
            assert first.peer.address == trainer.address
            assert first.peer.socket_path == str(process.socket_path)
            assert first.state.phase == common_pb2.PHASE_IDLE
            trainer.update()
            servicer.until(lambda report: report.state.step == 1)
            handover.send(trainer.connection, {"op": "detach"})
            servicer.until(lambda report: report.leaving)
            assert process.process.wait(timeout=10) == 0
        finally:
            trainer.close()


def test_a_control_plane_that_is_away_disturbs_nothing(tmp_path: Path) -> None:
    with sidecar(tmp_path / "s") as process:
        # A port that nobody listens on.
        trainer = attach(process.socket_path, TrainerSettings(control_address="127.0.0.1:9"))
        try:
            trainer.send_mesh()
            wait_until(lambda: "control-plane-away" in process.log, "the attempt fails")
            client = Client(trainer.address)
            try:
                assert client.pin().header.step == 0
            finally:
                client.close()
        finally:
            trainer.close()
        assert process.terminate() == 0
