"""Simulated sidecars that answer: as `joins`, and each serves three methods on a port of its own.

    python -m benchmarks.workers.answering BEGIN END < as `joins`

They do nothing for an answer, check no ticket and hold no arena: what is measured is whoever asks.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio

from benchmarks.workers.joins import AT_ONCE, join_as
from paramd.v1 import common_pb2, sidecar_pb2, sidecar_pb2_grpc

GRACE_S = 1.0


class Sidecar(sidecar_pb2_grpc.SidecarServiceServicer):
    """One rank, always between two steps and able to do what it is asked."""

    def __init__(self, said: Mapping[str, Any], rank: int) -> None:
        self._job = str(said["job"])
        self._incarnation = int(said["incarnation"])
        self._rank = rank

    def _header(self, step: int) -> common_pb2.Header:
        return common_pb2.Header(
            job=self._job,
            incarnation=self._incarnation,
            step=step,
            rank=self._rank,
            layout_digest="d" * 32,
        )

    async def GetState(self, request: Any, context: Any) -> sidecar_pb2.GetStateResponse:
        return sidecar_pb2.GetStateResponse(header=self._header(1))

    async def ReachBoundary(self, request: Any, context: Any) -> sidecar_pb2.ReachBoundaryResponse:
        # Equal on all ranks, as an agreed step would be.
        return sidecar_pb2.ReachBoundaryResponse(
            header=self._header(request.boundary), captured=True
        )

    async def ListSnapshots(self, request: Any, context: Any) -> sidecar_pb2.ListSnapshotsResponse:
        """Two leases, as while a client and an export read."""
        lease = sidecar_pb2.SnapshotInfo(
            name="01234567", step=1, size_bytes=1 << 30, lease_left_ms=20_000
        )
        return sidecar_pb2.ListSnapshotsResponse(
            header=self._header(1),
            snapshots=[lease, lease],
            lease_count=2,
            used_bytes=2 << 30,
            budget_bytes=4 << 30,
        )


async def _run(said: Mapping[str, Any], ranks: range) -> None:
    async with AsyncExitStack() as stack:
        gate = asyncio.Semaphore(AT_ONCE)
        ready = [asyncio.Event() for _ in ranks]
        tasks = []
        for rank, event in zip(ranks, ready, strict=True):
            server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
            servicer = Sidecar(said, rank)  # type: ignore[abstract]
            sidecar_pb2_grpc.add_SidecarServiceServicer_to_server(servicer, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, GRACE_S)
            mine = {**said, "layout_address": f"127.0.0.1:{port}"}
            tasks.append(asyncio.create_task(join_as(mine, rank, gate, event)))
        for event in ready:
            await event.wait()
        print("joined", flush=True)
        await asyncio.gather(*tasks)


def main() -> None:
    begin, end = int(sys.argv[1]), int(sys.argv[2])
    asyncio.run(_run(json.load(sys.stdin), range(begin, end)))


if __name__ == "__main__":
    main()
