"""Gradient frames and followed parameters as methods of AsyncMesh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from paramd.mesh.frames.follow import FollowRequest, open_following
from paramd.mesh.frames.frames import GradFrame, Kind, ParamFrame
from paramd.mesh.frames.grads import GradRequest, open_stream
from paramd.mesh.frames.stepping import StepStream
from paramd.mesh.reading.transfer import check_transport

if TYPE_CHECKING:
    import torch

    from paramd.mesh.peers.discovery import Reach
    from paramd.mesh.reading.transfer import Transfer, Transport

Result = TypeVar("Result")


class AsyncStreaming:
    """What comes step by step. Part of AsyncMesh."""

    _reach: Reach
    _transfer: Transfer
    _streams: set[StepStream[Any, Any]] | None = None

    async def grads(
        self,
        *patterns: str,
        every: int = 1,
        kind: Kind = "full",
        dtype: torch.dtype | None = None,
        rows: int | None = None,
        lossless: bool = False,
        transport: Transport = "auto",
    ) -> AsyncIterator[GradFrame[Any]]:
        """Gradients, frame by frame, as the optimizer's update consumes them; endless.

        Each frame is whole and of one update, on all ranks. Training never waits: what a slow
        reader did not ask for is dropped and counted, and it is given the newest there is.

        Args:
            patterns: Globs over parameters' names; each may end in a slice.
            every: Updates between two frames; those of its multiples come.
            kind: "full" for whole gradients; "stats" for numbers made where gradients lie (norm,
                mean, std, min, max, zeros, NaN, Inf); "histogram" adds counts of exponents.
            dtype: Dtype of whole gradients; None means each parameter's own.
            rows: Take that many rows of each first dim, evenly spread; None takes all.
            lossless: Miss no frame, where the trainer's operator allows it: then its updates
                wait for this reader, each for a bounded time (PARAMD_LOSSLESS_BUDGET_MS).
            transport: As in `summon`.

        Yields:
            `frame.step` is the number of the update; `frame[name]` a tensor or a `Summary`,
            None where there is no gradient. The iterator ends when the training detaches.

        Raises:
            UsageError, NotFoundError: as `summon`.
            ConflictError: the job attached anew (subscribe again), a trainer ended.
            UnreachableError: a rank did not answer for 20 s.
        """
        wanted = GradRequest(
            patterns=patterns,
            every=every,
            kind=kind,
            dtype=dtype,
            rows=rows,
            lossless=lossless,
            transport=transport,
        )
        check_transport(transport)
        stream = await open_stream(self._reach, self._transfer, wanted)
        async for frame in self._frames(stream):
            yield frame

    async def follow(
        self,
        *patterns: str,
        every: int = 1,
        dtype: torch.dtype | None = None,
        transport: Transport = "auto",
    ) -> AsyncIterator[ParamFrame]:
        """Parameters after updates that are multiples of `every`, frame by frame; endless.

        Only tensors whose bytes changed since the last frame are read; the others are the
        last frame's own. Args, Yields, Raises: as `grads`.
        """
        check_transport(transport)
        wanted = FollowRequest(patterns=patterns, every=every, dtype=dtype, transport=transport)
        stream = await open_following(self._reach, self._transfer, wanted)
        async for frame in self._frames(stream):
            yield frame

    async def _frames(self, stream: StepStream[Any, Result]) -> AsyncIterator[Result]:
        self._open_streams().add(stream)
        try:
            async with aclosing(stream.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            self._open_streams().discard(stream)

    def _open_streams(self) -> set[StepStream[Any, Any]]:
        if self._streams is None:
            self._streams = set()
        return self._streams

    async def _end_streams(self) -> None:
        """Ends all subscriptions; their iterators end."""
        while streams := self._open_streams():
            await streams.pop().close()
