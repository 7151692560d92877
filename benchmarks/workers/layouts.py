"""A sidecar that knows one thing, the layout of a big model, for simulated ranks to point at.

    python -m benchmarks.workers.layouts JOB INCARNATION WORLD_SIZE TENSORS

Says {"address", "digest"} as JSON, then serves until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from paramd.errors import RANK_KEY
from paramd.layout.codec import layout_batches
from paramd.layout.merge import layout_digest
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.v1 import common_pb2, sidecar_pb2, sidecar_pb2_grpc

ROWS, COLUMNS = 64, 32
PIECE_BYTES = ROWS * COLUMNS * 2
PARTS = ("attention.q", "attention.k", "attention.v", "attention.out", "up", "down", "norm")


def big_layout(world_size: int, tensors: int) -> Layout:
    """Weights of many layers, each on two neighbouring ranks."""
    return Layout(
        world_size=world_size,
        arena_bytes=(tensors * PIECE_BYTES,) * world_size,
        tensors=tuple(_tensor(index, world_size) for index in range(tensors)),
    )


def _tensor(index: int, world_size: int) -> TensorLayout:
    layer, part = divmod(index, 2 * len(PARTS))
    kind = "weight" if part % 2 == 0 else "bias"
    first = 2 * index % world_size
    half = ROWS // 2
    return TensorLayout(
        fqn=f"model.layers.{layer}.{PARTS[part // 2]}.{kind}",
        dtype="float32",
        shape=(ROWS, COLUMNS),
        kind=TensorKind.PARAMETER,
        pieces=(
            Piece(first, index * PIECE_BYTES, Box((0, 0), (half, COLUMNS))),
            Piece(first + 1, index * PIECE_BYTES, Box((half, 0), (ROWS, COLUMNS))),
        ),
        placement="Shard(0) over 2",
    )


class LayoutServicer(sidecar_pb2_grpc.SidecarServiceServicer):  # type: ignore[misc]
    """Answers GetLayout for every rank, whoever asks."""

    def __init__(self, layout: Layout, header: common_pb2.Header) -> None:
        self._batches = list(layout_batches(layout, max_tensors=1000))
        self._header = header

    async def GetLayout(self, request: Any, context: Any) -> AsyncIterator[Any]:
        header = common_pb2.Header()
        header.CopyFrom(self._header)
        header.rank = int(dict(context.invocation_metadata())[RANK_KEY])
        for batch in self._batches:
            yield sidecar_pb2.GetLayoutResponse(header=header, layout=batch)


async def main() -> None:
    job, incarnation, world_size, tensors = sys.argv[1], *map(int, sys.argv[2:5])
    layout = big_layout(world_size, tensors)
    digest = layout_digest(layout)
    header = common_pb2.Header(
        job=job, incarnation=incarnation, step=0, rank=0, layout_digest=digest
    )
    server = grpc.aio.server()
    sidecar_pb2_grpc.add_SidecarServiceServicer_to_server(LayoutServicer(layout, header), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}", "digest": digest}), flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
