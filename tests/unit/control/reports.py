"""What ranks report, made by hand."""

from typing import Any

from paramd.v1 import common_pb2, control_pb2
from paramd_service.control.mesh.registry import MeshView, Report, mesh_view

_STATE = common_pb2.RankState.DESCRIPTOR.fields_by_name


def report(rank: int, **changed: Any) -> Report:
    """Of a rank that is well at 100 s; names of `RankState` change its state."""
    state: dict[str, Any] = {"phase": common_pb2.PHASE_CONSTANT, "agreement_works": True}
    state |= {name: changed.pop(name) for name in _STATE if name in changed}
    fields: dict[str, Any] = {
        "step": 7,
        "layout_digest": "d",
        "peer": common_pb2.Peer(rank=rank, address=f"127.0.0.1:{9000 + rank}"),
        "state": common_pb2.RankState(rank=rank, **state),
        "version": "0",
        "leaving": False,
        "connected": True,
        "changed_s": 100.0,
    }
    return Report(rank=rank, **(fields | changed))


def view(*reports: Report, world_size: int = 2, now_s: float = 101.0) -> MeshView:
    """What follows from some reports."""
    found = {one.rank: one for one in reports}
    return mesh_view(found, world_size=world_size, now_s=now_s, silent_after_s=10.0)


def mesh(*ranks: int, ready: int = 0) -> MeshView:
    """Of two ranks, those that have joined."""
    return view(*(report(rank, ready_boundary=ready) for rank in ranks))


def join_request(
    rank: int = 0, *, job: str = "run", incarnation: int = 3, world_size: int = 2, port: int = 9000,
    leaving: bool = False, **state: Any,
) -> control_pb2.JoinRequest:  # fmt: skip
    """What a rank's sidecar sends of itself."""
    return control_pb2.JoinRequest(
        header=common_pb2.Header(
            job=job, incarnation=incarnation, step=1, rank=rank, layout_digest="d"
        ),
        world_size=world_size,
        peer=common_pb2.Peer(rank=rank, address=f"127.0.0.1:{port}"),
        state=common_pb2.RankState(rank=rank, agreement_works=True, **state),
        leaving=leaving,
    )
