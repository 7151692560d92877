"""Boundary requests of one incarnation: made ready, agreed, carried out. Runs on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from paramd.errors import ConflictError, UsageError
from paramd.memory.arena import is_mirror, pack_wanted
from paramd.memory.control_page import Page, Word, label_of, unserved_reason
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.aio import post
from paramd_service.sidecar.copying.capture import UNSERVED_NS
from paramd_service.sidecar.copying.copier import Copier
from paramd_service.sidecar.copying.page_requests import (
    CAPTURE,
    EDIT,
    STEP,
    Boundary,
    Outcome,
    apart_reason,
    fate_of,
)
from paramd_service.sidecar.owner import AttachedMemory
from paramd_service.sidecar.snapshots.moments import Moments, is_extra, is_moments, is_table
from paramd_service.sidecar.snapshots.store import Fill, Snapshot, SnapshotStore, copy_spans

WITHDRAW_S = 0.010
"""Longer than a trainer can take, after READY = 0, between its two reads of READY."""

_OUTCOMES_KEPT = 64
_DOUBT_POLL_S = 0.002
_DOUBT_S = 0.25
_GAVE_UP = 2
_GAVE_UP_REASON = (
    "the trainers gave up agreeing in this run, since a rank was too long at no boundary; "
    "their logs say when, attach again to restore it"
)
_HOPE_S = 0.2
"""Interval of checks whether agreement is still possible."""
_UNSERVED_STEPS = 2
"""Updates after which a rank that still does not serve its parameters will not by itself: at the
boundary between them it has tried."""
_ROUNDS_APART = 3
"""Rounds in which the ranks were apart, after which they do not meet by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryRequest:
    """A boundary request to this rank; equal values are the same request."""

    number: int
    token: int
    action: pb.BoundaryAction.ValueType = CAPTURE
    snapshot_ids: tuple[str, ...] = ()
    edit_id: str = ""
    step_count: int = 0
    lease_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Asked:
    """A boundary request and its answer, kept so that a repeat gets the same answer."""

    reach: BoundaryRequest
    done: asyncio.Future[Outcome]
    needs_boundary: bool = False
    """Whether it asks for what is copied at boundaries only: buffers, optimizer state, mirrors."""


def report(state: common_pb2.RankState, page: Page) -> None:
    """Add to the rank's state whether its trainer takes part in agreements."""
    words = page.words
    state.ready_boundary = words[Word.HIGHEST]
    if words[Word.AGREEMENT_STATE] == _GAVE_UP:
        state.agreement_works, state.agreement_reason = False, _GAVE_UP_REASON
    elif apart := apart_reason(words):
        state.agreement_works, state.agreement_reason = False, apart


