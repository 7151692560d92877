"""Gradients for thin clients."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.calls import Call, CallTable
from paramd_service.sidecar.gateway import Gateway


def calls(gateway: Gateway) -> CallTable:
    """Methods of this subject."""

    async def stream(
        request: pb.StreamGradientsRequest, _timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(gateway.gradients(request)) as parts:
            async for message in parts:
                yield message

    return {"StreamGradients": Call(request=pb.StreamGradientsRequest, answers=stream)}
