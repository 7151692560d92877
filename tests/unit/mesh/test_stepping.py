"""When a subscription ends because its job is another one by now, and when it does not."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from paramd.errors import AbortedError, ConflictError, UnreachableError
from paramd.memory.control_page import Rewind
from paramd.mesh.frames import stepping
from paramd.mesh.frames.stepping import StepStream, StreamOverError, missed
from paramd.mesh.peers.control import parse_job
from paramd.state import At
from paramd.v1 import sidecar_pb2
from tests.unit.mesh.test_rest import document


class Heard:
    """A reach that has heard what the test says."""

    def __init__(self) -> None:
        self.document = parse_job(document())

    async def refresh(self) -> None:
        pass


def subscribed(reach: Heard) -> StepStream[Any, Any]:
    nobody: Any = None
    return StepStream(reach, nobody, nobody, every=1)  # type: ignore[arg-type]


class Unserved:
    """A rank that does not serve its parameters, and answers."""

    ranks = (0,)

    def __init__(self, label: str = "") -> None:
        self.label = label

    async def state(self, rank: int, timeout_s: float) -> sidecar_pb2.GetStateResponse:
        answer = sidecar_pb2.GetStateResponse()
        answer.header.label = self.label
        answer.state.unserved_reason = "parameters were replaced"
        return answer

    async def hold(self, sidecars: object, at: object, timeout_s: float) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("label", ["", "ema"])
def test_who_follows_a_rank_that_is_not_served_is_told_why(
    monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    monkeypatch.setattr(stepping, "UNSERVED_LOOK_S", 0.01)
    monkeypatch.setattr(stepping, "OUTAGE_S", 0.05)
    rank, reach = Unserved(label), Heard()

    async def sidecars() -> Unserved:
        return rank

    reach.sidecars = sidecars  # type: ignore[attr-defined]
    stream: StepStream[Any, Any] = StepStream(
        reach,
        rank,
        lambda *_: None,
        every=1,
        parameters=True,  # type: ignore[arg-type]
    )

    async def follow() -> None:
        try:
            async with asyncio.timeout(0.5):
                await stream.next()
        finally:
            await stream.close()

    if label:
        # Other weights stand in for a while: frames come again after that.
        with pytest.raises(TimeoutError):
            asyncio.run(follow())
        return
    with pytest.raises(ConflictError, match=r"rank 0.*cannot be served: parameters were replaced"):
        asyncio.run(follow())


def test_why_no_frame_comes_is_logged_once_until_one_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stepping, "UNSERVED_LOOK_S", 0.0)
    stream = subscribed(Heard())
    for step in (1, 2, 3):
        asyncio.run(stream._after(AbortedError(f"update {step} was skipped")))
    assert [one.getMessage() for one in caplog.records] == [
        "paramd: no frame comes: update 1 was skipped"
    ]


def test_an_incarnation_that_went_on_ends_it_by_its_number() -> None:
    reach = Heard()
    stream = subscribed(reach)
    reach.document = replace(reach.document, incarnation=2)
    with pytest.raises(ConflictError, match="run 1 has ended, the job is in run 2"):
        stream._check_identity()


def test_a_rank_that_is_away_for_a_while_does_not_end_it() -> None:
    reach = Heard()
    stream, before = subscribed(reach), reach.document
    for digest in ("", before.layout_digest):
        reach.document = replace(before, layout_digest=digest)
        stream._check_identity()
    reach.document = replace(before, layout_digest="another")
    with pytest.raises(ConflictError, match="the layout of run 1 is not the one"):
        stream._check_identity()


def test_sidecars_that_left_with_the_training_end_it_and_others_are_waited_for() -> None:
    reach = Heard()
    stream = subscribed(reach)
    away = UnreachableError("rank 0 has no sidecar now")
    asyncio.run(stream._after(away))
    reach.document = replace(reach.document, state="ended", peers={})
    with pytest.raises(StreamOverError):
        asyncio.run(stream._after(away))


@pytest.mark.parametrize(
    ("last", "at", "every", "count"),
    [
        (At(0, 10), At(0, 11), 1, 0),
        (At(0, 10), At(0, 16), 2, 2),
        # Steps 11 to 20 of the history that was left, and 6, 7 of the next.
        (At(0, 10), At(1, 8), 1, 10 + 2),
        (At(0, 10), At(1, 8), 4, 3),
        # Two rollbacks: 19, 20; then 6 to 30; then 26.
        (At(0, 18), At(2, 27), 1, 2 + 25 + 1),
        (At(1, 30), At(2, 26), 1, 0),
        # Nobody knows of the rollback that began history 7.
        (At(6, 3), At(7, 9), 1, 0),
    ],
)
def test_frames_missed_before_and_after_a_rollback_are_counted(
    last: At, at: At, every: int, count: int
) -> None:
    rewinds = {1: Rewind(1, 20, 5), 2: Rewind(2, 30, 25)}
    assert missed(last, at, rewinds, every) == count


class Quick:
    """A rank whose training passes steps while a request is on its way."""

    ranks = (0,)

    def __init__(self, late: int) -> None:
        self.late = late
        self.step = 100
        self.holds = 0

    async def state(self, rank: int, timeout_s: float) -> sidecar_pb2.GetStateResponse:
        answer = sidecar_pb2.GetStateResponse()
        answer.header.step, answer.state.step_time_ns = self.step, 10_000_000
        return answer

    async def hold(self, sidecars: object, at: At, timeout_s: float) -> None:
        self.holds += 1
        self.step += self.late
        if at.step <= self.step:
            raise AbortedError(f"step {at.step} passed before it was copied")
        self.step = at.step

    def release(self, held: None) -> None:
        pass


@pytest.mark.parametrize("late", [0, 5, 40])
def test_requests_that_come_late_are_made_further_ahead_and_near_again_later(late: int) -> None:
    rank, reach = Quick(late), Heard()

    async def sidecars() -> Quick:
        return rank

    async def read(_: object, at: At, dropped: int, held: None) -> int:
        return at.step

    reach.sidecars = sidecars  # type: ignore[attr-defined]

    async def follow() -> None:
        stream: StepStream[Any, Any] = StepStream(reach, rank, read, every=1)  # type: ignore[arg-type]
        frames = 30
        for _ in range(frames):
            await stream.next()
        assert rank.holds <= 2 * frames, "most requests are in time"
        assert stream._further <= 4 * max(late, 1)
        rank.late = 0
        for _ in range(60):
            await stream.next()
        assert stream._further < 1
        await stream.close()

    asyncio.run(follow())
