"""Pause training at a boundary: one holder at a time, under a lease.

The trainers wait at a boundary they agreed on and check the lease in every round; once the lease
of any sidecar expires, all resume together. A control plane that dies cannot keep training paused.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace

from paramd.errors import ConflictError, DeadlineError, ParamdError, UnreachableError
from paramd.mesh.edits.calls import PauseState, PauseWord
from paramd.mesh.peers.grpc import MORE_TIME
from paramd.v1 import common_pb2, sidecar_pb2
from paramd_service.aio import stopped
from paramd_service.control.access.authority import Principal
from paramd_service.control.access.roles import Action
from paramd_service.control.mesh.coordinator import (
    BoundaryAction,
    BoundaryRequest,
    Verdict,
    token_of,
)
from paramd_service.control.mesh.health import pause_of
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import Membership, MeshView, waited_for
from paramd_service.control.mesh.sidecars import on_all
from paramd_service.control.records.records import Records
from paramd_service.edits.machine import Outcome
from paramd_service.edits.runner import withdrawn

MAX_STEPS = 1_000_000
END_NOW_MS = 1
MOST_ASKED = 3
"""Ranks asked, one after the other, whether training is paused: they pause and go on together."""
OWN_LEASE_S = 15.0
"""Lease of a pause that the control plane begins for a request."""

log = logging.getLogger("paramd.control.pauses")


@dataclass(eq=False)
class Pause:
    """The pause of one incarnation. Use on one event loop."""

    mesh: Incarnation
    records: Records
    _: KW_ONLY
    agree_s: Callable[[MeshView], float]
    on_change: Callable[[str, PauseState], None]

    def __post_init__(self) -> None:
        self._holder = ""
        self._owner = ""
        self._id = ""
        self._ended: deque[str] = deque(maxlen=256)
        """Ids of pauses that were ended, perhaps before they began."""
        self._since_s: float | None = None
        self._pausing = False
        self._acting = asyncio.Lock()
        self._step_to = 0
        self.begun_count = 0
        """Pauses begun in this process."""

    async def view(self) -> PauseState:
        """The pause as a rank reports it now; its last report if it does not answer."""
        return (await self._look())[0]

    async def _known(self) -> PauseState:
        """As `view`. Raises UnreachableError: no rank says now whether training is paused."""
        now, untold = await self._look()
        if untold and now.state is PauseWord.RUNNING:
            raise UnreachableError(
                f"no rank reports whether training is paused ({untold}); try again"
            )
        return now

    async def _look(self) -> tuple[PauseState, str]:
        """The pause, and why no rank has told it just now; empty if one has."""
        view = self.mesh.registry.view()
        state, step, untold = common_pb2.RankState(), -1, ""
        if not view.joined:
            # Ranks that have left train without us. The others may be paused: a pause goes on while
            # sidecars, or another control plane, are started.
            absent = [rank for rank in view.absent if rank.membership is not Membership.LEFT]
            untold = "; ".join(f"rank {rank.rank}: {rank.reason}" for rank in absent[:8])
        else:
            state, step = view.joined[0].state, view.joined[0].step
        for report in view.joined[:MOST_ASKED]:
            try:
                request = sidecar_pb2.GetStateRequest()
                fresh = await self.mesh.calls.ask(report.rank, report.address, request)
            except ParamdError as error:
                untold = untold or str(error)
            else:
                state, step, untold = fresh.state, fresh.header.step, ""
                break
        now = pause_of(state, step)
        if now.state is PauseWord.PAUSED and self._step_to:
            now = await self._last_to_step(view, now)
        if now.state is PauseWord.RUNNING:
            if self._pausing:
                waits = waited_for(self.mesh.registry.view())
                now = replace(now, state=PauseWord.PAUSING, holder=self._holder, waits_for=waits)
            elif not untold:
                self._forget()
            return now, untold
        return replace(now, holder=self._holder, since_s=self._since_s), untold

    async def _last_to_step(self, view: MeshView, first: PauseState) -> PauseState:
        """STEPPING until every rank has passed the granted steps, then `first`."""
        try:
            request = sidecar_pb2.GetStateRequest()
            found = await on_all(view, lambda rank, at: self.mesh.calls.ask(rank, at, request))
        except ParamdError as error:
            # Until every rank answers, at least one step is assumed to be left.
            log.debug("not every rank reported its step: %s", error)
            step = min(first.step, self._step_to - 1)
        else:
            step = min((one.header.step for one in found.values()), default=first.step)
        if step >= self._step_to:
            self._step_to = 0
            return first
        left = self._step_to - step
        return replace(first, state=PauseWord.STEPPING, step=step, steps_left=left)

    async def begin(
        self,
        by: Principal,
        lease_s: float,
        holder: str,
        *,
        for_all: bool = False,
        timeout_s: float | None = None,
        pause_id: str = "",
    ) -> PauseState:
        """Pause all ranks at one boundary; return once they wait there.

        An earlier call's `holder` makes a retry idempotent. With `for_all`, anyone allowed to pause
        training may end this pause, and act within it. `timeout_s`: for all ranks to agree; None:
        as for an edit. `pause_id`: the caller's, for `end`.

        Raises:
            ConflictError: Another paused training, the ranks were late, or `end` came first.
            UnreachableError: Not all ranks are joined.
        """
        # The pause of a request is over in a moment: wait for it instead of refusing the caller.
        async with self._acting:
            return await self._begin(by, lease_s, holder, for_all, timeout_s, pause_id)

    async def _begin(
        self,
        by: Principal,
        lease_s: float,
        holder: str = "",
        for_all: bool = False,
        timeout_s: float | None = None,
        pause_id: str = "",
    ) -> PauseState:
        self.mesh.check()
        present = await self.view()
        if present.state is not PauseWord.RUNNING:
            if holder and holder == self._holder:
                return present if self._pausing else await self.renew(by, lease_s, holder)
            raise ConflictError(
                f"training is {present.state} by {present.holder or 'an unknown holder'} for "
                f"another {present.lease_left_s:.0f} s unless renewed; wait, or ask the holder"
            )
        if pause_id in self._ended:
            raise ConflictError("this pause was ended before it began; to pause, ask again")
        # Of a pause of which no rank has told just now, and that may go on; else forgotten already.
        former = self._id, self._holder, self._owner, self._since_s, self._step_to
        self._forget()
        self._id = pause_id
        self._holder = f"{by.name}/{secrets.token_hex(4)}"
        self._owner = by.name if not for_all else ""
        self._pausing = True
        self._tell(PauseState(state=PauseWord.PAUSING, holder=self._holder))
        try:
            detail = {"holder": self._holder, "lease_s": lease_s}
            async with self.records.recorded(by, "pause.begin", detail, self.mesh) as entry:
                verdict = await self._ask(
                    BoundaryAction.HOLD, lease_ms=round(1000 * lease_s), timeout_s=timeout_s
                )
                entry.outcome(step=verdict.step)
            self._since_s = time.time()
            self.begun_count += 1
        except BaseException:
            self._id, self._holder, self._owner, self._since_s, self._step_to = former
            self._tell(PauseState(state=PauseWord.RUNNING))
            raise
        finally:
            self._pausing = False
        if verdict.step < 0:
            return await self._told_now()
        # As agreed, not as reported: a sidecar that died meanwhile last reported an earlier step.
        paused = PauseState(
            state=PauseWord.PAUSED,
            holder=self._holder,
            step=verdict.step,
            lease_left_s=lease_s,
            since_s=self._since_s,
        )
        self._tell(paused)
        return paused

    async def renew(self, by: Principal, lease_s: float, holder: str) -> PauseState:
        """Renew the lease for `lease_s` seconds from now.

        Raises:
            ConflictError: Unless training is paused by this holder.
        """
        await self._check_holder(by, holder)
        await self._renew(round(1000 * lease_s))
        return await self.view()

    async def step(self, by: Principal, steps: int, holder: str) -> PauseState:
        """Let paused training pass `steps` boundaries; return once all ranks have agreed.

        Raises:
            ConflictError: Unless training is paused by this holder.
        """
        before = await self._check_holder(by, holder)
        detail = {"holder": self._holder, "steps": steps}
        async with self.records.recorded(by, "pause.step", detail, self.mesh):
            verdict = await self._ask(BoundaryAction.STEP, step_count=steps)
            # The verdict has no step (-1) if the answers were lost after agreement: then count
            # from the step at which training was paused.
            self._step_to = max(verdict.step, before.step) + steps
        return await self._told_now()

    async def end(self, by: Principal, holder: str, pause_id: str = "") -> PauseState:
        """Resume training; with `pause_id`, end that pause alone, even before it begins.

        Idempotent.

        Raises:
            ConflictError: When another holder paused it.
            UnreachableError: No rank says whether training is paused.
        """
        if not pause_id:
            return await self._end(by, holder)
        self._ended.append(pause_id)
        if pause_id == self._id:
            async with self._acting:  # until it has begun, or failed
                if pause_id == self._id:
                    return await self._end(by, holder)
        return await self.view()

    async def _end(self, by: Principal, holder: str) -> PauseState:
        if (now := await self._known()).state is PauseWord.RUNNING:
            return now
        await self._check_holder(by, holder)
        try:
            await self._ask(BoundaryAction.RESUME)
        except ParamdError as error:
            log.warning("could not end the pause by agreement (%s); ending its lease", error)
            await self._renew(END_NOW_MS)
        # Recorded afterwards, and best effort: training must not wait for the audit store.
        await self.records.happened(by, "pause.end", {"holder": self._holder}, self.mesh)
        self._forget()
        return await self._told_now()

    @asynccontextmanager
    async def during(self, by: Principal) -> AsyncIterator[None]:
        """Pause training while the block runs, by a separate pause or within the caller's.

        Raises:
            ConflictError: When somebody else paused training, or it is stepping.
        """
        async with self._acting, self._within(by):
            yield

    @asynccontextmanager
    async def _within(self, by: Principal) -> AsyncIterator[None]:
        if (await self.view()).state is PauseWord.PAUSED:
            await self._check_holder(by, "")
            yield
            return
        begun = await self._begin(by, OWN_LEASE_S)
        renewing = asyncio.create_task(self._keep(), name="paramd-pause")
        try:
            yield
        finally:
            await stopped(renewing)
            # If this fails, the pause ends with its lease.
            with suppress(ParamdError):
                await asyncio.shield(self._end(by, begun.holder))

    async def over(self, timeout_s: float) -> None:
        """Wait until no request of the control plane pauses training, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._acting:
                pass

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(OWN_LEASE_S / 3)
            with suppress(ParamdError):
                await self._renew(round(1000 * OWN_LEASE_S))

    async def _check_holder(self, by: Principal, holder: str) -> PauseState:
        """The current pause. Raises ConflictError unless the caller may change it, and as
        `_known`."""
        present = await self._known()
        if present.state is PauseWord.RUNNING:
            raise ConflictError(
                "training is not paused, or the lease of the pause has ended; pause it first"
            )
        mine = not self._owner or (holder == self._holder if holder else by.name == self._owner)
        # The holder is not persisted: after a restart anyone allowed to pause may end it.
        if self._holder and not mine and not by.may(Action.EDIT_ANY):
            raise ConflictError(
                f"training was paused by {self._holder}; only that token, or an admin, may do this"
            )
        return present

    async def _ask(
        self,
        action: BoundaryAction,
        *,
        step_count: int = 0,
        lease_ms: int = 0,
        timeout_s: float | None = None,
    ) -> Verdict:
        async with self.mesh.coordinator.turn() as turn:
            request = BoundaryRequest(
                number=turn.number,
                token=token_of(self.mesh.terms.generation, turn.number, action),
                action=action,
                step_count=step_count,
                lease_ms=lease_ms,
            )
            if timeout_s is None:
                timeout_s = self.agree_s(turn.view)
            try:
                verdict = await self.mesh.coordinator.round(
                    request, {}, turn.view, timeout_s=timeout_s
                )
            except ParamdError as error:
                if await self._was_agreed(turn.number, turn.view):
                    return Verdict(True, -1, "")
                if not isinstance(error, DeadlineError):
                    raise
                raise DeadlineError(self._why_not_agreed(timeout_s)) from error
            if not verdict.captured and not await self._was_agreed(turn.number, turn.view):
                raise ConflictError(f"{self._why_not_agreed(timeout_s)}: {verdict.reason}")
            return verdict

    def _why_not_agreed(self, timeout_s: float) -> str:
        waited = waited_for(self.mesh.registry.view())
        return f"the trainers did not agree in {timeout_s:.3g} s, waiting for {waited}; {MORE_TIME}"

    async def _was_agreed(self, number: int, view: MeshView) -> bool:
        """Withdraw a request from all ranks; True if it had already been agreed on."""

        async def withdraw(rank: int, address: str) -> Outcome:
            try:
                return await withdrawn(self.mesh.calls, rank, address, number)
            except ParamdError:
                return Outcome.IN_DOUBT

        fates = set((await on_all(view, withdraw)).values())
        return bool(fates & {Outcome.AGREED, Outcome.DONE})

    async def _renew(self, lease_ms: int) -> None:
        view = self.mesh.registry.view()
        request = sidecar_pb2.RenewHoldRequest(lease_ms=lease_ms)
        await on_all(view, lambda rank, at: self.mesh.calls.ask(rank, at, request))

    async def _told_now(self) -> PauseState:
        now = await self.view()
        self._tell(now)
        return now

    def _forget(self) -> None:
        self._id, self._holder, self._owner, self._since_s = "", "", "", None
        self._step_to = 0

    def _tell(self, now: PauseState) -> None:
        self.on_change(self.mesh.job, now)
