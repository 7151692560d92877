"""Agreed boundaries: number each request, send it to every sidecar, compare the answers.

Turns run one at a time, first come, first served. Captures are batched: those that arrive during
a round share the next one. An edit or a pause keeps a turn until its outcome is known (`turn`).
A round ends as soon as any rank cannot take part, so a dead rank delays nobody. A shared round
that a sidecar refuses is retried request by request: one caller's expired lease fails no other.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from paramd.errors import (
    CODES,
    ConflictError,
    DeadlineError,
    DeniedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd.v1 import sidecar_pb2
from paramd_service.aio import ended, stopped
from paramd_service.control.mesh.registry import MeshView, listed, waited_for

if TYPE_CHECKING:
    from paramd_service.control.mesh.sidecars import SidecarCalls

_TOKEN_BITS = 63

Snapshots = Mapping[int, Sequence[str]]
"""Snapshot ids by rank."""


class BoundaryAction(IntEnum):
    """What to do at an agreed boundary; values as in paramd.v1."""

    CAPTURE = sidecar_pb2.BOUNDARY_ACTION_UNSPECIFIED
    """Fill snapshots, possibly none."""
    EDIT = sidecar_pb2.BOUNDARY_ACTION_EDIT
    """Apply a staged edit."""
    HOLD = sidecar_pb2.BOUNDARY_ACTION_HOLD
    """Pause training under a lease."""
    STEP = sidecar_pb2.BOUNDARY_ACTION_STEP
    """Let paused training pass a number of boundaries."""
    RESUME = sidecar_pb2.BOUNDARY_ACTION_RESUME
    """End the pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryRequest:
    """One request, identical on all ranks except for their snapshots."""

    number: int
    """Rises with every request of an incarnation."""
    token: int
    """Identifies the content, 1 to 2**63 - 1: when two control planes use the same number,
    trainers agree on neither."""
    action: BoundaryAction = BoundaryAction.CAPTURE
    edit_id: str = ""
    step_count: int = 0
    """Boundaries to let pass, for STEP."""
    lease_ms: int = 0
    """Lease in milliseconds, for HOLD."""


def token_of(
    generation: int, number: int, action: BoundaryAction, digests: Sequence[bytes] = ()
) -> int:
    """A request's token: equal for equal content, 1 to 2**63 - 1. `digests` are those of an edit's
    operations and data."""
    told = hashlib.blake2b(f"{generation}:{number}:{int(action)}".encode(), digest_size=8)
    for digest in digests:
        told.update(len(digest).to_bytes(4, "big") + digest)
    return max(1, int.from_bytes(told.digest(), "big") >> (64 - _TOKEN_BITS))


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """One sidecar's answer for a boundary: its step, or why the copy was missed."""

    rank: int
    incarnation: int
    step: int
    captured: bool
    reason: str
    edits: int = 0
    """Edits applied in this incarnation so far."""
    history: int = 0
    """Rollbacks in this incarnation so far."""
    token: int = 0
    """Token of the request that its snapshots were filled for; 0: none were."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """All ranks' answers combined; when not captured, `step` is -1 and `reason` says why."""

    captured: bool
    step: int
    reason: str
    edits: int = -1
    history: int = 0
    token: int = 0
    """Token of the request; 0: not captured, or nothing was copied for it."""


def decide(
    incarnation: int, world_size: int, answers: Sequence[RankAnswer], *, token: int = 0
) -> Verdict:
    """Combine the answers: captured if all ranks filled theirs at one step of this incarnation,
    for the request with this token (0: for one without a copy)."""
    missed = [answer for answer in answers if not answer.captured or answer.step < 0]
    if missed:
        told = "; ".join(f"rank {a.rank}: {a.reason or 'no reason given'}" for a in missed[:8])
        return Verdict(False, -1, told)
    foreign = [answer for answer in answers if answer.incarnation != incarnation]
    if foreign:
        ranks = listed([answer.rank for answer in foreign])
        return Verdict(False, -1, f"ranks {ranks} answered for another run than {incarnation}")
    steps = sorted({answer.step for answer in answers})
    if len(steps) > 1:
        told = ", ".join(f"rank {a.rank} at {a.step}" for a in answers[:8])
        return Verdict(False, -1, f"the ranks captured different steps: {told}")
    if len({(answer.history, answer.edits) for answer in answers}) > 1:
        told = ", ".join(
            f"rank {a.rank} after {a.edits} edits, {a.history} of them rollbacks"
            for a in answers[:8]
        )
        return Verdict(False, -1, f"the ranks captured after different edits: {told}")
    if token and (others := [answer.rank for answer in answers if answer.token != token]):
        told = f"ranks {listed(others)} filled their snapshots for another request"
        return Verdict(False, -1, told)
    silent = set(range(world_size)) - {answer.rank for answer in answers}
    if silent:
        return Verdict(False, -1, f"ranks {listed(sorted(silent))} have not answered")
    return Verdict(True, steps[0], "", answers[0].edits, answers[0].history, token)


