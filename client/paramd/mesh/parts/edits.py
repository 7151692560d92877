"""Changes of the running training: edits, restore points, pauses."""

# `timeout=` as in other clients; it bounds the whole call with its retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from paramd.clock import seconds_of
from paramd.errors import ConflictError, UsageError
from paramd.inside import ELSEWHERE
from paramd.layout.edits.ops import EditTerms, ops_of
from paramd.layout.select import Pattern
from paramd.mesh.edits.calls import (
    Edit,
    EditCalls,
    Edits,
    Holder,
    HyperparameterGroups,
    Mark,
    MarkCalls,
    Marks,
    PauseState,
    check_applied,
)
from paramd.mesh.edits.editing import (
    Changes,
    Progress,
    Sending,
    check_mode,
    lent_room,
    make_edit,
    selected,
)
from paramd.mesh.edits.lending import Lender
from paramd.mesh.loop import UNSET, Timeout
from paramd.mesh.parts.host import MeshHost
from paramd.mesh.parts.reading import ReadingPart
from paramd.mesh.reading.stream import Transport
from paramd.mesh.results import Summoned
from paramd.wire import LEASE_S

if TYPE_CHECKING:
    from paramd.mesh.edits.operands import Operand


class EditsPart(ReadingPart):
    """Edits on all ranks at one step or on none, restore points, pauses, and writing back."""

    def __init__(self, host: MeshHost) -> None:
        super().__init__(host)
        self._edits = EditCalls(host.job_rest)
        self._holder = Holder(self._edits)
        self._marks = MarkCalls(self._edits)
        self._lender = Lender()
        host.memory.callback(self._lender.close)

    async def _closed(self) -> None:
        # First of all: what is paused goes on even if something else cannot be closed.
        await self._holder.close()
        await super()._closed()

    async def edit(
        self,
        *patterns: Pattern,
        fill: float | None = None,
        add: Operand | Mapping[str, Operand] | None = None,
        mul: Operand | Mapping[str, Operand] | None = None,
        set: Operand | Mapping[str, Operand] | None = None,
        lerp: Operand | Mapping[str, Operand] | None = None,
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
        """Edit parameters of the running training, on all ranks at one step or on none.

        Give exactly one of fill, add, mul, set, lerp and clamp.

        Args:
            patterns: Globs over names; each may end in a slice, such as "w[0:4]".
            fill: x = fill.
            add: x = x + weight * add; a number or a tensor.
            mul: x = x * mul; a number or a tensor.
            set: x = set; a tensor, array or list. A number is as `fill`.
            lerp: x = x + weight * (lerp - x).
            weight: Factor of add (1 when None) and of lerp.
            clamp: (min, max); either may be None.
            if_step: Apply at the boundary of this step or not at all. Pause training first
                (`pause`), or it passes that step before all ranks have agreed.
            reset_moments: Also zero the optimizer's state of the edited elements.
            allow_nonfinite: Allow NaN and infinities (admins only).
            dry_run: Change nothing; `before` and `after` show the edit's effect.
            note: Reason, for the log.
            wait: False returns once the edit is committed; see `get_edit`.
            progress: Called with bytes sent and total bytes while operands are uploaded.
            transport: For operands: "grpc" for streams; "auto" and "same-host" use shared
                memory where sidecars run on this host.

        A tensor operand must have the shape of the only region that its pattern matches, and is
        converted to the parameter's dtype; a mapping gives one tensor per name.

        Returns:
            The edit, APPLIED at `step`; in its current state with dry_run or without wait.

        Raises:
            UsageError: the arguments contradict each other, or an operand does not fit.
            NotFoundError: a pattern matches nothing. DeniedError: the role does not suffice.
            ConflictError: the edit was applied on no rank; the message says why.
            DeadlineError: the outcome is not known yet; the message has the edit's id.
        """
        if wait and not dry_run:
            self._edits.check_outside("edit")
        given = {"add": add, "mul": mul, "set": set, "lerp": lerp}
        operands = {word: await self._operand(one) for word, one in given.items()}
        ops = ops_of(patterns, fill=fill, weight=weight, clamp=clamp, **operands)
        terms = EditTerms(
            if_step=if_step,
            reset_moments=reset_moments,
            allow_nonfinite=allow_nonfinite,
            dry_run=dry_run,
            note=note,
        )
        sending = Sending(
            lender=self._lender,
            transport=transport,
            progress=progress,
            deadline_s=self._host.deadline(timeout),
        )
        return await make_edit(
            self._edits, self._host.reach, self._host.transfer, ops, terms, sending, wait=wait
        )

    async def edits(self, *, state: str | None = None, limit: int = 100) -> Edits:
        """Edits of the job, newest first; optionally only those in `state`."""
        return await self._edits.all(state=state, limit=limit)

    async def _operand(self, given: Any) -> Any:
        """An operand, or a mapping of them, with tensors for arrays and lists."""
        if isinstance(given, Mapping):
            return {name: await self._operand(one) for name, one in given.items()}
        if hasattr(given, "data_ptr") or not (
            isinstance(given, list | tuple) or hasattr(given, "__array__")
        ):
            return given
        await self._host.transfer.load_torch()
        from paramd.mesh.edits.operands import tensor_of

        return tensor_of(given)

    async def get_edit(self, edit_id: str, *, wait: bool = False, timeout: Timeout = UNSET) -> Edit:
        """One edit, by its id or its first characters, as `repr` and lists show them.

        With `wait`, returns once the edit has ended, or at the deadline.
        """
        edit = await self._edits.get(edit_id)
        return await self._edits.ended(edit, self._host.deadline(timeout)) if wait else edit

    async def abort_edit(self, edit_id: str) -> Edit:
        """Abort an edit.

        Raises:
            ConflictError: it has ended, or the trainers may already have agreed to it.
        """
        return await self._edits.abort(edit_id)

    async def undo(
        self,
        edit_id: str | Edit = "last",
        *,
        force: bool = False,
        dry_run: bool = False,
        wait: bool = True,
        timeout: Timeout = UNSET,
    ) -> Edit:
        """Undo an applied edit: subtract what was added, restore everything else.

        Optimizer state that it zeroed (`reset_moments`) stays zero; the result's `note` says so.

        Args:
            edit_id: The edit, its id, or the first characters of that; "last", the default, for
                the one in effect that was applied last, of those made with this token.
            force: Undo even if later edits changed some of the same elements.
            dry_run: Change nothing; `before` and `after` show the undo's effect.
            wait, timeout: As in `edit`.

        Returns:
            The edit that undoes it.

        Raises:
            ConflictError: its pre-images are gone, later edits overlap, or there is no "last".
        """
        deadline_s = self._host.deadline(timeout)
        if not isinstance(edit_id, str | Edit):
            raise UsageError(
                f"edit_id: {type(edit_id).__name__}; expected an edit, such as a row of "
                "mesh.edits(), or its id"
            )
        edit_id = edit_id if isinstance(edit_id, str) else edit_id.id
        if wait and not dry_run:
            self._edits.check_outside("undo")
        if edit_id == "last":
            own = str((await self._host.rest.send("GET", "/session"))["name"])
            edit_id = await self._edits.last_of(own)
        edit = await self._edits.undo(edit_id, force=force, dry_run=dry_run, deadline_s=deadline_s)
        if not wait:
            return edit
        ended = await self._edits.ended(edit, deadline_s)
        return ended if ended.was_tried else check_applied(ended)

    async def set_hyperparameters(
        self,
        /,
        group: str | int = "group 0",
        *,
        note: str = "",
        wait: bool = True,
        timeout: Timeout = UNSET,
        **values: float | Sequence[float],
    ) -> Edit:
        """Set hyper-parameters of a parameter group on all ranks at one step, or on none.

            mesh.set_hyperparameters("group 0", lr=1e-4, betas=(0.9, 0.98))

        A scheduler overwrites `lr` at its next step; the result's `warning` says so. `undo`
        restores the previous values.

        Args:
            group: N, "group N", or "optimizer M group N" of several optimizers given to attach.
            note: Reason, for the log.
            wait, timeout: As in `edit`.
            values: By name, as in `param_groups`: numbers, or tuples of numbers. Switches such as
                `amsgrad` cannot be set.

        Raises:
            UsageError: no group or no value.
            ConflictError: there is no such group or name, or it cannot have that value; applied on
                no rank.
        """
        deadline_s = self._host.deadline(timeout)
        if not values:
            raise UsageError("set_hyperparameters: expected at least one value, such as lr=1e-4")
        if wait:
            self._edits.check_outside("set_hyperparameters", "Set them in optimizer.param_groups")
        edit = await self._marks.change(group, values, note, deadline_s)
        return check_applied(await self._edits.ended(edit, deadline_s)) if wait else edit

    async def hyperparameters(self) -> HyperparameterGroups:
        """The learning rate and the other hyper-parameters of every parameter group, as rank 0 has
        them now.

            mesh.hyperparameters()[0]["lr"]

        Raises:
            ConflictError: rank 0 cannot report them.
        """
        return await self._marks.groups(self._host.deadline(UNSET))

    async def mark(self, name: str, *, timeout: Timeout = UNSET) -> Mark:
        """Make a restore point: keep the complete state of all ranks' next common boundary.

        Parameters, buffers, optimizer state and everything in `extra_state`, to go back to with
        `rollback`. It is in the memory of the sidecars and ends with them; it is not a checkpoint.
        Training is paused while it is copied. Needs `attach(..., resume="auto")`.

        Args:
            name: 1 to 64 printable characters, not only digits, without "/" and without a dot at
                the beginning.
            timeout: Seconds to wait for the boundary and the copies.

        Raises:
            ExistsError: the name is taken. ExhaustedError: no memory for it on a rank.
            ConflictError: the training keeps no states, or another client has paused it.
        """
        return await self._marks.make(name, self._host.deadline(timeout))

    async def marks(self) -> Marks:
        """The states that training can return to: restore points and standing snapshots."""
        return await self._marks.all(self._host.deadline(UNSET))

    async def unmark(self, name: str | Mark) -> None:
        """Delete a restore point and free its memory. Idempotent."""
        await self._marks.drop(
            name.name if isinstance(name, Mark) else name, self._host.deadline(UNSET)
        )

    async def rollback(
        self, to: str | int | Mark, *, note: str = "", wait: bool = True, timeout: Timeout = UNSET
    ) -> Edit:
        """Return training to a restore point or a kept step, on all ranks or on none.

        Parameters, buffers, optimizer state, hyper-parameters, random states and everything in
        `extra_state` get their earlier values, and training computes the same bits from there. The
        steps made since are discarded, until `undo` of the result restores them. The script has to
        be in a block of `attachment.rollback_scope()`.

        Args:
            to: A restore point, its name, or a step of `marks`.
            note: Reason, for the log.
            wait, timeout: As in `edit`.

        Returns:
            The edit; its `step` is the one before the rollback.

        Raises:
            NotFoundError: there is no such state.
            ConflictError: not all ranks have it, or the training cannot be put back; applied on no
                rank.
        """
        deadline_s = self._host.deadline(timeout)
        if wait:
            self._edits.check_outside("rollback", ELSEWHERE)
        at = to.state if isinstance(to, Mark) else to
        edit = await self._marks.roll_back(at, note, deadline_s)
        return check_applied(await self._edits.ended(edit, deadline_s)) if wait else edit

    async def pause_state(self) -> PauseState:
        """Whether training is paused, by whom and for how long."""
        return await self._edits.pause("GET", "", None, self._host.deadline(UNSET))

    async def pause(
        self, *, lease: float | str = LEASE_S, renew: bool = True, timeout: Timeout = UNSET
    ) -> PauseState:
        """Pause training on all ranks at their next common boundary.

            with mesh.pause():  # a `Mesh`; training resumes at the end of the block
                print(mesh.stats("*"))

        Args:
            lease: The pause ends on its own after this many seconds, or a text such as "5m".
            renew: Renew the lease while this mesh is open, for at most 300 s in total.
            timeout: Seconds to wait for all ranks to agree, an hour at most; None means an hour.

        Raises:
            ConflictError: another client has paused it. DeadlineError: no boundary was reached.
        """
        lease_s = seconds_of(lease, "lease")
        return await self._holder.pause(
            lease_s, renew=renew, deadline_s=self._host.deadline(timeout)
        )

    async def step(
        self, steps: int = 1, *, wait: bool = True, timeout: Timeout = UNSET
    ) -> PauseState:
        """Let paused training run `steps` updates, then pause it again on all ranks.

        Args:
            steps: Number of updates.
            wait: False returns once all ranks have agreed; poll `pause_state` for the rest.
            timeout: Seconds to wait for the updates.

        Raises:
            ConflictError: training is not paused, or the pause ended before the updates did.
            DeadlineError: updates are left; training finishes them, then pauses.
        """
        return await self._holder.step(steps, wait=wait, deadline_s=self._host.deadline(timeout))

    async def resume(self, *, timeout: Timeout = UNSET) -> PauseState:
        """End the pause; training continues. Idempotent."""
        return await self._holder.resume(deadline_s=self._host.deadline(timeout))

    @asynccontextmanager
    async def writeback(
        self,
        *patterns: Pattern,
        pause: bool = True,
        mode: str | None = None,
        if_step: bool = False,
        reset_moments: bool = False,
        note: str = "",
        timeout: Timeout = UNSET,
        progress: Progress | None = None,
    ) -> AsyncIterator[Summoned]:
        """Full parameters to change in place; changes are written back when the block ends.

        An exception in the block writes nothing.

        Args:
            patterns: As in `summon`.
            pause: Pause training for the block (at most 300 s). If the pause ends before the
                block does, nothing is written.
            mode: "replace" overwrites; "delta" adds the difference to the then current values.
                None means replace with a pause, delta without.
            if_step: Write only if training has not advanced since; implied by `pause`.
            reset_moments, note, timeout, progress: As in `edit`.

        Raises:
            ConflictError: nothing was written, on any rank.
        """
        chosen_mode = check_mode(mode, pause=pause)
        self._edits.check_outside("writeback")
        if pause:
            await self.pause(timeout=timeout)
        try:
            await self._host.transfer.load_torch()
            selection = await selected(self._host.reach, patterns)
            run = self._host.transfer.run
            # Sidecars of this host copy the written tensors from their memory.
            room = await run(lambda: lent_room(self._lender, self._host.reach, selection))
            into = room if chosen_mode == "replace" else None
            found = await self.summon(*patterns, into=into, timeout=timeout)
            changes = await run(lambda: Changes(found, selection, mode=chosen_mode, room=room))
            yield found
            if ops := await run(changes.ops):
                terms = EditTerms(
                    if_step=found.step if pause or if_step else None,
                    reset_moments=reset_moments,
                    note=note,
                )
                sending = Sending(
                    lender=self._lender, progress=progress, deadline_s=self._host.deadline(timeout)
                )
                await make_edit(
                    self._edits, self._host.reach, self._host.transfer, ops, terms, sending
                )
        finally:
            if pause:
                # Not an error if the pause has expired: the edit was already refused for it.
                with suppress(ConflictError):
                    await self.resume(timeout=timeout)
