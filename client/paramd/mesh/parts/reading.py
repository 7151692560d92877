"""Reading parameters: whole tensors, views of shards, optimizer state."""

# `timeout=` as in other clients; it bounds the whole call with its retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from paramd.errors import UsageError
from paramd.layout.select import Pattern, SelectedTensor, select
from paramd.layout.types import Layout
from paramd.mesh.exports.pins import OptimizerRead, read_states
from paramd.mesh.loop import UNSET, Timeout
from paramd.mesh.parts.host import MeshHost, MeshPart
from paramd.mesh.peers.grpc import all_ended
from paramd.mesh.peers.sidecars import Pinned, Sidecars
from paramd.mesh.reading.pin import choose, compared, pinned, samples_for
from paramd.mesh.reading.stream import Landed, Reading, Transport
from paramd.mesh.reading.transfer import check_transport
from paramd.mesh.results import MeshStatus, OptimizerState, Summoned, mesh_status
from paramd.state import StateName

if TYPE_CHECKING:
    import torch

    from paramd.mesh.reading.assemble import SnapshotView


class ReadingPart(MeshPart):
    """Full tensors of one step, read while training continues."""

    def __init__(self, host: MeshHost) -> None:
        super().__init__(host)
        self._views: set[AsyncExitStack] = set()

    async def _closed(self) -> None:
        while self._views:
            await self._views.pop().aclose()
        await super()._closed()

    async def read_layout(self) -> Layout:
        """All tensors and their pieces in the current run."""

        async def attempt(sidecars: Sidecars) -> Layout:
            return (await self._host.reach.index(sidecars)).layout

        return await self._host.reach.attempts(attempt, self._host.deadline(UNSET))

    async def status(self, *, timeout: Timeout = UNSET) -> MeshStatus:
        """Current state of every rank; the row of an unreachable rank says why."""
        deadline_s = self._host.deadline(timeout)

        async def attempt(sidecars: Sidecars) -> MeshStatus:
            return await mesh_status(sidecars, deadline_s)

        await self._host.reach.refresh()
        return await self._host.reach.attempts(attempt, deadline_s)

    async def find_one(self, name: str) -> SelectedTensor:
        """The parameter or buffer of this name, or the slice of one ("w[0:4]").

        Raises:
            NotFoundError: there is none; the message suggests similar names.
            UsageError: it is a pattern that matches several.
        """

        async def attempt(sidecars: Sidecars) -> Sequence[SelectedTensor]:
            return select(await self._host.reach.index(sidecars), name, with_buffers=True)

        found = await self._host.reach.attempts(attempt, self._host.deadline(UNSET))
        if len(found) != 1:
            raise UsageError(
                f"{name!r} matches {len(found):,} tensors; expected the name of one. All of them: "
                f"mesh.summon({name!r})"
            )
        return found[0]

    async def summon(
        self,
        *patterns: Pattern,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
        buffers: bool = False,
        unsettled: bool = False,
        optimizer: bool = False,
        replica: int | None = None,
        timeout: Timeout = UNSET,
        transport: Transport = "auto",
        progress: Callable[[int, int], object] | None = None,
    ) -> Summoned:
        """Full tensors by name, all at one step, without stopping training.

        Args:
            patterns: Globs over names, one by one or in lists; each may end in a slice, such as
                "w[0:4]".
            dtype: Dtype of the results or its name, "bfloat16"; None keeps each tensor's own.
            device: Device of the results; None means CPU.
            into: Tensors to fill, by name; shape and dtype must match. Reusing memory is faster
                than allocating. Contents are undefined after an error.
            buffers: Match buffers too; reading them requires training to progress.
            unsettled: Accept parameters that were changed after the last update while training
                has not continued, such as averaged weights swapped in for an evaluation.
                Where the training marks them (`attachment.swapped_weights`), the result's
                `label` names them. Otherwise the call waits for a settled state until
                its deadline, or is refused with that label.
            optimizer: Also read the optimizer's state of the same step: the result's `optimizer`,
                see `AsyncMesh.optimizer`. Not with `unsettled`.
            replica: A rank, where ranks hold the same tensors (or should: buffers and local SGD
                need not be equal): everything is read from its replica. None: rank 0's, or the
                first whose ranks all respond; the result's `replica` is that rank, and
                its `replicas_differ` lists tensors that differ on other ranks at that step.
            transport: "same-host" for shared memory, "stream" for bulk streams over TCP, "grpc"
                for gRPC alone. "auto" takes the first of these that works for each rank; `lanes`
                shows which.
            progress: Called with bytes read and total bytes of the tensors, by a thread that
                copies, after each part. A read that an update overtakes starts again.

        Returns:
            A dict from every matching name to its tensor, with `step` and `incarnation`.

        Raises:
            UsageError: an argument is wrong. NotFoundError: a pattern matches nothing.
            UnreachableError: a needed rank does not respond; detected within 5 s.
            ConflictError: a needed rank is torn or has no trainer, or other weights replace
                the training's (`attachment.swapped_weights`).
            ExhaustedError: the request exceeds the sidecars' snapshot budget, or what their host
                may take from the training. CapacityError: this process has too little memory for
                the result, beside what it has already.
            DeadlineError: no common step, or not all bytes, in time.
        """
        check_transport(transport)
        if not patterns:
            raise UsageError("no pattern was given; expected at least one, '*' summons all")
        deadline_s = self._host.deadline(timeout)
        await self._host.transfer.load_torch()
        began_s = time.monotonic()

        if optimizer and unsettled:
            raise UsageError("optimizer: cannot be combined with unsettled=True; give one of them")

        landed = Landed(progress)

        async def attempt(sidecars: Sidecars) -> Summoned:
            chosen = await choose(
                self._host.reach, sidecars, patterns, buffers=buffers, replica=replica
            )
            targets = self._host.transfer.targets(chosen, dtype=dtype, device=device, into=into)
            landed.begin(chosen.plan.size_bytes)
            state: StateName | None = None
            rests = False
            moments: OptimizerState | None = None
            differ: tuple[str, ...] | None = None
            samples = samples_for(self._host.reach, sidecars, chosen.tensors)
            if optimizer:
                read = OptimizerRead(
                    self._host.reach, sidecars, chosen, device, transport, deadline_s
                )
                held, moments = await read_states(read, self._host.transfer, targets)
                state, rests = held.state, held.unsettled
            elif not unsettled:
                live = await self._host.transfer.read_live(
                    sidecars,
                    chosen,
                    targets,
                    transport,
                    samples,
                    self._host.reach.leave_out,
                    landed,
                    deadline_s,
                )
                if (live is None or live[1] is None) and self._host.reach.costs():
                    # Without the ranks that were just found not to respond.
                    samples = samples_for(self._host.reach, sidecars, chosen.tensors)
                if live is not None:
                    state, differ = live
                    if differ is None:
                        differ = await compared(
                            self._host.reach, sidecars, Pinned(state, {}), samples
                        )
            if state is None:
                async with pinned(
                    self._host.reach,
                    sidecars,
                    chosen,
                    deadline_s,
                    unsettled=unsettled,
                    samples=samples,
                ) as pins:
                    landed.begin(chosen.plan.size_bytes)
                    reading = Reading(sidecars, pins, deadline_s, transport, landed)
                    copying = self._host.transfer.read(reading, chosen.plan, targets)
                    comparing = compared(self._host.reach, sidecars, pins, samples)
                    differ, _ = await all_ended([comparing, copying])
                state, rests = pins.state, pins.unsettled
            if not differ and self._host.reach.costs():
                differ = None  # nothing is known of ranks that lately did not respond
            return Summoned(
                targets.results(),
                job=sidecars.document.job,
                incarnation=state.incarnation,
                step=state.step,
                edits=state.edits,
                history=state.history,
                unsettled=rests,
                label=state.label,
                seconds=time.monotonic() - began_s,
                bytes=chosen.plan.size_bytes,
                replica=chosen.plan.replica,
                replicas_differ=differ,
                optimizer=moments,
            )

        return await self._host.reach.attempts(attempt, deadline_s)

    async def state_dict(self, *patterns: Pattern) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, all at one step, for `load_state_dict`. As `summon`."""
        return (await self.summon(*(patterns or "*"), buffers=True)).state_dict()

    async def optimizer(
        self,
        *patterns: Pattern,
        device: torch.device | str | None = None,
        timeout: Timeout = UNSET,
        transport: Transport = "auto",
    ) -> OptimizerState:
        """The optimizer's state of parameters, whole and all of one step.

        Read from memory that trainers and sidecars share while training continues, also when it
        hangs or its trainers have died. Where parameters are mirrored, or in partitions, the
        trainers copy it at an agreed boundary, and wait for that copy.

        Args:
            patterns: Globs over names, as in `summon`; none means all parameters.
            device: Device of the results; None means CPU.
            transport: As in `summon`.

        Returns:
            A dict from every matching name to its state by kind, with `step` and `groups`.

        Raises:
            ConflictError: a rank cannot provide its state: some of it does not have its
                parameter's shape and item size, say, or another reader has it right now.
            ParamdError: as `summon`.
        """
        check_transport(transport)
        deadline_s = self._host.deadline(timeout)
        await self._host.transfer.load_torch()

        async def attempt(sidecars: Sidecars) -> OptimizerState:
            chosen = await choose(self._host.reach, sidecars, patterns or ("*",), buffers=False)
            read = OptimizerRead(self._host.reach, sidecars, chosen, device, transport, deadline_s)
            return (await read_states(read, self._host.transfer, None))[1]

        return await self._host.reach.attempts(attempt, deadline_s)

    @asynccontextmanager
    async def view(
        self, *patterns: Pattern, buffers: bool = False, timeout: Timeout = UNSET
    ) -> AsyncIterator[SnapshotView]:
        """Zero-copy view of the shards of one step in the sidecars' memory; same host only.

        Tensors taken from the view stay valid after it ends.

        Raises: as `summon`.
        """
        if not patterns:
            raise UsageError("no pattern was given; expected at least one, '*' views all")
        deadline_s = self._host.deadline(timeout)
        await self._host.transfer.load_torch()

        async def attempt(sidecars: Sidecars) -> tuple[SnapshotView, AsyncExitStack]:
            async with AsyncExitStack() as stack:
                chosen = await choose(self._host.reach, sidecars, patterns, buffers=buffers)
                pins = await stack.enter_async_context(
                    pinned(self._host.reach, sidecars, chosen, deadline_s)
                )
                reading = Reading(sidecars, pins, deadline_s)
                return await self._host.transfer.view(reading, chosen, stack), stack.pop_all()

        found, stack = await self._host.reach.attempts(attempt, deadline_s)
        # Drop the shards before releasing the memory, or the sidecar cannot reuse it.
        stack.callback(found.drop)
        self._views.add(stack)
        try:
            yield found
        finally:
            self._views.discard(stack)
            await stack.aclose()