def worst(failures: Mapping[int, ParamdError]) -> ParamdError:
    """Merge all failed ranks' errors into one, of the least retryable kind among them."""
    order: tuple[type[ParamdError], ...] = (
        DeniedError,
        ConflictError,
        UnreachableError,
        DeadlineError,
        ParamdError,
    )
    rank = next(
        rank for wanted in order for rank in sorted(failures) if isinstance(failures[rank], wanted)
    )
    kind = next(kind for kind in type(failures[rank]).__mro__ if kind in CODES)
    texts: dict[str, list[int]] = {}
    for one in [rank, *(other for other in sorted(failures) if other != rank)]:
        texts.setdefault(_without_rank(str(failures[one]), one), []).append(one)
    told = [
        str(failures[ranks[0]]) if len(ranks) == 1 else f"ranks {listed(sorted(ranks))}: {text}"
        for text, ranks in texts.items()
    ]
    return kind("; ".join(told[:8]))


def _without_rank(text: str, rank: int) -> str:
    """An error's text without the rank and the address that it begins with, to group equal ones."""
    return re.sub(rf"\Arank {rank}( \([^()]*\))?: ", "", text)


@dataclass(frozen=True, slots=True)
class Turn:
    """The exclusive right to send one request to all ranks, under a fresh number."""

    number: int
    view: MeshView
    """The mesh when the turn began; all ranks are joined."""


def margin_s(timeout_s: float) -> float:
    """Part of a caller's timeout kept back so that the reason arrives before its deadline."""
    return min(0.05 * timeout_s, 1.0)


@dataclass(eq=False, slots=True)
class _Request:
    snapshots: Snapshots
    deadline_s: float
    answer: asyncio.Future[Verdict]


