"""Steps to come, pinned by all ranks: parameters, and optimizer state that sidecars have."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from paramd.answers import unpacked
from paramd.bounds import FACTS
from paramd.errors import AbortedError, ConflictError, DataLossError, DeadlineError, ParamdError
from paramd.layout.plan import ReadPlan
from paramd.mesh.frames.stepping import PinnedStep, TrainingEndedError, hold_step
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.sidecars import Pinned, Sidecars, Spans
from paramd.mesh.results import STATE_TIMEOUT_S
from paramd.state import At
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb

MAX_WAIT_S = 500.0
"""Longest wait for a step to come, in seconds, and lease of its pins: the sidecars' limit."""

AHEAD = 4
"""Steps that may pass before the sidecars receive a request."""

AHEAD_S = 0.5
"""The same, in seconds: in a quick training, more steps than that."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A rank's report on its optimizers; see `paramd.v1.PinSnapshotResponse.optimizer`."""

    threads: int
    classes: Sequence[str]
    groups: Sequence[Sequence[Mapping[str, Any]]]
    keys: Sequence[str]
    params: Sequence[Mapping[str, Any]]
    """By first byte in the arena."""

    @classmethod
    def parse(cls, data: bytes) -> Facts:
        """Raises DataLossError if it is no sidecar's report."""
        try:
            found = unpacked(data, FACTS)
            return cls(
                *(found[name] for name in ("threads", "classes", "groups", "keys", "params"))
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataLossError(
                f"a sidecar sent a malformed table of its optimizer state: {error}"
            ) from None

    def param_at(self, arena_byte: int) -> Mapping[str, Any] | None:
        index = bisect_right(self.params, arena_byte, key=lambda one: one["begin"]) - 1
        return None if index < 0 or arena_byte >= self.params[index]["end"] else self.params[index]

    def group_of(self, param: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.groups[param["optimizer"]][param["group"]]
        return found


def facts_of(held: PinnedStep) -> Mapping[int, Facts]:
    """The ranks' reports on their optimizers at a step of which state was pinned, by rank."""
    return {rank: Facts.parse(answer.optimizer) for rank, answer in held.answers.items()}


async def hold(
    stack: AsyncExitStack,
    sidecars: Sidecars,
    spans: Spans,
    key: str | None,
    at: At,
    deadline_s: float,
) -> PinnedStep:
    """Pin spans of parameters ("" as key), of one kind of optimizer state, or of gradients (None),
    at a step to come, by the ranks of `spans`; `stack` releases it. State is laid out as the
    parameters of the same spans.

    Raises:
        AbortedError: If a rank missed the step.
        ConflictError: If it does not keep its state in shared memory.
        NotFoundError: If its optimizer has no such state, else as `hold_step`.
    """
    source = pb.SOURCE_UNSPECIFIED
    if key is None:
        source = pb.SOURCE_GRADIENTS
    elif key:
        source = pb.SOURCE_MOMENTS
    templates = {
        rank: sidecars.pin_request(of, source=source, state_key=key or "")
        for rank, of in spans.items()
    }
    left_s = min(deadline_s - time.monotonic(), MAX_WAIT_S)
    held = await hold_step(sidecars, templates, at, left_s, hold_s=left_s)
    stack.callback(held.release)
    return held


async def present(sidecars: Sidecars, rank: int | None = None) -> At:
    """The present step of a rank; None: of the first."""
    rank = rank if rank is not None else min(sidecars.document.peers, default=0)
    header = (await sidecars.state(rank, STATE_TIMEOUT_S)).header
    return At(header.history, header.step)


async def next_step(reach: SidecarFinder, deadline_s: float) -> At:
    """The step of "+0": the first that can surely be requested before it begins."""

    async def attempt(sidecars: Sidecars) -> At:
        found = await sidecars.state(min(sidecars.document.peers, default=0), STATE_TIMEOUT_S)
        step_s = found.state.step_time_ns / 1e9
        ahead = max(AHEAD, int(AHEAD_S / step_s) if step_s > 0 else 0)
        return At(found.header.history, found.header.step + ahead)

    return await reach.attempts(attempt, deadline_s)


async def pin_step(
    stack: AsyncExitStack,
    sidecars: Sidecars,
    plan: ReadPlan,
    at: At,
    deadline_s: float,
) -> Pinned:
    """Pin a step to come on all ranks; `stack` releases it.

    Raises:
        ConflictError: If the step is past or training ended before it.
        DeadlineError: If it did not come in time, else as `hold_step`.
    """
    spans = {read.rank: read.spans for read in plan.ranks}
    try:
        left_s = min(deadline_s - time.monotonic(), MAX_WAIT_S)
        held = await hold(stack, sidecars, spans, "", at, deadline_s)
    except (AbortedError, DeadlineError, TrainingEndedError) as error:
        raise await _why_not_pinned(sidecars, list(spans), at, left_s, error) from error
    return held.pinned


async def _why_not_pinned(
    sidecars: Sidecars, ranks: Sequence[int], wanted: At, waited_s: float, error: ParamdError
) -> ParamdError:
    """The error for a step that could not be pinned, by the ranks' present steps."""
    asked = (sidecars.state(rank, STATE_TIMEOUT_S) for rank in ranks)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found = [answer for answer in answers if not isinstance(answer, BaseException)]
    states, step = [answer.state for answer in found], wanted.step
    if any(answer.header.history != wanted.history for answer in found):
        return ConflictError(
            f"training was rolled back before it reached step {step}; that step will differ when "
            f"it comes; ask for a step of the present history ({error})"
        )
    at = max((state.step for state in states), default=-1)
    ended = isinstance(error, TrainingEndedError) or any(
        state.phase in (common_pb2.PHASE_ORPHANED, common_pb2.PHASE_TORN) for state in states
    )
    if at > step or (at == step and not ended):
        now = ' ("now" is the step that the training is at)' if at == step else ""
        return ConflictError(
            f"step {step} is past{now}, and steps are not kept: give a step to come, or a "
            f"checkpoint of that step on disk ({error})"
        )
    if ended:
        return ConflictError(
            f"step {step} will not come: the training has ended{f' at step {at}' * (at >= 0)}"
        )
    return DeadlineError(
        f"step {step} did not come within {waited_s:.1f} s: the ranks are at step {at}; allow more "
        f"time, or see whether the training is running (paramd why) ({error})"
    )
