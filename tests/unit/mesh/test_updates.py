"""`mesh.updates` on a host that is too busy to renew its leases: it pins again by itself."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from paramd.errors import DeadlineError
from paramd.mesh.frames import stepping
from paramd.mesh.frames.stepping import CAPTURE_LEASE_S
from paramd.mesh.insight import updates
from paramd.mesh.peers.grpc import LeaseEndedError
from paramd.state import At

NOTHING: Any = None


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The leases asked for; those of the first two tries end before their steps are read."""
    asked: list[float] = []

    async def status(*_: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(step=7, step_time_s=0.1)]

    async def present(*_: object) -> At:
        return At(0, 7)

    async def two_steps(*given: Any) -> tuple[SimpleNamespace, SimpleNamespace, str]:
        asked.append(stepping.CAPTURE_LEASE.seconds)
        pinned = SimpleNamespace(state=SimpleNamespace(edits=0))
        return pinned, pinned, "no moments"

    async def rows(*_: object) -> list[updates.UpdateRow]:
        if len(asked) < 3:
            raise LeaseEndedError("its lease has ended. Pin again")
        return []

    lease = stepping.CaptureLease()
    monkeypatch.setattr(stepping, "CAPTURE_LEASE", lease)
    monkeypatch.setattr(updates, "CAPTURE_LEASE", lease)
    monkeypatch.setattr(updates, "mesh_status", status)
    monkeypatch.setattr(updates, "present", present)
    monkeypatch.setattr(updates, "_two_steps", two_steps)
    monkeypatch.setattr(updates, "_rows", rows)
    return asked


def test_steps_whose_lease_ended_are_pinned_again_for_longer(leases: list[float]) -> None:
    deadline_s = time.monotonic() + 60.0
    asyncio.run(updates._next_update(NOTHING, NOTHING, (), deadline_s, 1))
    assert leases == [CAPTURE_LEASE_S, 2 * CAPTURE_LEASE_S, 4 * CAPTURE_LEASE_S]


def test_at_its_deadline_it_says_what_the_caller_can_do(leases: list[float]) -> None:
    with pytest.raises(DeadlineError, match="allow more time") as raised:
        asyncio.run(updates._next_update(NOTHING, NOTHING, (), time.monotonic() - 1.0, 1))
    assert "Pin again" not in str(raised.value)
    assert leases == [CAPTURE_LEASE_S]
