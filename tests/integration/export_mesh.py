"""Real sidecars that hold given tensors, distributed as torch's wrappers would; no trainers.

with still_mesh(tmp_path, tensors, "fsdp2", ranks=2) as mesh:
    files = mesh.export(ExportSettings(), mesh.target(root, "key"))
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

from paramd.errors import READS_KEY
from paramd.layout.exports.plan import ExportPlan, plan_export
from paramd.layout.exports.settings import ExportSettings
from paramd.layout.merge import LocalLayout, layout_digest, merge_layouts
from paramd.layout.types import Box, Interval, Layout, Piece, TensorKind, TensorLayout
from paramd.mesh.exports.pins import PinnedExport, encode_plan
from paramd.mesh.peers.sidecars import Pinned
from paramd.places import host_id
from paramd.security.tickets import Role
from paramd.state import StateName
from paramd.trainer.model.hub import described
from paramd.v1 import export_pb2, sidecar_pb2_grpc
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.fake_trainer import SIGNER, FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import SidecarProcess, sidecar, ticket
from tests.orders import Ordering, reads
from tests.unit.layout.simulate import BOXES, Held, Spec, fsdp1

STEP = 0
ALIGNMENT_BYTES = 64
Tensors = Mapping[str, torch.Tensor]


@dataclass
class StillMesh:
    """Ranks at step 0 that never train."""

    layout: Layout
    trainers: list[FakeTrainer]
    processes: list[SidecarProcess]
    stubs: list[Any]
    pins: list[tuple[int, str]] = field(default_factory=list)

    def target(self, root: Path | str, key: str, **fields: Any) -> export_pb2.ExportTarget:
        fields.setdefault("export_id", secrets.token_hex(16))
        return export_pb2.ExportTarget(destination="test", root=str(root), key=key, **fields)

    def call(self, rank: int, method: str, request: Any, timeout_s: float = 120.0) -> Any:
        stub = getattr(self.stubs[rank], method)
        return stub(request, timeout=timeout_s, metadata=self.metadata(rank))

    def metadata(self, rank: int) -> tuple[tuple[str, str], ...]:
        """As the control plane's: a ticket for this rank, and one to read others with."""
        reader = reads(SIGNER, Role.GATHERER, len(self.stubs), ttl_s=600)
        return (("authorization", f"Bearer {ticket(Role.CONTROL, rank=rank)}"), (READS_KEY, reader))

    def pin(self, settings: ExportSettings) -> tuple[ExportPlan, export_pb2.ExportPlan]:
        """The plan, and its message with everything pinned."""
        plan = plan_export(self.layout, settings)
        digest = layout_digest(self.layout)
        pins = []
        for rank, spans in plan.sources[""].spans.items():
            request = pb.PinSnapshotRequest(
                incarnation=1,
                layout_digest=digest,
                spans=[pb.Span(begin=begin, end=end) for begin, end in spans],
            )
            found = self.call(rank, "PinSnapshot", request)
            assert found.header.step == STEP
            pins.append(export_pb2.ExportPin(rank=rank, snapshot_id=found.snapshot_id))
            self.pins.append((rank, found.snapshot_id))
        return plan, encode_plan(
            PinnedExport(plan, Pinned(StateName(1, 0, STEP, 0), {}), pins), digest
        )

    def begin(self, target: export_pb2.ExportTarget, size_bytes: int = 0) -> None:
        self.call(0, "BeginExport", export_pb2.BeginExportRequest(target=target))

    def write(
        self, rank: int, target: export_pb2.ExportTarget, plan: export_pb2.ExportPlan, file: int
    ) -> export_pb2.ExportedFile:
        request = export_pb2.WriteExportFileRequest(target=target, plan=plan, file=file)
        *_, last = self.call(rank, "WriteExportFile", request)
        assert last.HasField("done")
        return last.done

    def verify(
        self, rank: int, target: export_pb2.ExportTarget, name: str, *, finished: bool = False
    ) -> export_pb2.ExportedFile:
        request = export_pb2.VerifyExportFileRequest(target=target, name=name, finished=finished)
        *_, last = self.call(rank, "VerifyExportFile", request)
        return last.found

    def finish(
        self,
        target: export_pb2.ExportTarget,
        plan: export_pb2.ExportPlan,
        files: Sequence[export_pb2.ExportedFile],
    ) -> list[export_pb2.ExportedFile]:
        fields = {"target": target, "plan": plan, "files": files, "created_s": 1.0}
        request = export_pb2.FinishExportRequest(**fields)  # type: ignore[arg-type]
        return list(self.call(0, "FinishExport", request).files)

    def drop(self, target: export_pb2.ExportTarget, **fields: Any) -> None:
        self.call(0, "DropExport", export_pb2.DropExportRequest(target=target, **fields))

    def release(self) -> None:
        while self.pins:
            rank, snapshot_id = self.pins.pop()
            request = pb.ReleaseSnapshotRequest(snapshot_id=snapshot_id)
            self.call(rank, "ReleaseSnapshot", request)

    def export(
        self, settings: ExportSettings, target: export_pb2.ExportTarget
    ) -> list[export_pb2.ExportedFile]:
        """A whole export, each file verified by another rank than wrote it."""
        plan, message = self.pin(settings)
        self.begin(target)
        files = []
        for number, file in enumerate(plan.files):
            done = self.write(file.rank, target, message, number)
            assert done.size_bytes == file.size_bytes
            other = (file.rank + 1) % self.layout.world_size
            assert self.verify(other, target, file.name) == done
            files.append(done)
        found = self.finish(target, message, files)
        self.release()
        return found


