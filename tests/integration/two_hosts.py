"""A job on two hosts whose sidecars listen on the same port of their own loopback.

    ip netns exec ONE python -m tests.integration.two_hosts OTHER CONTROL_ADDRESS PORT

Runs in the network of the first host, as trainers, clients and control plane do. OTHER is the
network namespace of rank 1. Exits with 0 when every question about rank 1 was refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paramd
from paramd.errors import ConflictError, UnreachableError
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.state_files import host_id, kernel_of
from tests.integration.client_job import HERE, JOB, Place, running_job

HALF = 1 << 18
PIECES = (Piece(0, 0, Box((0,), (HALF,))), Piece(1, 0, Box((HALF,), (2 * HALF,))))
LAYOUT = Layout(
    world_size=2,
    arena_bytes=(4 * HALF, 4 * HALF),
    tensors=(TensorLayout("halves", "float32", (2 * HALF,), TensorKind.PARAMETER, PIECES),),
)


def refused(what: str, ask: Callable[[], Any]) -> None:
    with pytest.raises(
        (UnreachableError, ConflictError), match=r"rank 1 listens on .*PARAMD_SIDECAR_LISTEN"
    ):
        ask()
    print("refused", what, flush=True)


def main(other: str, control: str, port: int) -> None:
    network = os.stat(Path("/run/netns") / other).st_ino
    there = Place(
        listen=f"127.0.0.1:{port}",
        prefix=("ip", "netns", "exec", other),
        host_id=f"{kernel_of(host_id())}/{network}",
    )
    places = (Place(listen=there.listen), there)
    assert places[0].host_id == HERE.host_id != there.host_id
    with running_job(LAYOUT, listen=control, places=places) as job:
        addresses = [rank.address for rank in job.ranks]
        assert addresses[0] == addresses[1], addresses
        for rank in job.ranks:
            torch.frombuffer(rank.arena.buffer, dtype=torch.float32).fill_(rank.rank + 3)
        with paramd.connect(job=JOB) as mesh:
            mesh.layout  # noqa: B018 - of rank 0, which is here
            assert bool((mesh.summon("halves[0:100]")["halves"] == 3).all())
            refused("summon", lambda: mesh.summon("halves"))
            refused("summon grpc", lambda: mesh.summon("halves", transport="grpc"))
            refused("summon same-host", lambda: mesh.summon("halves", transport="same-host"))
            refused("stats", lambda: mesh.stats("halves"))
            refused("follow", lambda: next(iter(mesh.follow("halves"))))
            refused("grads", lambda: next(iter(mesh.grads("halves"))))
            refused("edit", lambda: mesh.edit("halves", set=torch.zeros(2 * HALF)))
            # Without data it is the control plane that asks all ranks.
            refused("edit by the control plane", lambda: mesh.edit("halves", fill=0.0, timeout=20))
            refused("hold", lambda: mesh.pause(timeout=20))
            assert {one.state for one in mesh.edits()} <= {"ABORTED", "REFUSED"}, mesh.edits()
            rows = mesh.status()
            assert [row.phase == "unreachable" for row in rows] == [False, True], rows
            assert "loopback on its own host" in rows[1].reason, rows[1]
            assert mesh.summon("halves[0:1]")["halves"].item() == 3


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
