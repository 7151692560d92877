"""Gathers whole tensors or gradients from all ranks for a thin client, as the gateway's heavy half.

It is an ordinary client of its peers (`paramd.mesh`), with a ticket that its caller hands over: a
sidecar itself has no right to read its peers. Memory is bounded by the largest tensor and one of
its pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Final, TypeVar

from paramd.errors import ExhaustedError, UsageError
from paramd.layout.codec import decode_layout
from paramd.layout.dtypes import item_bytes
from paramd.layout.plan import Landing, ReadPlan, ResultTensor, plan_read
from paramd.layout.select import NameIndex, select
from paramd.layout.types import Box
from paramd.mesh.frames.frames import GradFrame, Kind
from paramd.mesh.frames.grads import REASONS, GradRequest, open_stream
from paramd.mesh.peers.control import JobDocument
from paramd.mesh.peers.sidecars import Pinned, Sidecars
from paramd.mesh.reading.pin import Pinner
from paramd.mesh.reading.stream import Reading, read_bytes
from paramd.mesh.reading.transfer import Transfer
from paramd.v1 import common_pb2, layout_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import CHUNK_BYTES, summon_chunk
from paramd_service.aio import all_of
from paramd_service.sidecar.calls import handed_over
from paramd_service.sidecar.owner import Mesh
from paramd_service.sidecar.parts import SidecarHost
from paramd_service.sidecar.rpc.peers import Peers

if TYPE_CHECKING:
    import torch

_KINDS: Final[dict[int, Kind]] = {
    pb.GRADIENT_KIND_UNSPECIFIED: "full",
    pb.GRADIENT_KIND_STATS: "stats",
    pb.GRADIENT_KIND_HISTOGRAM: "histogram",
}
_WHY: Final = {text: number for number, text in REASONS.items()}

Answer = TypeVar("Answer")


async def stream_gradients(
    gatherer: Gatherer, request: pb.StreamGradientsRequest
) -> AsyncGenerator[bytes, None]:
    """Yield the facts of each frame, then each gradient's facts and bytes.

    Raises:
        UsageError: For a field out of range, otherwise as `AsyncMesh.grads`.
    """
    kind = _KINDS.get(request.kind)
    if kind is None or request.every < 0:
        raise UsageError(f"kind, every: {request.kind}, {request.every}; expected a known kind")
    wanted = GradRequest(
        patterns=(request.pattern,),
        every=request.every if request.every else 1,
        kind=kind,
        transport="auto",
    )
    import paramd_service.sidecar.statistics  # noqa: F401 (torch, fully or not at all)

    with closing(Transfer()) as transfer:
        stream = await open_stream(gatherer, transfer, wanted)
        async with aclosing(stream.frames()) as frames:
            async for frame in frames:
                for message in _messages(frame, gatherer):
                    yield message


def _messages(frame: GradFrame[Any], gatherer: Gatherer) -> Iterator[bytes]:
    header = common_pb2.Header(
        job=frame.job,
        incarnation=frame.incarnation,
        step=frame.step,
        history=frame.history,
        rank=gatherer.rank,
        layout_digest=gatherer.mesh.layout_digest,
    )
    facts = pb.GradientFacts(
        scale=frame.scale, clip_factor=frame.clip_factor if frame.clip_factor is not None else 0.0
    )
    begin = pb.GradientFrame(step=frame.step, dropped=frame.dropped, facts=facts, count=len(frame))
    yield pb.StreamGradientsResponse(frame=begin, header=header).SerializeToString()
    for name in frame:
        yield from _gradient(frame, name)


def _gradient(frame: GradFrame[Any], name: str) -> Iterator[bytes]:
    why = frame.none.get(name)
    if why is not None:
        none = pb.GradientTensor(fqn=name, none=_WHY.get(why, pb.NO_GRADIENT_UNSUPPORTED))
        yield pb.StreamGradientsResponse(tensor=none).SerializeToString()
        return
    merged = frame.merged(name)
    if merged is not None:
        stats = pb.Stats(**merged._asdict())
        told = pb.GradientTensor(fqn=name, stats=stats)
        yield pb.StreamGradientsResponse(tensor=told).SerializeToString()
        return
    tensor: torch.Tensor = frame[name]
    data = _bytes_of(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    begin = pb.GradientTensor(fqn=name, dtype=dtype, shape=list(tensor.shape), size_bytes=len(data))
    yield pb.StreamGradientsResponse(tensor=begin).SerializeToString()
    for at in range(0, len(data), CHUNK_BYTES):
        # The same fields as a chunk of Summon.
        yield summon_chunk(data[at : at + CHUNK_BYTES])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    data: memoryview = flat.numpy().data
    return data


class Gatherer(Peers):
    """Answers Summon in one mesh; for a stream also the `ReachLike` of this sidecar's job."""

    def __init__(self, rank: SidecarHost, mesh: Mesh) -> None:
        super().__init__(rank, mesh, handed_over)
        self._index: NameIndex | None = None

    async def summon(
        self, request: pb.SummonRequest, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield serialized SummonResponses: the header, then each tensor's facts and bytes."""
        deadline_s = time.monotonic() + timeout_s
        sidecars = await self.sidecars()
        index = await self.index(sidecars)
        selection = select(index, request.pattern, with_buffers=request.with_buffers)
        plan = plan_read(index.layout, selection)
        self._check_sizes(plan)
        spans: dict[int, Sequence[tuple[int, int]]] = {r.rank: r.spans for r in plan.ranks}
        if not spans:
            spans = {self._rank.config.rank: ()}
        async with Pinner(sidecars).pinned(
            spans, deadline_s=deadline_s, with_buffers=selection.at_boundary
        ) as pinned:
            yield pb.SummonResponse(header=self._header(pinned)).SerializeToString()
            reading = Reading(sidecars, pinned, deadline_s, "grpc")
            for number, tensor in enumerate(plan.tensors):
                data = await _tensor(reading, plan, number)
                facts = pb.SummonTensor(
                    fqn=tensor.fqn,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    size_bytes=tensor.size_bytes,
                )
                yield pb.SummonResponse(tensor=facts).SerializeToString()
                for begin in range(0, len(data), CHUNK_BYTES):
                    yield summon_chunk(memoryview(data)[begin : begin + CHUNK_BYTES])

    @property
    def rank(self) -> int:
        return self._rank.config.rank

    async def index(self, _sidecars: Sidecars) -> NameIndex:
        """Names and layout of the incarnation."""
        if self._index is None:
            layout = layout_pb2.Layout.FromString(self.mesh.layout)
            self._index = NameIndex(decode_layout(layout))
        return self._index

    async def refresh(self) -> JobDocument:
        return self.document

    def costs(self) -> dict[int, float]:
        return {}

    async def attempts(
        self, attempt: Callable[[Sidecars], Awaitable[Answer]], deadline_s: float
    ) -> Answer:
        return await attempt(await self.sidecars())

    def _check_sizes(self, plan: ReadPlan) -> None:
        attached = self._rank.attached
        arena_bytes = attached.request.arena_bytes if attached is not None else 0
        budget = self._rank.budget_bytes(arena_bytes)
        largest = max(plan.tensors, key=lambda tensor: tensor.size_bytes, default=None)
        if largest is not None and largest.size_bytes > budget:
            raise ExhaustedError(
                f"{largest.name} has {largest.size_bytes:,} bytes, more than the sidecar's budget "
                f"of {budget:,}; request a slice of it, or use a client that reads from all ranks"
            )

    def _header(self, pinned: Pinned) -> common_pb2.Header:
        return common_pb2.Header(
            job=self._rank.config.job,
            incarnation=pinned.state.incarnation,
            step=pinned.state.step,
            edits=pinned.state.edits,
            rank=self._rank.config.rank,
            layout_digest=self.mesh.layout_digest,
            unsettled=pinned.unsettled,
            label=pinned.state.label,
            history=pinned.state.history,
        )


async def _tensor(reading: Reading, plan: ReadPlan, number: int) -> bytearray:
    """All bytes of one result, row-major."""
    tensor = plan.tensors[number]
    result = bytearray(tensor.size_bytes)
    await all_of(
        _land(reading, read.rank, landing, tensor, result)
        for read in plan.ranks
        for landing in read.landings
        if landing.tensor == number
    )
    return result


async def _land(
    reading: Reading, rank: int, landing: Landing, tensor: ResultTensor, result: bytearray
) -> None:
    data = await read_bytes(reading, rank, landing.begin_bytes, landing.end_bytes)
    if landing.target_begin_bytes is not None:
        begin = landing.target_begin_bytes
        result[begin : begin + landing.size_bytes] = data
        return
    assert isinstance(landing.target, Box), "an interval is always direct"
    # Imported on first use: a sidecar that never gathers stays small.
    from paramd_service.formats.cast import place

    await asyncio.to_thread(
        place,
        data,
        landing.sizes,
        landing.strides,
        result,
        tensor.shape,
        landing.target,
        item_bytes(tensor.dtype),
    )