@contextmanager
def still_mesh(
    folder: Path,
    tensors: Tensors,
    way: str,
    *,
    ranks: int = 2,
    aliases: Mapping[str, Sequence[str]] | None = None,
    same_host: bool = True,
    faults: Mapping[int, str] | None = None,
    model: torch.nn.Module | None = None,
) -> Iterator[StillMesh]:
    """Sidecars, attached and serving.

    Args:
        tensors: full tensors by name.
        way: a name of `simulate.BOXES`, or "fsdp1".
        same_host: whether sidecars find each other's sockets; else they stream.
        faults: points of fault injection by rank.
        model: whose state dict they are.
    """
    folder.mkdir(exist_ok=True)
    locals_, arenas = _distributed(tensors, way, ranks, aliases or {})
    layout = merge_layouts([described(model, one) if model else one for one in locals_])
    with ExitStack() as stack:
        trainers, processes, stubs = [], [], []
        for rank in range(ranks):
            text = (faults or {}).get(rank, "")
            process = stack.enter_context(sidecar(folder / "s", rank=rank, faults=text))
            settings = TrainerSettings(rank=rank, world_size=ranks, arena_bytes=len(arenas[rank]))
            trainer = attach(process.socket_path, settings)
            stack.callback(trainer.close)
            trainer.arena.buffer[: len(arenas[rank])] = arenas[rank]
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.intercept_channel(
                grpc.insecure_channel(trainer.address, options=options), Ordering(SIGNER)
            )
            stack.callback(channel.close)
            trainers.append(trainer)
            processes.append(process)
            stubs.append(sidecar_pb2_grpc.SidecarServiceStub(channel))
        peers = [one.peer() for one in trainers]
        if same_host:
            for peer, process in zip(peers, processes, strict=True):
                peer.update(socket_path=str(process.socket_path), host_id=host_id())
        for trainer in trainers:
            trainer.send_mesh(layout, peers)
        mesh = StillMesh(layout, trainers, processes, stubs)
        for rank in range(ranks):
            # Connections are the mesh's, not those of the test that calls first.
            mesh.call(rank, "GetState", pb.GetStateRequest())
        yield mesh


def _distributed(
    tensors: Tensors, way: str, ranks: int, aliases: Mapping[str, Sequence[str]]
) -> tuple[list[LocalLayout], list[bytearray]]:
    specs = [Spec(name, _dtype(t), tuple(t.shape)) for name, t in tensors.items()]
    held: list[Held] = (
        fsdp1(specs, ranks) if way == "fsdp1" else [BOXES[way](spec, ranks) for spec in specs]
    )
    arenas: list[bytearray] = []
    locals_ = []
    for rank in range(ranks):
        arena = bytearray(b"\xa5" * (64 * rank))
        found = []
        for spec, one in zip(specs, held, strict=True):
            pieces = []
            for region, strides in one[rank]:
                arena.extend(b"\x5a" * (-len(arena) % ALIGNMENT_BYTES))
                pieces.append(Piece(rank, len(arena), region, strides))
                arena.extend(_memory(tensors[spec.fqn], region, strides))
            named = {name: getattr(spec, name) for name in ("fqn", "dtype", "shape")}
            known = tuple(aliases.get(spec.fqn, ()))
            named |= {"kind": TensorKind.PARAMETER, "placement": way, "aliases": known}
            found.append(TensorLayout(**named, pieces=tuple(pieces)))
        arena.extend(bytes(8 + -len(arena) % 8))
        locals_.append(LocalLayout(rank=rank, arena_bytes=len(arena), tensors=tuple(found)))
        arenas.append(arena)
    return locals_, arenas


def _memory(tensor: torch.Tensor, region: Box | Interval, strides: tuple[int, ...] | None) -> bytes:
    """What a rank has of a tensor; strides stand for a transposed piece."""
    if isinstance(region, Interval):
        part = tensor.reshape(-1)[region.begin : region.end]
    else:
        part = tensor[tuple(slice(b, e) for b, e in zip(region.begin, region.end, strict=True))]
        if strides is not None:
            part = part.permute(*reversed(range(part.ndim)))
    return raw(part)


def raw(tensor: torch.Tensor) -> bytes:
    """Row-major bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
