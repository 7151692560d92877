"""Editing and holding as methods of AsyncMesh."""

# `timeout=` is what users of every other client write; it bounds retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from paramd.errors import ConflictError, ParamdError, UsageError
from paramd.layout.edits.ops import Op, ops_of
from paramd.layout.select import select
from paramd.mesh.edits.calls import LEASE_S, EditCalls, Holder, edit_body, new_edit_id
from paramd.mesh.edits.results import Edit, Edits, EditState, Hold, check_applied
from paramd.mesh.edits.upload import Progress, Uploads, manifest_of
from paramd.mesh.edits.writeback import Changes, check_mode
from paramd.mesh.loop import UNSET, Timeout
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.transfer import check_transport

if TYPE_CHECKING:
    import torch

    from paramd.layout.select import Selection
    from paramd.mesh.peers.control import RestClient
    from paramd.mesh.peers.discovery import Reach
    from paramd.mesh.reading.transfer import Transfer, Transport
    from paramd.mesh.results import Summoned


class AsyncEditing:
    """What changes a running job. Part of AsyncMesh."""

    _rest: RestClient
    _reach: Reach
    _transfer: Transfer
    _holder: Holder | None = None

    if TYPE_CHECKING:

        def _deadline(self, timeout: Timeout) -> float: ...

        async def summon(
            self, *patterns: str, timeout: Timeout = UNSET, transport: Transport = "auto"
        ) -> Summoned: ...

    async def edit(
        self,
        *patterns: str,
        fill: float | None = None,
        add: float | torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        mul: float | torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        set: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        lerp: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        weight: float | None = None,
        clamp: tuple[float | None, float | None] | None = None,
        if_step: int | None = None,
        reset_moments: bool = False,
        allow_nonfinite: bool = False,
        dry_run: bool = False,
        note: str = "",
        wait: bool = True,
        timeout: Timeout = UNSET,
        progress: Progress | None = None,
        transport: Transport = "auto",
    ) -> Edit:
        """Changes parameters of the running training, on all ranks at one step or on none.

        Exactly one of fill, add, mul, set, lerp and clamp says what is done to what matches.

        Args:
            patterns: Globs over names; each may end in a slice, such as "w[0:4]".
            fill: x = fill.
            add: x = x + weight * add; a number or a tensor.
            mul: x = x * mul; a number or a tensor.
            set: x = set.
            lerp: x = x + weight * (lerp - x).
            weight: Factor of add (1 when None) and of lerp.
            clamp: (min, max); either may be None.
            if_step: Applied at the boundary of this step, or refused. Unless training is held
                (`pause`), it goes on before all ranks have agreed.
            reset_moments: Zero the optimizer's state of the changed elements too.
            allow_nonfinite: NaN and infinities are wanted (admins only).
            dry_run: Change nothing; `before` and `after` say what would be.
            note: Why, for the log.
            wait: False returns once the edit is committed; see `get_edit`.
            timeout: Seconds; None waits for as long as it takes.
            progress: Called with bytes sent and bytes in all while operands travel.
            transport: How operands travel: "grpc" for streams; "auto" and "same-host" use
                shared memory where sidecars run on this host.

        A tensor operand has the shape of the one region that its pattern matches, and is
        converted to the parameter's dtype; a mapping gives one tensor for each name.

        Returns:
            The edit, APPLIED at `step` (with dry_run or without wait: as it is).

        Raises:
            UsageError: what was asked for does not make sense, or does not fit.
            NotFoundError: a pattern matches nothing. DeniedError: the role does not suffice.
            ConflictError: it was not applied, on no rank; the text says why.
            DeadlineError: it is not known yet whether it will be; the text has its id.
        """
        ops = ops_of(
            patterns, fill=fill, add=add, mul=mul, set=set, lerp=lerp, weight=weight, clamp=clamp
        )
        return await self._edit(
            ops,
            if_step=if_step,
            reset_moments=reset_moments,
            allow_nonfinite=allow_nonfinite,
            dry_run=dry_run,
            note=note,
            wait=wait,
            deadline_s=self._deadline(timeout),
            progress=progress,
            transport=transport,
        )

    async def _edit(
        self,
        ops: Sequence[Op],
        *,
        deadline_s: float,
        if_step: int | None = None,
        reset_moments: bool = False,
        allow_nonfinite: bool = False,
        dry_run: bool = False,
        note: str = "",
        wait: bool = True,
        progress: Progress | None = None,
        transport: Transport = "auto",
    ) -> Edit:
        check_transport(transport)
        calls = self._edit_calls()
        body = edit_body(
            new_edit_id(),
            [op.document() for op in ops],
            if_step=if_step,
            reset_moments=reset_moments,
            allow_nonfinite=allow_nonfinite,
            dry_run=dry_run,
            note=note,
        )
        with_data = any(op.operand is not None for op in ops)
        if with_data:
            await self._transfer.load_torch()
        edit = await calls.create(body, deadline_s)
        if with_data and not edit.ended:
            flags = {
                "reset_moments": reset_moments,
                "allow_nonfinite": allow_nonfinite,
                "if_step": if_step,
            }
            await self._uploaded(calls, edit.id, ops, deadline_s, progress, transport, flags)
            if dry_run:
                edit = await calls.preview(edit.id, deadline_s)
                await calls.abort(edit.id)
                return edit
            edit = await calls.commit(edit.id, deadline_s)
        if dry_run:
            return await calls.ended(edit, deadline_s)
        if not wait:
            return edit
        return check_applied(await calls.ended(edit, deadline_s))

    async def _uploaded(
        self,
        calls: EditCalls,
        edit_id: str,
        ops: Sequence[Op],
        deadline_s: float,
        progress: Progress | None,
        transport: Transport,
        flags: Mapping[str, Any],
    ) -> None:
        from paramd.mesh.edits.operands import prepare

        async def attempt(sidecars: Sidecars) -> None:
            index = await self._reach.index(sidecars)
            operands = prepare(index, ops, allow_nonfinite=flags["allow_nonfinite"])
            manifest = manifest_of(edit_id, sidecars, operands, **flags)
            await Uploads(
                sidecars,
                manifest,
                operands,
                transfer=self._transfer,
                transport=transport,
                deadline_s=deadline_s,
                progress=progress,
            ).run()

        try:
            await self._reach.attempts(attempt, deadline_s)
        except BaseException:
            # Nobody will commit it; what was staged is let go of now, not when it expires.
            with suppress(ParamdError):
                await calls.abort(edit_id)
            raise

    async def edits(self, *, state: str | None = None, limit: int = 100) -> Edits:
        """Edits of the job, newest first; `state` chooses one kind."""
        if state is not None and state not in EditState.__members__:
            raise UsageError(f"state: {state!r}; expected one of {', '.join(EditState)}")
        if limit < 1:
            raise UsageError(f"limit: {limit}; expected at least 1")
        return await self._edit_calls().all(state=state, limit=limit)

    async def get_edit(self, edit_id: str, *, wait: bool = False, timeout: Timeout = UNSET) -> Edit:
        """One edit, by its id or the first 8 characters or more of it.

        With `wait` it is returned when it has ended, or as it is at the deadline.
        """
        calls = self._edit_calls()
        edit = await calls.get(edit_id)
        return await calls.ended(edit, self._deadline(timeout)) if wait else edit

    async def abort_edit(self, edit_id: str) -> Edit:
        """Calls an edit off.

        Raises:
            ConflictError: the trainers may have agreed on it already, or it has ended.
        """
        return await self._edit_calls().abort(edit_id)

    async def undo(
        self, edit_id: str, *, force: bool = False, wait: bool = True, timeout: Timeout = UNSET
    ) -> Edit:
        """Undoes an applied edit: what was added is subtracted, all else is put back.

        Optimizer state that it zeroed (`reset_moments`) stays zero; `note` of the answer says so.

        Args:
            edit_id: Its id, or the first 8 characters or more of it.
            force: Also when later edits changed some of the same elements.
            wait, timeout: As in `edit`.

        Returns:
            The edit that undoes it.

        Raises:
            ConflictError: what it needs is no longer kept, or later edits overlap.
        """
        calls = self._edit_calls()
        deadline_s = self._deadline(timeout)
        edit = await calls.undo(edit_id, new_edit_id(), force=force, deadline_s=deadline_s)
        return check_applied(await calls.ended(edit, deadline_s)) if wait else edit

    async def hold_state(self) -> Hold:
        """Whether training waits on request."""
        return await self._edit_calls().hold("GET", "", None, self._deadline(UNSET))

    async def pause(
        self, *, lease_s: float = LEASE_S, renew: bool = True, timeout: Timeout = UNSET
    ) -> Hold:
        """Has all ranks wait at their next common boundary.

        Args:
            lease_s: The hold ends by itself after that many seconds.
            renew: Renew the lease as long as this mesh is open (for 300 s at most).
            timeout: Seconds until all ranks have agreed.

        Raises:
            ConflictError: somebody else holds it. DeadlineError: no boundary came.
        """
        return await self._hold().pause(lease_s, renew=renew, deadline_s=self._deadline(timeout))

    async def step(self, steps: int = 1, *, wait: bool = True, timeout: Timeout = UNSET) -> Hold:
        """Lets held training finish that many updates, after which all ranks wait again.

        Args:
            steps: Updates to finish.
            wait: False returns once all ranks have agreed to it; `hold_state` tells the rest.
            timeout: Seconds until the updates are finished.

        Raises:
            ConflictError: training is not held, or its hold ended before the updates did.
            DeadlineError: they are not finished; training goes on with them, then waits.
        """
        return await self._hold().step(steps, wait=wait, deadline_s=self._deadline(timeout))

    async def resume(self, *, timeout: Timeout = UNSET) -> Hold:
        """Lets held training go on. Idempotent."""
        return await self._hold().resume(deadline_s=self._deadline(timeout))

    @asynccontextmanager
    async def writeback(
        self,
        *patterns: str,
        hold: bool = True,
        mode: str | None = None,
        if_step: bool = False,
        reset_moments: bool = False,
        note: str = "",
        timeout: Timeout = UNSET,
        progress: Progress | None = None,
    ) -> AsyncIterator[Summoned]:
        """Full parameters to be changed; what was changed is written back at the end.

        Args:
            patterns: As in `summon`.
            hold: Training waits meanwhile (300 s at most); when the hold ended before the
                block, nothing is written.
            mode: "replace" overwrites, "delta" adds the difference to what training made
                of it since. None: replace in a hold, else delta.
            if_step: Write only if training has not gone on since; it has, unless it is held.
            reset_moments, note, timeout, progress: As in `edit`.

        Raises:
            ConflictError: not written, on no rank. An exception of the block writes nothing.
        """
        chosen_mode = check_mode(mode, hold=hold)
        if hold:
            await self.pause(timeout=timeout)
        try:
            found = await self.summon(*patterns, timeout=timeout)
            selection = await self._selection(patterns)
            changes = Changes(found, selection, mode=chosen_mode)
            yield found
            ops = changes.ops()
            if ops:
                await self._edit(
                    ops,
                    if_step=found.step if hold or if_step else None,
                    reset_moments=reset_moments,
                    note=note,
                    deadline_s=self._deadline(timeout),
                    progress=progress,
                )
        finally:
            if hold:
                # A hold that ended by itself is no error here: the edit was refused for it.
                with suppress(ConflictError):
                    await self.resume(timeout=timeout)

    async def _selection(self, patterns: Sequence[str]) -> Selection:
        async def attempt(sidecars: Sidecars) -> Selection:
            return select(await self._reach.index(sidecars), patterns)

        return await self._reach.attempts(attempt, time.monotonic() + LEASE_S)

    def _edit_calls(self) -> EditCalls:
        return EditCalls(self._rest, self._reach.document.job)

    def _hold(self) -> Holder:
        if self._holder is None:
            self._holder = Holder(self._edit_calls())
        return self._holder

    async def _stop_holding(self) -> None:
        if self._holder is not None:
            await self._holder.stop_renewing()
