"""StreamGradients: this sidecar follows all ranks on behalf of a client that cannot."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeVar

from paramd.errors import UsageError
from paramd.layout.select import NameIndex
from paramd.layout.stats import FIELDS
from paramd.mesh.frames.frames import GradFrame, Kind
from paramd.mesh.frames.grads import REASONS, GradRequest, open_stream
from paramd.mesh.peers.control import JobDocument
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.transfer import Transfer
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import CHUNK_BYTES, summon_chunk

if TYPE_CHECKING:
    import torch

    from paramd_service.sidecar.rpc.relay import Gatherer

_KINDS: Final[dict[int, Kind]] = {
    pb.GRADIENT_KIND_UNSPECIFIED: "full",
    pb.GRADIENT_KIND_STATS: "stats",
    pb.GRADIENT_KIND_HISTOGRAM: "histogram",
}
_WHY: Final = {text: number for number, text in REASONS.items()}

Answer = TypeVar("Answer")


class GatewayReach:
    """What a stream needs to know about the job, as this sidecar knows it; see `ReachLike`."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer

    @property
    def document(self) -> JobDocument:
        return self._gatherer.document()

    async def refresh(self) -> JobDocument:
        return self._gatherer.document()

    async def sidecars(self) -> Sidecars:
        return self._gatherer.sidecars()

    async def index(self, sidecars: Sidecars) -> NameIndex:
        return self._gatherer.index()

    def costs(self) -> dict[int, float]:
        return {}

    async def attempts(
        self, attempt: Callable[[Sidecars], Awaitable[Answer]], deadline_s: float
    ) -> Answer:
        return await attempt(self._gatherer.sidecars())


async def stream_gradients(
    gatherer: Gatherer, request: pb.StreamGradientsRequest
) -> AsyncGenerator[bytes, None]:
    """Yield, frame by frame, its facts, then each gradient's facts and bytes.

    Raises:
        UsageError: a field is out of range. ParamdError: as `AsyncMesh.grads`.
    """
    kind = _KINDS.get(request.kind)
    if kind is None or request.every < 0:
        raise UsageError(f"kind, every: {request.kind}, {request.every}; expected a known kind")
    wanted = GradRequest(
        patterns=(request.pattern,), every=request.every if request.every else 1, kind=kind,
        transport="auto",
    )  # fmt: skip
    import paramd_service.sidecar.statistics  # noqa: F401 (torch, whole or not at all)

    transfer = Transfer()
    try:
        stream = await open_stream(GatewayReach(gatherer), transfer, wanted)
        async with aclosing(stream.frames()) as frames:
            async for frame in frames:
                for message in _messages(frame, gatherer):
                    yield message
    finally:
        transfer.close()


def _messages(frame: GradFrame[Any], gatherer: Gatherer) -> Iterator[bytes]:
    header = common_pb2.Header(
        job=frame.job,
        epoch=frame.epoch,
        step=frame.step,
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
        stats = pb.Stats(**{one: getattr(merged, one) for one in FIELDS})
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
