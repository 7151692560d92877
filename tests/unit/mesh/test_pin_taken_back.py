"""A pin that nobody waits for any more holds nothing."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from paramd.mesh.peers.control import JobDocument, PeerAddress
from paramd.mesh.peers.grpc import Background
from paramd.mesh.peers.sidecars import PinKind, Sidecars
from paramd.v1 import sidecar_pb2


class Sidecar:
    """Grants a pin when it is told to; the answer was on its way when the caller left."""

    def __init__(self) -> None:
        self.granting, self.asked = asyncio.Event(), asyncio.Event()
        self.released: list[str] = []

    async def ask(self, asked: Any, method: str, request: Any, *, timeout_s: float) -> Any:
        if method == "ReleaseSnapshot":
            self.released.append(request.snapshot_id)
            return None
        self.asked.set()
        await self.granting.wait()
        return sidecar_pb2.PinSnapshotResponse(snapshot_id="late")


DOCUMENT = JobDocument(
    job="my-run", incarnation=1, world_size=1, control_address="127.0.0.1:1", layout_digest="",
    peers={0: PeerAddress(rank=0, address="127.0.0.1:2", socket_path="", host_id="")}, ticket="",
    ticket_expires_s=time.time() + 600,
)  # fmt: skip


async def test_a_pin_granted_after_its_caller_left_is_released() -> None:
    sidecar, background = Sidecar(), Background()
    sidecars = Sidecars(SimpleNamespace(ask=sidecar.ask), DOCUMENT, background)  # type: ignore[arg-type]
    pin = asyncio.create_task(sidecars.pin(0, [(0, 8)], PinKind(), 10.0))
    await sidecar.asked.wait()
    pin.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pin
    assert sidecar.released == []
    sidecar.granting.set()
    await background.close()
    assert sidecar.released == ["late"]