class _Unserved:
    """Whether a rank has not served its parameters for a while, in which updates were made."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._since: tuple[int, int] | None = None
        """Time and step when that was first seen."""

    def lasting(self) -> str:
        """Why the rank will not serve a boundary; empty: it may. Other weights that stand in for a
        while are no reason, nor is what a resting script has done: its next boundary settles it.
        """
        page, now_ns = self._page, time.monotonic_ns()
        reason = unserved_reason(page) if not label_of(page) else ""
        step = page.words[Word.STEP]
        if not reason or self._since is None or step < self._since[1]:
            self._since = (now_ns, step) if reason else None
            return ""
        began_ns, first = self._since
        lasts = now_ns - began_ns >= UNSERVED_NS and step >= first + _UNSERVED_STEPS
        return reason if lasts else ""


class BoundaryChanges:
    """What changes parameters at agreed boundaries; this class changes nothing. Event loop only."""

    def make_ready(self, name: str, *, boundary: int, token: int) -> int:
        """Prepare a change for a request, before the request is written; return its argument.

        Idempotent for the same request.

        Raises:
            NotFoundError: There is no such change.
            ConflictError: It is not complete, was made already, or is in doubt for another
                request.
        """
        raise ConflictError("this sidecar does not take edits")

    def settle(self) -> None:
        """Learn from the page what was made."""

    def withdrawn(self, boundary: int) -> None:
        """The request was withdrawn, and will not be carried out."""

    def request_ended(self, boundary: int) -> None:
        """The request has ended, with or without the change."""

    def why_refused(self, name: str) -> str:
        """Why the trainer has not made the change; empty: it did not say."""
        return ""


class Boundaries:
    """Carries out requests at boundaries that all trainers agree on."""

    def __init__(self, attached: AttachedMemory, store: SnapshotStore, copier: Copier) -> None:
        self._attached = attached
        self._store = store
        self._copier = copier
        self._loop = asyncio.get_running_loop()
        self._asked: dict[int, _Asked] = {}
        self._ended = ""
        self._apart_since = -1
        """Rounds collected when the ranks were first seen apart; -1: they are not."""
        self._changes = BoundaryChanges()
        self.moments: Moments | None = None
        """Optimizer state; None: requests for it are refused."""

    def change_with(self, changes: BoundaryChanges) -> None:
        """Have `changes` made at boundaries from now on."""
        self._changes = changes

    def end(self, reason: str) -> None:
        """Record that no further boundary will come; the copier gives up pending requests."""
        self._ended = reason

    async def reach(self, reach: BoundaryRequest, *, timeout_s: float) -> Outcome:
        """Make the rank ready for a request; return once it was carried out or has failed.

        Idempotent: a repeated request gets the same answer. One not reached in time is withdrawn;
        `withdraw` returns whether it was agreed nevertheless.

        Raises:
            NotFoundError: A snapshot's lease has ended, or the edit is unknown.
            ConflictError: No boundary follows, a later number was requested, the number belongs
                to another request, a snapshot or edit is not ready for it, buffers have changed
                their shape, or the trainers will agree on nothing more and what is asked for is
                copied at boundaries only.
        """
        asked = self._asked.get(reach.number)
        if asked is None:
            asked = self._begin(reach)
        elif asked.reach != reach:
            raise ConflictError(f"boundary {reach.number} was already requested for something else")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answered(asked)
        except TimeoutError:
            # Its own outcome decides: it may have been agreed in the meantime.
            self._copier.withdraw(reach.number, self._why_not_agreed(reach.number, timeout_s))
            return await asyncio.shield(asked.done)
        except asyncio.CancelledError:
            self._copier.withdraw(reach.number, f"the caller of boundary {reach.number} left")
            raise

    async def _answered(self, asked: _Asked) -> Outcome:
        """The outcome of a request, withdrawn as soon as the trainers can never agree on it."""
        unserved = _Unserved(self._attached.page)
        # Not awaited itself: a repeated request may still wait for this result.
        while not (await asyncio.wait([asked.done], timeout=_HOPE_S))[0]:
            if asked.reach.action == CAPTURE and (lasting := unserved.lasting()):
                self._copier.withdraw(asked.reach.number, lasting)
                if not (await asyncio.shield(asked.done)).captured:
                    raise ConflictError(f"the parameters cannot be served: {lasting}")
            if never := self._never():
                self._copier.withdraw(asked.reach.number, never)
        outcome = asked.done.result()
        if outcome.refused:
            raise ConflictError(outcome.reason)
        # Else its reader would ask again until its time is over. One of parameters alone may: it
        # also looks for a step that all ranks have without a boundary.
        if asked.needs_boundary and not outcome.captured and (never := self._never()):
            raise ConflictError(never)
        return outcome

    def _never(self) -> str:
        """Why the trainers will agree on nothing more in this run; empty: they may."""
        words = self._attached.page.words
        if words[Word.AGREEMENT_STATE] == _GAVE_UP:
            return _GAVE_UP_REASON
        apart, rounds = apart_reason(words), words[Word.ROUNDS_COLLECTED]
        if not apart:
            self._apart_since = -1
        elif self._apart_since < 0:
            # Kept from request to request: each ends as soon as it finds the ranks apart.
            self._apart_since = rounds
        return apart if apart and rounds >= self._apart_since + _ROUNDS_APART else ""

    async def withdraw(self, number: int) -> pb.BoundaryFate.ValueType:
        """Withdraw a request and return its fate. Idempotent. Waits some milliseconds, and a little
        longer while the trainer's promise lasts."""
        self._copier.withdraw(number, f"boundary request {number} was withdrawn")
        taken: asyncio.Future[None] = self._loop.create_future()
        self._copier.take_back(number, lambda: post(self._loop, taken.set_result, None))
        # Once ended, the copier may have stopped and never answers.
        if not self._ended:
            await taken
        # A trainer that read READY before it was cleared shows PROMISED by then.
        await asyncio.sleep(WITHDRAW_S)
        doubt_until_s = self._loop.time() + _DOUBT_S
        while True:
            fate = self._fate(number)
            if fate != pb.BOUNDARY_FATE_IN_DOUBT or self._loop.time() > doubt_until_s:
                break
            await asyncio.sleep(_DOUBT_POLL_S)
        self._changes.settle()
        if fate == pb.BOUNDARY_FATE_WITHDRAWN:
            self._changes.withdrawn(number)
        return fate

    def renew_hold(self, lease_s: float) -> None:
        """Extend the lease of a pause.

        Raises:
            ConflictError: If this rank is not paused.
        """
        page = self._attached.page
        if not page[Word.HELD]:
            raise ConflictError("training is not paused, or the lease of the pause has ended")
        page[Word.HOLD_UNTIL_NS] = time.monotonic_ns() + int(lease_s * 1e9)

    def _fate(self, number: int) -> pb.BoundaryFate.ValueType:
        fate = fate_of(self._attached.page.words, number, ended=bool(self._ended))
        if fate == pb.BOUNDARY_FATE_UNSPECIFIED:
            asked = self._asked.get(number)
            if asked is not None and asked.done.done() and asked.done.result().captured:
                return pb.BOUNDARY_FATE_DONE
        return fate

    def _begin(self, reach: BoundaryRequest) -> _Asked:
        """Take a new request, and make the rank ready for it. Raises as `reach`."""
        self._check_follows(reach)
        snapshots = self._snapshots_of(reach)
        argument = self._argument(reach, snapshots)
        asked = _Asked(reach, self._loop.create_future(), self._needs_boundary(snapshots))
        self._remember(asked)
        for snapshot in snapshots:
            # Held until `_end`: its lease may end while the copying thread writes to it.
            self._store.hold(snapshot).fill = Fill.PENDING

        def done(outcome: Outcome) -> None:
            # Called on the copying thread, when the event loop may be closing.
            post(self._loop, self._end, asked, snapshots, outcome)

        self._copier.arm(self._boundary(reach, snapshots, argument, done))
        return asked

    def _check_follows(self, reach: BoundaryRequest) -> None:
        """Raise ConflictError unless the requested boundary can still come."""
        if self._ended:
            raise ConflictError(f"no further boundary: {self._ended}")
        highest = self._attached.page[Word.HIGHEST]
        if reach.number <= highest:
            raise ConflictError(
                f"boundary {reach.number} is past: {highest} was already requested of this rank"
            )

    def _snapshots_of(self, reach: BoundaryRequest) -> list[Snapshot]:
        """The snapshots that a request wants filled: empty ones, of nobody else.

        Raises:
            UsageError: One is listed twice.
            NotFoundError: The lease of one has ended.
            ConflictError: One is in use, or was not pinned for a boundary.
        """
        if len(set(reach.snapshot_ids)) != len(reach.snapshot_ids):
            raise UsageError("snapshot_ids: a snapshot is listed twice")
        snapshots = [self._store.get(snapshot_id).snapshot for snapshot_id in reach.snapshot_ids]
        for snapshot in snapshots:
            if not snapshot.at_boundary:
                raise ConflictError("a snapshot was not pinned with at_boundary; pin it that way")
            # More than its lease holds it: another request fills or reads it. Or somebody may have
            # read a part of it, and would find the rest of another boundary.
            if snapshot.holders > 1 or snapshot.map_count or snapshot.tainted or snapshot.shown:
                raise ConflictError("a snapshot is in use by another request; pin another one")
        if self.moments is None and any(
            is_moments(snapshot.key) or is_table(snapshot.key) for snapshot in snapshots
        ):
            raise ConflictError("this sidecar does not serve optimizer state or extra state")
        return snapshots

    def _needs_boundary(self, snapshots: Sequence[Snapshot]) -> bool:
        """Whether what is asked for is copied at boundaries only."""
        return is_mirror(self._attached.page.words) or any(
            snapshot.with_buffers or is_moments(snapshot.key) for snapshot in snapshots
        )

    def _remember(self, asked: _Asked) -> None:
        """Keep a request for its repeats, and drop the oldest of those that have their answer."""
        self._asked[asked.reach.number] = asked
        answered = [number for number, known in self._asked.items() if known.done.done()]
        for number in answered[:-_OUTCOMES_KEPT]:
            del self._asked[number]

    def _boundary(
        self,
        reach: BoundaryRequest,
        snapshots: Sequence[Snapshot],
        argument: int,
        done: Callable[[Outcome], None],
    ) -> Boundary:
        arena_address, moments = self._attached.arena.address, self.moments
        states = [snapshot for snapshot in snapshots if is_moments(snapshot.key)]
        extra = [snapshot for snapshot in snapshots if is_extra(snapshot.key)]
        with_state = moments if states else None

        def ended(outcome: Outcome) -> None:
            if with_state is not None:
                with_state.ended(captured=outcome.captured, missed=outcome.missed)
            done(outcome)

        of_arena = [
            snapshot for snapshot in snapshots if snapshot not in states and snapshot not in extra
        ]
        fill_extra = None
        if moments and extra:
            fill_extra = partial(moments.fill_extra, extra)
        return Boundary(
            reach.number,
            [span for snapshot in of_arena for span in copy_spans(snapshot, arena_address)],
            any(snapshot.with_buffers for snapshot in snapshots),
            ended,
            with_moments=with_state is not None and with_state.needs_trainer(),
            state=with_state.filling(states) if with_state is not None else None,
            fill_extra=fill_extra,
            token=reach.token,
            action=reach.action,
            argument=argument,
            hold_until_ns=time.monotonic_ns() + int(reach.lease_s * 1e9),
        )

    def _argument(self, reach: BoundaryRequest, snapshots: Sequence[Snapshot]) -> int:
        moments, words = self.moments, self._attached.page.words
        copied = moments is not None and not moments.lives_here
        if reach.action == CAPTURE and (copied or is_mirror(words)):
            # The spans of an optimizer state table are not bytes of the arena.
            keys = [snapshot.key for snapshot in snapshots if not is_table(snapshot.key)]
            return pack_wanted(span for key in keys for span in key.spans)
        if reach.action == EDIT:
            return self._changes.make_ready(reach.edit_id, boundary=reach.number, token=reach.token)
        return reach.step_count if reach.action == STEP else 0

    def _end(self, asked: _Asked, snapshots: Sequence[Snapshot], outcome: Outcome) -> None:
        for snapshot in snapshots:
            snapshot.fill = Fill.FILLED if outcome.captured else Fill.EMPTY
            snapshot.step, snapshot.edits = outcome.step, outcome.edits
            snapshot.history, snapshot.proof = outcome.history, outcome.proof
            snapshot.token = outcome.token
            snapshot.is_true = False
            self._store.drop(snapshot)
        if asked.reach.action == EDIT:
            refusal = self._changes.why_refused(asked.reach.edit_id) if not outcome.captured else ""
            if refusal:
                outcome = Outcome(-1, refusal)
            self._changes.request_ended(asked.reach.number)
        asked.done.set_result(outcome)

    def _why_not_agreed(self, number: int, timeout_s: float) -> str:
        page = self._attached.page
        if page[Word.AGREEMENT_STATE] == _GAVE_UP:
            return _GAVE_UP_REASON
        unserved = unserved_reason(page)
        return (
            f"the trainers did not agree on boundary {number} within {timeout_s:.1f} s (this rank "
            f"is at step {page[Word.STEP]}); "
            + (f"its parameters are not served: {unserved}" if unserved else "")
            + "a rank is slow, hung or not training" * (not unserved)
        )
