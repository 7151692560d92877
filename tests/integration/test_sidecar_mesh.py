"""A sidecar among others: the gateway's gathering, and the stream to a control plane."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from paramd.errors import READS_KEY
from paramd.layout.merge import layout_digest
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.security.tickets import Role
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.fake_trainer import SIGNER, FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import Client, sidecar, ticket
from tests.orders import reads

ROWS, COLUMNS = 4, 6
PIECE_BYTES = ROWS * COLUMNS // 2 * 4


def columns_layout() -> Layout:
    """Two tensors over two ranks: "w" split by columns, "b" whole on both."""
    half = COLUMNS // 2
    w = (Piece(0, 0, Box((0, 0), (ROWS, half))), Piece(1, 0, Box((0, half), (ROWS, COLUMNS))))
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
    shown = ("authorization", f"Bearer {ticket(rank=1)}")
    connected.metadata = (shown, (READS_KEY, reads(SIGNER, Role.READER, 2)))
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