class Coordinator:
    """Runs the rounds of one incarnation. Single event loop; call `close` at the end."""

    def __init__(
        self,
        calls: SidecarCalls,
        view: Callable[[], MeshView],
        *,
        incarnation: int,
        generation: int = 0,
    ) -> None:
        self._calls = calls
        self._view = view
        self._incarnation = incarnation
        self._generation = generation
        self._last_boundary = 0
        self._turns = asyncio.Lock()
        self._waiting: list[_Request] = []
        self._alone: list[_Request] = []
        self._current: list[_Request] = []
        self._round: asyncio.Task[Verdict] | None = None
        self._runner: asyncio.Task[None] | None = None
        self.round_count = 0
        """Rounds started."""
        self.captured_count = 0
        """Rounds that captured."""

    @property
    def waiting_count(self) -> int:
        """Requests waiting for the next round."""
        return len(self._waiting)

    async def schedule(self, snapshots: Snapshots, *, timeout_s: float) -> Verdict:
        """Fill all snapshots at one boundary. Cancelling withdraws the request.

        Raises:
            UnreachableError: Not all ranks are joined, or one does not answer.
            ConflictError: A rank is torn or has no trainer.
            DeadlineError: No boundary was agreed within `timeout_s`.
        """
        timeout_s -= margin_s(timeout_s)
        request = _Request(
            snapshots, time.monotonic() + timeout_s, asyncio.get_running_loop().create_future()
        )
        self._waiting.append(request)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run(), name="paramd-rounds")
        try:
            async with asyncio.timeout(timeout_s):
                return await request.answer
        except TimeoutError:
            raise DeadlineError(
                f"the trainers agreed on no boundary within {timeout_s:.1f} s, waiting for "
                f"{waited_for(self._view())}"
            ) from None
        finally:
            self._withdraw(request)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Wait for a turn, then block all other requests until the block ends.

        Raises:
            UnreachableError: Unless all ranks are joined.
        """
        async with self._turns:
            # View and number are taken only now: requests that ran meanwhile may have changed both.
            view = self.joined()
            yield Turn(self._next_number(view), view)

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Block all requests until the block ends; needs no rank."""
        async with self._turns:
            yield

    def used(self, number: int) -> None:
        """Number later requests above `number`, which an earlier control plane used."""
        self._last_boundary = max(self._last_boundary, number)

    async def round(
        self, request: BoundaryRequest, snapshots: Snapshots, view: MeshView, *, timeout_s: float
    ) -> Verdict:
        """Send a request to all ranks; call within a turn. Raises as `schedule`."""
        self.round_count += 1
        tasks = {
            asyncio.create_task(
                self._calls.reach(
                    report.rank, report.address, request, snapshots.get(report.rank, ()), timeout_s
                )
            ): report.rank
            for report in view.joined
        }
        try:
            copies = request.action is BoundaryAction.CAPTURE
            verdict = await self._gathered(tasks, token=request.token if copies else 0)
        finally:
            # Awaited, not just cancelled: no call of this turn may overlap the next turn.
            for task in tasks:
                await ended(task)
        self.captured_count += verdict.captured
        return verdict

    async def close(self) -> None:
        """Cancel the current round; all callers get UnreachableError."""
        await stopped(self._runner)
        for request in [*self._current, *self._alone, *self._waiting]:
            _fail(request, UnreachableError("the control plane is stopping; try again"))
        self._alone.clear()
        self._waiting.clear()

    def _withdraw(self, request: _Request) -> None:
        request.answer.cancel()
        for queue in (self._waiting, self._alone):
            if request in queue:
                queue.remove(request)
        # A shared round is cancelled only when its last caller has gone.
        if self._round is not None and all(other.answer.done() for other in self._current):
            self._round.cancel()

    async def _run(self) -> None:
        while self._alone or self._waiting:
            async with self._turns:
                if self._alone or self._waiting:
                    await self._shared_round()

    async def _shared_round(self) -> None:
        if self._alone:
            self._current = [self._alone.pop(0)]
        else:
            self._current, self._waiting = self._waiting, []
        self._round = asyncio.create_task(self._one_round(self._current))
        try:
            await asyncio.wait({self._round})
        finally:
            await ended(self._round)
        if len(self._current) > 1 and _refused(self._round):
            self._alone += [r for r in self._current if not r.answer.done()]
        else:
            _settle(self._current, self._round)
        self._current, self._round = [], None

    async def _one_round(self, requests: Sequence[_Request]) -> Verdict:
        view = self.joined()
        number = self._next_number(view)
        # At random: whoever starts again, with whatever numbers, never names this boundary again.
        token = 1 + secrets.randbelow((1 << _TOKEN_BITS) - 1)
        timeout_s = max(request.deadline_s for request in requests) - time.monotonic()
        ids = {
            report.rank: [i for r in requests for i in r.snapshots.get(report.rank, ())]
            for report in view.joined
        }
        request = BoundaryRequest(number=number, token=token)
        return await self.round(request, ids, view, timeout_s=timeout_s)

    def joined(self) -> MeshView:
        """The mesh.

        Raises:
            UnreachableError: Unless all ranks are joined.
        """
        view = self._view()
        if view.absent:
            told = "; ".join(f"rank {rank.rank}: {rank.reason}" for rank in view.absent[:8])
            raise UnreachableError(f"a boundary needs all {len(view.ranks)} ranks; {told}")
        return view

    def _next_number(self, view: MeshView) -> int:
        # Numbers of an earlier control plane show only in reports; sidecars refuse one used before.
        self._last_boundary = max(self._last_boundary, view.highest_boundary) + 1
        return self._last_boundary

    async def _gathered(
        self, tasks: Mapping[asyncio.Task[RankAnswer], int], *, token: int
    ) -> Verdict:
        pending = set(tasks)
        answers: list[RankAnswer] = []
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failures: dict[int, ParamdError] = {}
            for task in done:
                error = task.exception()
                if error is None:
                    answers.append(task.result())
                elif isinstance(error, ParamdError):
                    failures[tasks[task]] = error
                else:
                    raise error
            if failures:
                raise worst(failures)
            if not all(answer.captured for answer in answers):
                break
        answers.sort(key=lambda answer: answer.rank)
        return decide(self._incarnation, len(tasks), answers, token=token)


def _refused(ended: asyncio.Task[Verdict]) -> bool:
    """Whether a sidecar refused the request itself, possibly because of a single caller."""
    if ended.cancelled():
        return False
    return isinstance(ended.exception(), NotFoundError | ConflictError | UsageError)


def _settle(requests: Sequence[_Request], ended: asyncio.Task[Verdict]) -> None:
    for request in requests:
        if ended.cancelled():
            _fail(request, UnreachableError("the round was withdrawn; try again"))
        elif (error := ended.exception()) is not None:
            _fail(request, error)
        elif not request.answer.done():
            request.answer.set_result(ended.result())


def _fail(request: _Request, error: BaseException) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)
