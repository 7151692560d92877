"""What several ranks have of one step counts when it is one state, edits included."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paramd.errors import AbortedError
from paramd.mesh.frames import stepping
from paramd.mesh.frames.stepping import PinnedStep, TrainingEndedError, hold_step
from paramd.mesh.peers.sidecars import RankPin, Sidecars
from paramd.state import At, StateName
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb

INCARNATION, HISTORY, STEP = 3, 2, 7


class Answering:
    """Sidecars whose answers are given."""

    def __init__(self, answers: Mapping[int, pb.PinSnapshotResponse]) -> None:
        self.document = SimpleNamespace(incarnation=INCARNATION)
        self.answers = answers
        self.asked: list[pb.PinSnapshotRequest] = []
        self.released: list[str] = []
        self.renewed = 0

    async def pin_step(
        self, rank: int, request: pb.PinSnapshotRequest, timeout_s: float
    ) -> pb.PinSnapshotResponse:
        self.asked.append(request)
        return self.answers[rank]

    def release(self, pin: RankPin) -> None:
        self.released.append(pin.snapshot_id)

    async def renew(self, pin: RankPin, lease_s: float) -> None:
        self.renewed += 1


def answer(rank: int, *, edits: int, ended: bool = False, **other: Any) -> pb.PinSnapshotResponse:
    state = {"incarnation": INCARNATION, "history": HISTORY, "step": STEP, "edits": edits}
    header = common_pb2.Header(rank=rank, **(state | other))
    return pb.PinSnapshotResponse(
        header=header, snapshot_id=f"s{rank}", size_bytes=8, lease_ms=900, ended=ended
    )


async def hold(sidecars: Answering) -> PinnedStep:
    requests = {rank: pb.PinSnapshotRequest(at_step=STEP) for rank in sidecars.answers}
    return await hold_step(cast(Sidecars, sidecars), requests, At(HISTORY, STEP), 1.0)


OTHERS: list[dict[str, Any]] = [
    {"edits": 3},
    {"edits": 2, "step": STEP + 1},
    {"edits": 2, "history": HISTORY + 1},
    {"edits": 2, "unsettled": True},
    {"edits": 2, "unsettled": True, "label": "ema"},
]
"""States beside the one that is asked for."""


async def test_equal_states_are_held_with_their_edits() -> None:
    sidecars = Answering({rank: answer(rank, edits=2) for rank in (0, 1)})
    held = await hold(sidecars)
    assert held.state == StateName(INCARNATION, HISTORY, STEP, 2)
    assert {pin.state.edits for pin in held.pins.values()} == {2}
    assert not sidecars.released
    held.release()
    assert sorted(sidecars.released) == ["s0", "s1"]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("on_all", [False, True])
async def test_other_states_than_the_one_wanted_are_let_go_of(
    other: dict[str, Any], on_all: bool
) -> None:
    if on_all and set(other) == {"edits"}:
        return  # a state like any other
    first = answer(0, **(other if on_all else {"edits": 2}))
    sidecars = Answering({0: first, 1: answer(1, **other)})
    with pytest.raises(AbortedError, match="but the ranks have step"):
        await hold(sidecars)
    assert sorted(sidecars.released) == ["s0", "s1"]


async def test_the_end_of_the_training_is_no_state() -> None:
    sidecars = Answering({0: answer(0, edits=2), 1: answer(1, edits=0, ended=True)})
    with pytest.raises(TrainingEndedError):
        await hold(sidecars)
    assert sorted(sidecars.released) == ["s0", "s1"]


async def test_what_is_being_read_is_kept_longer_than_what_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stepping, "CAPTURE_LEASE_S", 0.003)
    monkeypatch.setattr(stepping, "CAPTURE_LEASE", stepping.CaptureLease())
    sidecars = Answering({0: answer(0, edits=2)})
    held = await hold(sidecars)
    held._hold_s = 0.002
    held.reading()
    async with asyncio.timeout(60):
        while sidecars.renewed < 9:
            await asyncio.sleep(0.001)
    held.release()


def test_captures_are_leased_for_as_long_as_this_process_needs_to_renew_them() -> None:
    lease = stepping.CaptureLease()
    lease.renewed(0.3)
    assert lease.seconds == stepping.CAPTURE_LEASE_S
    # Starved: the renewal that is due every 0.3 s comes after 2 s.
    lease.renewed(2.0)
    assert lease.seconds == 6.0
    lease.ended()
    assert lease.seconds == stepping.MOST_CAPTURE_LEASE_S
    for _ in range(40):
        lease.renewed(0.1)
    assert lease.seconds == stepping.CAPTURE_LEASE_S


async def test_a_capture_asks_for_that_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = stepping.CaptureLease()
    lease.seconds = 4.5
    monkeypatch.setattr(stepping, "CAPTURE_LEASE", lease)
    sidecars = Answering({0: answer(0, edits=2)})
    (await hold(sidecars)).release()
    assert [one.lease_ms for one in sidecars.asked] == [4500]
