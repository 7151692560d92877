"""A fake trainer that runs edit programs, and a client that stages edits at its sidecar."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import torch

from paramd.layout.edits.kinds import EditKind
from paramd.layout.merge import layout_digest
from paramd.layout.types import Layout, Piece, TensorKind, TensorLayout, full_box
from paramd.memory.control_page import Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.edit_program import parse_program
from paramd.mesh.peers.control import PeerAddress
from paramd.places import host_id
from paramd.security.tickets import Role
from paramd.tensors.edit_ops import Views
from paramd.tensors.edit_ops import run as run_record
from paramd.v1 import sidecar_pb2 as pb
from paramd.v1 import sidecar_pb2_grpc
from paramd.wire import checksum_of
from tests.edit_ops import edit_op
from tests.integration.fake_trainer import SIGNER, FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import SidecarProcess, ticket, wait_until
from tests.orders import Ordering

ROWS, COLUMNS = 1500, 1000
W_BYTES = 4 * ROWS * COLUMNS
B_BEGIN = 6 << 20
ARENA_BYTES = 7 << 20
SET_W = [edit_op(fqn="w", kind=EditKind.SET, with_data=True)]
FILL_B = [edit_op(fqn="b", kind=EditKind.FILL, value=0.5)]


def layout() -> Layout:
    """`w` and `b`, of one rank."""
    tensors = []
    for fqn, dtype, shape, begin in (
        ("w", "float32", (ROWS, COLUMNS), 0),
        ("b", "bfloat16", (1000,), B_BEGIN),
    ):
        pieces = (Piece(0, begin, full_box(shape)),)
        tensors.append(TensorLayout(fqn, dtype, shape, TensorKind.PARAMETER, pieces))
    return Layout(1, (ARENA_BYTES,), tuple(tensors))


def matrix(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def bytes_of(tensor: torch.Tensor) -> bytes:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data + bytes(-len(data) % 64)


class Editing:
    """One rank: its trainer in this process, held at a boundary, and calls to its sidecar."""

    def __init__(self, trainer: FakeTrainer, socket_path: Path) -> None:
        self.trainer = trainer
        self.page = trainer.page
        self.memory = SparseMemory(trainer.fds[3])
        trainer.apply = self.apply
        self.arena = torch.frombuffer(trainer.arena.buffer, dtype=torch.float32)
        self.w = self.arena[: ROWS * COLUMNS].view(ROWS, COLUMNS)
        self.b = self.arena.view(torch.bfloat16)[B_BEGIN // 2 : B_BEGIN // 2 + 1000]
        self.digest = layout_digest(layout())
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(trainer.address, options=options)
        self.channel = grpc.intercept_channel(channel, Ordering(SIGNER))
        self.stub = sidecar_pb2_grpc.SidecarServiceStub(self.channel)
        self.peer = PeerAddress(trainer.settings.rank, trainer.address, str(socket_path), host_id())

    def meet(self) -> None:
        """Tells the sidecar who the mesh is."""
        self.trainer.send_mesh(layout(), [asdict(self.peer)])

    def apply(self, argument: int) -> None:
        """What the real trainer does with a program."""
        records = parse_program(self.memory.buffer, argument, arena_bytes=ARENA_BYTES)
        arena, data = Views(self.trainer.arena.buffer), Views(self.memory.buffer)
        with torch.no_grad():
            for record in records:
                run_record(
                    record,
                    arena.at(record.dtype, record.arena_begin, record.sizes, record.strides),
                    data.dense(record, record.data_begin),
                    data.dense(record, record.preimage_begin),
                )

    def manifest(
        self, number: int, ops: Sequence[pb.EditOp] = SET_W, **fields: Any
    ) -> pb.EditManifest:
        fields = {"undoable": True, **fields}
        return pb.EditManifest(
            edit_id=f"{number:032x}", incarnation=1, layout_digest=self.digest, ops=ops, **fields
        )

    def call(
        self, method: str, request: Any, role: Role = Role.CONTROL, token_id: str | None = None
    ) -> Any:
        metadata = (("authorization", f"Bearer {ticket(role, token_id=token_id)}"),)
        return getattr(self.stub, method)(request, timeout=20, metadata=metadata)

    def stage(
        self,
        manifest: pb.EditManifest,
        data: bytes = b"",
        begin: int = 0,
        *,
        spoil: int = -1,
        role: Role = Role.EDITOR,
        token_id: str | None = None,
        **fields: Any,
    ) -> Any:
        """StageEdit with the data from byte `begin` on; chunk number `spoil` gets a wrong hash."""

        def requests() -> Iterator[pb.StageEditRequest]:
            yield pb.StageEditRequest(manifest=manifest, **fields)
            for number, at in enumerate(range(begin, len(data), 1 << 20)):
                part = data[at : at + (1 << 20)]
                xxh3 = checksum_of(part, at) ^ (number == spoil)
                yield pb.StageEditRequest(data=part, xxh3=xxh3, offset_bytes=at)

        return self.call("StageEdit", requests(), role, token_id).progress

    def progress(self, number: int) -> Any:
        return self.call("GetEdit", pb.GetEditRequest(edit_id=f"{number:032x}")).progress

    def reach(self, number: int, boundary: int) -> Any:
        """ReachBoundary under way, as a future."""
        request = pb.ReachBoundaryRequest(
            incarnation=1,
            boundary=boundary,
            token=100 + boundary,
            action=pb.BOUNDARY_ACTION_EDIT,
            edit_id=f"{number:032x}",
        )
        metadata = (("authorization", f"Bearer {ticket(Role.CONTROL)}"),)
        return self.stub.ReachBoundary.future(request, timeout=20, metadata=metadata)

    def commit(self, number: int, boundary: int) -> Any:
        """One edit, from ready to applied."""
        asked = self.reach(number, boundary)
        wait_until(lambda: self.page[Word.READY] == boundary or asked.done(), "the rank is ready")
        if not asked.done():
            self.trainer.boundary()
        return asked.result(timeout=20)

    def close(self) -> None:
        self.channel.close()
        del self.arena, self.w, self.b
        self.trainer.apply = None
        self.memory.close()
        self.trainer.close()


@contextmanager
def editing(process: SidecarProcess, *, back: Sequence[int] = ()) -> Iterator[Editing]:
    """A rank attached to a sidecar; `back` are the descriptors that a dead one shared."""
    settings = TrainerSettings(arena_bytes=ARENA_BYTES)
    trainer = attach(process.socket_path, settings, list(back))
    found = Editing(trainer, process.socket_path)
    try:
        found.meet()
        if not back:
            with torch.no_grad():
                found.w.copy_(matrix(0))
                found.b.fill_(2)
        yield found
    finally:
        found.close()
