"""Snapshots of one step on several ranks, kept for as long as a reader may come for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from paramd.errors import AbortedError, ParamdError
from paramd.mesh.frames.stepping import TrainingEndedError
from paramd.mesh.peers.pins import RankPin, out_of_lockstep
from paramd.mesh.peers.sidecars import Sidecars
from paramd.v1 import sidecar_pb2

LEASE_S = 0.9
"""So long at most does a reader that was killed keep memory."""

HOLD_S = 10.0
"""How long what was asked for waits for its reader."""


class PinnedStep:
    """Answers of all ranks at one step, their leases renewed until `let_go`."""

    def __init__(
        self,
        sidecars: Sidecars,
        state: tuple[int, int],
        answers: Mapping[int, Any],
        pins: Mapping[int, RankPin],
    ) -> None:
        """`state` is the epoch, and the edits that the bytes have in them (-1: gradients)."""
        self.epoch, self.edits = state
        self.answers: Mapping[int, sidecar_pb2.PinSnapshotResponse] = answers
        self.pins = pins
        self._sidecars = sidecars
        self._renewing = (
            asyncio.create_task(self._renew(), name="paramd-step-leases") if pins else None
        )

    def let_go(self) -> None:
        """Ends the leases; never waits. Idempotent."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
            for pin in self.pins.values():
                self._sidecars.release(pin)

    async def _renew(self) -> None:
        for _ in range(int(HOLD_S / (LEASE_S / 3))):
            await asyncio.sleep(LEASE_S / 3)
            # A lease that could not be renewed shows as NOT_FOUND at the next read.
            await asyncio.gather(
                *(self._sidecars.renew(pin, LEASE_S) for pin in self.pins.values()),
                return_exceptions=True,
            )


async def hold_step(
    sidecars: Sidecars,
    requests: Mapping[int, sidecar_pb2.PinSnapshotRequest],
    step: int,
    timeout_s: float,
) -> PinnedStep:
    """Asks all ranks at once; all answers are of `step`, or nothing is held.

    An edit between two updates changes parameters but not the step, so answers must agree on
    their edits, too: one rank may have copied before it, another one after it.

    Raises:
        AbortedError: a rank missed the step, or has it with other edits.
        TrainingEndedError: no step comes any more.
        ParamdError: as `Sidecars.pin_step`.
    """
    tasks = {
        rank: asyncio.create_task(sidecars.pin_step(rank, request, timeout_s))
        for rank, request in requests.items()
    }
    try:
        await asyncio.gather(*tasks.values())
    except BaseException:
        for task in tasks.values():
            task.cancel()
        await asyncio.wait(tasks.values())
        for rank, task in tasks.items():
            if not task.cancelled() and task.exception() is None:
                _release(sidecars, rank, task.result())
        raise
    answers = {rank: task.result() for rank, task in tasks.items()}
    try:
        state = _check(sidecars, answers, step)
    except ParamdError:
        for rank, answer in answers.items():
            _release(sidecars, rank, answer)
        raise
    pins = {rank: _pin_of(rank, answer) for rank, answer in answers.items() if answer.snapshot_id}
    return PinnedStep(sidecars, state, answers, pins)


def _check(
    sidecars: Sidecars, answers: Mapping[int, sidecar_pb2.PinSnapshotResponse], step: int
) -> tuple[int, int]:
    """Epoch and edits of all answers."""
    if any(answer.ended for answer in answers.values()):
        raise TrainingEndedError("the training has detached")
    headers = [answer.header for answer in answers.values()]
    said = {(header.epoch, header.step, header.edits) for header in headers}
    epoch, edits = sidecars.document.epoch, headers[0].edits
    if said != {(epoch, step, edits)}:
        raise AbortedError(
            f"asked for step {step} of epoch {epoch}, the ranks have (epoch, step, edits) "
            f"{sorted(said)}"
        )
    if len({header.iteration for header in headers}) > 1:
        raise out_of_lockstep(step, {header.rank: header.iteration for header in headers})
    return epoch, edits


def _release(sidecars: Sidecars, rank: int, answer: sidecar_pb2.PinSnapshotResponse) -> None:
    if answer.snapshot_id:
        sidecars.release(_pin_of(rank, answer))


def _pin_of(rank: int, answer: sidecar_pb2.PinSnapshotResponse) -> RankPin:
    return RankPin(
        rank=rank,
        snapshot_id=answer.snapshot_id,
        epoch=answer.header.epoch,
        step=answer.header.step,
        size_bytes=answer.size_bytes,
        lease_s=answer.lease_ms / 1000,
        edits=answer.header.edits,
    )
