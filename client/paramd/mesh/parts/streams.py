"""Gradients and parameters, one frame for each update."""

# `timeout=` as in other clients; it bounds the whole call with its retries, not one await.

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from paramd.layout.select import Pattern
from paramd.mesh.frames.follow import FollowRequest, open_following
from paramd.mesh.frames.frames import GradFrame, Kind, ParamFrame
from paramd.mesh.frames.grads import GradRequest, open_stream
from paramd.mesh.frames.stepping import StepStream, frames_of
from paramd.mesh.parts.host import MeshHost, MeshPart
from paramd.mesh.reading.stream import Transport
from paramd.mesh.reading.transfer import check_transport

if TYPE_CHECKING:
    import torch


class StreamsPart(MeshPart):
    """Frames of gradients, and of parameters."""

    def __init__(self, host: MeshHost) -> None:
        super().__init__(host)
        self._streams: set[StepStream[Any, Any]] = set()

    async def _closed(self) -> None:
        while self._streams:
            await self._streams.pop().close()
        await super()._closed()

    async def grads(
        self,
        *patterns: Pattern,
        every: int = 1,
        kind: Kind = "full",
        dtype: torch.dtype | str | None = None,
        rows: int | None = None,
        lossless: bool = False,
        transport: Transport = "auto",
    ) -> AsyncIterator[GradFrame[Any]]:
        """Stream gradients, one frame per update, as the optimizer consumes them.

        Each frame is complete and of one update on all ranks. Training never waits: a slow
        reader gets the newest frame, and the frames it missed are counted in `dropped`.

        Args:
            patterns: Globs over names of parameters; each may end in a slice.
            every: Yield a frame for each update whose number is a multiple of this.
            kind: "full" for full gradients; "stats" for statistics computed by the sidecars
                (norm, mean, std, min, max, zeros, NaN, Inf); "histogram" adds exponent counts.
            dtype: Dtype of full gradients; None means each parameter's own.
            rows: Sample this many evenly spaced rows of each first dim; None takes all.
            lossless: Miss no frame, if the trainer's operator allows it: each update then waits
                for this reader, for a bounded time (PARAMD_LOSSLESS_BUDGET_MS).
            transport: As in `summon`.

        Yields:
            `frame.step` is the number of the update; `frame[name]` a tensor or a `Summary`, or
            None without a gradient. Iteration ends when the training detaches.

        Raises:
            UsageError, NotFoundError: as `summon`.
            ConflictError: a trainer ended, or a new run began (subscribe again); of
                `follow`, a rank has not served its parameters for 20 s; of `grads`, the updates of
                this training never have a frame. The message says why.
            UnreachableError: a rank did not respond for 20 s.
        """
        check_transport(transport)
        self._host.job_rest.check_outside("grads")
        wanted = GradRequest(
            patterns=patterns,
            every=every,
            kind=kind,
            dtype=await self._host.transfer.dtype(dtype),
            rows=rows,
            lossless=lossless,
            transport=transport,
        )
        stream = await open_stream(self._host.reach, self._host.transfer, wanted)
        async with frames_of(stream, self._streams) as frames:
            async for frame in frames:
                yield frame

    async def follow(
        self,
        *patterns: Pattern,
        every: int = 1,
        dtype: torch.dtype | str | None = None,
        transport: Transport = "auto",
        deltas: bool = False,
        merge: bool = False,
        adapter: str | None = None,
    ) -> AsyncIterator[ParamFrame]:
        """Stream parameters, one frame per update whose number is a multiple of `every`.

        Only tensors whose bytes changed since the last frame are read; the others are the same
        objects as in the last frame. Args, Yields, Raises: as `grads`.

        Args:
            deltas: Have the ranks send only the changed elements of changed tensors, where
                that takes fewer bytes (docs/engines.md). For links slower than a rank compares
                two states, some 5 Gbit/s a core; it takes memory here for another copy.
            merge: Merge an adapter (LoRA) into its base here, and name tensors as the base model
                does. The patterns are over the training's own names.
            adapter: The adapter to merge; None means the only one.
        """
        check_transport(transport)
        cast = await self._host.transfer.dtype(dtype)
        self._host.job_rest.check_outside("follow")
        wanted = FollowRequest(
            patterns=patterns,
            every=every,
            dtype=cast,
            transport=transport,
            deltas=deltas,
            merge=merge,
            adapter=adapter if adapter is not None else "",
        )
        stream = await open_following(self._host.reach, self._host.transfer, wanted)
        async with frames_of(stream, self._streams) as frames:
            async for frame in frames:
                yield frame
