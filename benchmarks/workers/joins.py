"""Simulated sidecars: real gRPC streams of many ranks from one small process.

    python -m benchmarks.workers.joins BEGIN END < {"address", "job", "incarnation", "world_size",
                                                    "tickets", "report_s"}

With "layout_digest" and "layout_address", that is the layout that all report, and where it is.

Says "joined" when all ranks [BEGIN, END) have been let in, then reports until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any

import grpc.aio

from paramd.places import host_id
from paramd.security.tickets import NONCE_BYTES
from paramd.v1 import common_pb2, control_pb2, control_pb2_grpc

_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
AT_ONCE = 32
_HOST = host_id()


def main() -> None:
    begin, end = int(sys.argv[1]), int(sys.argv[2])
    asyncio.run(_run(json.load(sys.stdin), range(begin, end)))


async def _run(said: Mapping[str, Any], ranks: range) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    ready = [asyncio.Event() for _ in ranks]
    tasks = [
        asyncio.create_task(join_as(said, rank, gate, event))
        for rank, event in zip(ranks, ready, strict=True)
    ]
    for event in ready:
        await event.wait()
    print("joined", flush=True)
    await asyncio.gather(*tasks)


async def join_as(
    said: Mapping[str, Any], rank: int, gate: asyncio.Semaphore, ready: asyncio.Event
) -> None:
    """One rank: a channel of its own, and one report after another."""
    report_s = float(said["report_s"])
    async with grpc.aio.insecure_channel(said["address"], options=_OPTIONS) as channel:
        stub: Any = control_pb2_grpc.ControlServiceStub(channel)
        ticket = said["tickets"][rank]
        async with gate:
            question = control_pb2.ProveControlRequest(
                job=said["job"],
                incarnation=said["incarnation"],
                address=said["address"],
                nonce=secrets.token_bytes(NONCE_BYTES),
            )
            await stub.ProveControl(question)
            call = stub.Join(metadata=(("authorization", f"Bearer {ticket}"),))
            await call.write(_report(said, rank, 0))
            if await call.read() is grpc.aio.EOF:
                raise SystemExit(f"rank {rank}: {await call.details()}")
        ready.set()
        await asyncio.sleep(random.random() * report_s)
        step = 0
        while True:
            step += 1
            await call.write(_report(said, rank, step))
            await asyncio.sleep(report_s)


def _report(said: Mapping[str, Any], rank: int, step: int) -> control_pb2.JoinRequest:
    """As long as a real one."""
    digest = said.get("layout_digest", "d" * 32)
    return control_pb2.JoinRequest(
        header=common_pb2.Header(
            job=said["job"],
            incarnation=said["incarnation"],
            step=step,
            rank=rank,
            layout_digest=digest,
        ),
        world_size=said["world_size"],
        peer=common_pb2.Peer(
            rank=rank,
            address=said.get("layout_address", f"10.0.{rank >> 8}.{rank & 255}:40000"),
            socket_path=f"/run/user/1000/paramd/run/rank-{rank}.sock",
            host_id=_HOST,
        ),
        state=common_pb2.RankState(
            rank=rank,
            phase=common_pb2.PHASE_FORWARD_BACKWARD,
            step=step,
            trainer_pid=100_000 + rank,
            sidecar_pid=200_000 + rank,
            step_time_ns=350_000_000,
            boundary_age_ns=time.monotonic_ns() % 350_000_000,
            stall_count=step // 10,
            stall_total_ns=step * 1_000_000,
            stall_max_ns=4_000_000,
            arena_bytes=1 << 33,
            snapshot_bytes=1 << 30,
            snapshot_count=2,
            sidecar_rss_bytes=40 << 20,
            trainer_rss_bytes=8 << 30,
            agreement_works=True,
        ),
        version="0.1.0",
    )


if __name__ == "__main__":
    main()
