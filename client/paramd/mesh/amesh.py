"""AsyncMesh: a running job's parameters, for asyncio programs."""

# `timeout=` is what users of every other client write; it bounds retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paramd.errors import ConflictError, UsageError
from paramd.layout.edits.ops import ops_of
from paramd.layout.exports.settings import NameMap
from paramd.layout.plan import ReadPlan
from paramd.layout.select import select
from paramd.layout.types import Layout
from paramd.mesh.edits.calls import Edit, EditCalls, Edits, EditTerms, Hold, Holder, check_applied
from paramd.mesh.edits.editing import Sending, changes_of, check_mode, make_edit
from paramd.mesh.edits.upload import Progress
from paramd.mesh.exports.calls import AsyncExport, ExportCalls, ExportInfo, export_body
from paramd.mesh.exports.calls import Progress as ExportProgress
from paramd.mesh.exports.download import Content, Download, Downloaded, PartialFile
from paramd.mesh.exports.restoring import ExportFiles
from paramd.mesh.frames.follow import FollowRequest, open_following
from paramd.mesh.frames.frames import GradFrame, Kind, ParamFrame
from paramd.mesh.frames.grads import GradRequest, open_stream
from paramd.mesh.frames.stepping import StepStream, frames_of
from paramd.mesh.loop import DEFAULT_TIMEOUT_S, UNSET, Timeout, deadline
from paramd.mesh.peers.control import Find, RestClient
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.sidecars import Pinned, Sidecars
from paramd.mesh.reading.pin import choose, pinned, while_pinned
from paramd.mesh.reading.stream import keep_freed_memory
from paramd.mesh.reading.summary import compute_stats
from paramd.mesh.reading.transfer import Transfer, Transport, check_transport
from paramd.mesh.results import MeshStatus, ParamInfo, Params, StatsTable, Summoned, mesh_status
from paramd.security.tls import ClientTls
from paramd.wire import LEASE_S

if TYPE_CHECKING:
    import torch

    from paramd.mesh.reading.assemble import SnapshotView


class AsyncMesh:
    """A running job, read from outside. Use as `async with`, or call `close`.

    Everything it answers belongs to one (incarnation, step). Methods may run concurrently. A
    cancelled call releases what it pinned and leaves no task behind after `close`.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        job: str | None = None,
        timeout_s: float | None = None,
        tls: ClientTls | None = None,
        find: Find | None = None,
    ) -> None:
        """No I/O. `paramd.aio.connect` finds url and token.

        Args:
            url: The control plane's, for example "http://127.0.0.1:8470".
            token: Its token.
            job: Name of the job; may be left out when the control plane serves one.
            timeout_s: Default time for one call, in seconds; None means 60.
            tls: Whom to trust when the url is https; None takes it from the environment.
            find: Says url and token anew, for a job whose next incarnation is elsewhere.
        """
        self._timeout_s = timeout_s if timeout_s is not None else DEFAULT_TIMEOUT_S
        if self._timeout_s <= 0:
            raise UsageError(f"timeout_s: {timeout_s}; expected more than 0")
        self._rest = RestClient(url, token, tls=tls, find=find)
        self._reach = SidecarFinder(self._rest, job, tls=tls)
        self._transfer = Transfer()
        self._edits = EditCalls(self._rest, self._reach)
        self._holder = Holder(self._edits)
        self._exports = ExportCalls(self._rest, self._reach)
        self._views: set[AsyncExitStack] = set()
        self._streams: set[StepStream[Any, Any]] = set()

    async def __aenter__(self) -> AsyncMesh:
        # Before gRPC makes its threads: the limit of arenas holds for new ones only.
        keep_freed_memory()
        try:
            await self._reach.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Releases everything: open views, leases, connections, threads. Idempotent."""
        await self._holder.stop_renewing()
        while self._streams:
            await self._streams.pop().close()
        while self._views:
            await self._views.pop().aclose()
        await self._reach.close()
        self._transfer.close()

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._reach.document.job

    @property
    def incarnation(self) -> int:
        """Incarnation of the job, as last heard."""
        return self._reach.document.incarnation

    async def read_layout(self) -> Layout:
        """All tensors and their pieces in the present incarnation.

        Raises:
            UnreachableError: no sidecar answers.
        """

        async def attempt(sidecars: Sidecars) -> Layout:
            return (await self._reach.index(sidecars)).layout

        return await self._reach.attempts(attempt, self._deadline(UNSET))

    async def status(self, *, timeout: Timeout = UNSET) -> MeshStatus:
        """Every rank's state now; a rank that does not answer says so in its row."""
        deadline_s = self._deadline(timeout)

        async def attempt(sidecars: Sidecars) -> MeshStatus:
            return await mesh_status(sidecars, deadline_s)

        await self._reach.refresh()
        return await self._reach.attempts(attempt, deadline_s)

    async def params(
        self, *patterns: str, buffers: bool = False, timeout: Timeout = UNSET
    ) -> Params:
        """The parameters that match any pattern (all, when none is given).

        Raises:
            NotFoundError: a pattern matches nothing; the text offers similar names.
        """

        async def attempt(sidecars: Sidecars) -> Params:
            index = await self._reach.index(sidecars)
            chosen = select(index, patterns or ("*",), with_buffers=buffers)
            return Params(ParamInfo.of(item.tensor) for item in chosen)

        return await self._reach.attempts(attempt, self._deadline(timeout))

    async def stats(
        self,
        *patterns: str,
        buffers: bool = False,
        histogram: bool = False,
        unsettled: bool = False,
        timeout: Timeout = UNSET,
    ) -> StatsTable:
        """Statistics of full tensors, computed where they lie; every element counts once.

        Args:
            patterns: Globs over names, as in `summon`; all parameters when none is given.
            buffers: Whether buffers may match.
            histogram: Count binary exponents too, several times the cost of all the rest.
            unsettled: As in `summon`.
            timeout: Seconds; None waits for as long as it takes.

        Raises: as `summon`.
        """

        def reduce(
            sidecars: Sidecars, plan: ReadPlan, pinned: Pinned, deadline_s: float
        ) -> Awaitable[StatsTable]:
            return compute_stats(sidecars, plan, pinned, deadline_s, with_exponents=histogram)

        return await while_pinned(
            self._reach,
            patterns or ("*",),
            reduce,
            self._deadline(timeout),
            buffers=buffers,
            unsettled=unsettled,
        )

    async def summon(
        self,
        *patterns: str,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
        buffers: bool = False,
        unsettled: bool = False,
        timeout: Timeout = UNSET,
        transport: Transport = "auto",
    ) -> Summoned:
        """Full tensors by name, all at one step. Training goes on meanwhile.

        Args:
            patterns: Globs over names; each may end in a slice, such as "w[0:4]".
            dtype: Dtype of the results; None keeps each tensor's own.
            device: Device of the results; None means CPU.
            into: Tensors to fill, by name; the shape and dtype must fit. Reused memory is
                faster than fresh memory. Undefined content when an error is raised.
            buffers: Whether buffers may match; reading them needs training to go on.
            unsettled: Take parameters that were changed after their last update while training
                has not gone on, too: averaged weights swapped in for an evaluation, say.
                Otherwise such are waited for, and refused in the end.
            timeout: Seconds; None waits for as long as it takes.
            transport: "grpc" for streams, "same-host" for shared memory, "auto" chooses
                for each rank.

        Returns:
            A dict from every name that matched to its tensor, with `step` and `incarnation`.

        Raises:
            UsageError: an argument is wrong. NotFoundError: a pattern matches nothing.
            UnreachableError: a needed rank does not answer; known within 5 s.
            ConflictError: a needed rank is torn or has no trainer.
            ExhaustedError: more than the sidecars' snapshot budget was asked for.
            DeadlineError: no common step, or not all bytes, in time.
        """
        check_transport(transport)
        if not patterns:
            raise UsageError("no pattern was given; expected at least one, '*' summons all")
        deadline_s = self._deadline(timeout)
        await self._transfer.load_torch()
        began_s = time.monotonic()

        async def attempt(sidecars: Sidecars) -> Summoned:
            chosen = await choose(self._reach, sidecars, patterns, buffers=buffers)
            targets = self._transfer.targets(chosen, dtype=dtype, device=device, into=into)
            async with pinned(
                self._reach, sidecars, chosen, deadline_s, unsettled=unsettled
            ) as pins:
                await self._transfer.read(
                    sidecars, chosen.plan, pins, targets, transport, deadline_s
                )
            return Summoned(
                targets.results(),
                job=sidecars.document.job,
                incarnation=pins.incarnation,
                step=pins.step,
                edits=pins.edits,
                unsettled=pins.unsettled,
                seconds=time.monotonic() - began_s,
                bytes=chosen.plan.size_bytes,
            )

        return await self._reach.attempts(attempt, deadline_s)

    @asynccontextmanager
    async def view(
        self, *patterns: str, buffers: bool = False, timeout: Timeout = UNSET
    ) -> AsyncIterator[SnapshotView]:
        """Shards of one step on the sidecars' own memory, without a copy; same host only.

        Tensors taken from the view stay right after it has ended.

        Raises: as `summon`.
        """
        if not patterns:
            raise UsageError("no pattern was given; expected at least one, '*' views all")
        deadline_s = self._deadline(timeout)
        await self._transfer.load_torch()

        async def attempt(sidecars: Sidecars) -> tuple[SnapshotView, AsyncExitStack]:
            async with AsyncExitStack() as stack:
                chosen = await choose(self._reach, sidecars, patterns, buffers=buffers)
                pins = await stack.enter_async_context(
                    pinned(self._reach, sidecars, chosen, deadline_s)
                )
                found = await self._transfer.view(sidecars, chosen, pins, stack)
                return found, stack.pop_all()

        found, stack = await self._reach.attempts(attempt, deadline_s)
        # The shards go before the memory is let go of, else it could not be used again.
        stack.callback(found.drop)
        self._views.add(stack)
        try:
            yield found
        finally:
            self._views.discard(stack)
            await stack.aclose()

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
        terms = EditTerms(
            if_step=if_step,
            reset_moments=reset_moments,
            allow_nonfinite=allow_nonfinite,
            dry_run=dry_run,
            note=note,
        )
        sending = Sending(
            transport=transport, progress=progress, deadline_s=self._deadline(timeout)
        )
        return await make_edit(
            self._edits, self._reach, self._transfer, ops, terms, sending, wait=wait
        )

    async def edits(self, *, state: str | None = None, limit: int = 100) -> Edits:
        """Edits of the job, newest first; `state` chooses one kind."""
        return await self._edits.all(state=state, limit=limit)

    async def get_edit(self, edit_id: str, *, wait: bool = False, timeout: Timeout = UNSET) -> Edit:
        """One edit, by its id or the first 8 characters or more of it.

        With `wait` it is returned when it has ended, or as it is at the deadline.
        """
        edit = await self._edits.get(edit_id)
        return await self._edits.ended(edit, self._deadline(timeout)) if wait else edit

    async def abort_edit(self, edit_id: str) -> Edit:
        """Calls an edit off.

        Raises:
            ConflictError: the trainers may have agreed on it already, or it has ended.
        """
        return await self._edits.abort(edit_id)

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
        deadline_s = self._deadline(timeout)
        edit = await self._edits.undo(edit_id, force=force, deadline_s=deadline_s)
        return check_applied(await self._edits.ended(edit, deadline_s)) if wait else edit

    async def hold_state(self) -> Hold:
        """Whether training waits on request."""
        return await self._edits.hold("GET", "", None, self._deadline(UNSET))

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
        return await self._holder.pause(lease_s, renew=renew, deadline_s=self._deadline(timeout))

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
        return await self._holder.step(steps, wait=wait, deadline_s=self._deadline(timeout))

    async def resume(self, *, timeout: Timeout = UNSET) -> Hold:
        """Lets held training go on. Idempotent."""
        return await self._holder.resume(deadline_s=self._deadline(timeout))

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
            changes = await changes_of(self._reach, patterns, found, mode=chosen_mode)
            yield found
            if ops := changes.ops():
                terms = EditTerms(
                    if_step=found.step if hold or if_step else None,
                    reset_moments=reset_moments,
                    note=note,
                )
                sending = Sending(progress=progress, deadline_s=self._deadline(timeout))
                await make_edit(self._edits, self._reach, self._transfer, ops, terms, sending)
        finally:
            if hold:
                # A hold that ended by itself is no error here: the edit was refused for it.
                with suppress(ConflictError):
                    await self.resume(timeout=timeout)

    async def grads(
        self,
        *patterns: str,
        every: int = 1,
        kind: Kind = "full",
        dtype: torch.dtype | None = None,
        rows: int | None = None,
        lossless: bool = False,
        transport: Transport = "auto",
    ) -> AsyncIterator[GradFrame[Any]]:
        """Gradients, frame by frame, as the optimizer's update consumes them; endless.

        Each frame is whole and of one update, on all ranks. Training never waits: what a slow
        reader did not ask for is dropped and counted, and it is given the newest there is.

        Args:
            patterns: Globs over parameters' names; each may end in a slice.
            every: Updates between two frames; those of its multiples come.
            kind: "full" for whole gradients; "stats" for numbers made where gradients lie (norm,
                mean, std, min, max, zeros, NaN, Inf); "histogram" adds counts of exponents.
            dtype: Dtype of whole gradients; None means each parameter's own.
            rows: Take that many rows of each first dim, evenly spread; None takes all.
            lossless: Miss no frame, where the trainer's operator allows it: then its updates
                wait for this reader, each for a bounded time (PARAMD_LOSSLESS_BUDGET_MS).
            transport: As in `summon`.

        Yields:
            `frame.step` is the number of the update; `frame[name]` a tensor or a `Summary`,
            None where there is no gradient. The iterator ends when the training detaches.

        Raises:
            UsageError, NotFoundError: as `summon`.
            ConflictError: the job attached anew (subscribe again), a trainer ended.
            UnreachableError: a rank did not answer for 20 s.
        """
        check_transport(transport)
        wanted = GradRequest(
            patterns=patterns,
            every=every,
            kind=kind,
            dtype=dtype,
            rows=rows,
            lossless=lossless,
            transport=transport,
        )
        stream = await open_stream(self._reach, self._transfer, wanted)
        async with frames_of(stream, self._streams) as frames:
            async for frame in frames:
                yield frame

    async def follow(
        self,
        *patterns: str,
        every: int = 1,
        dtype: torch.dtype | None = None,
        transport: Transport = "auto",
    ) -> AsyncIterator[ParamFrame]:
        """Parameters after updates that are multiples of `every`, frame by frame; endless.

        Only tensors whose bytes changed since the last frame are read; the others are the
        last frame's own. Args, Yields, Raises: as `grads`.
        """
        check_transport(transport)
        wanted = FollowRequest(patterns=patterns, every=every, dtype=dtype, transport=transport)
        stream = await open_following(self._reach, self._transfer, wanted)
        async with frames_of(stream, self._streams) as frames:
            async for frame in frames:
                yield frame

    async def export(
        self,
        destination: str,
        *,
        format: str = "safetensors",
        max_shard_size: str | int | None = None,
        dtype: str | None = None,
        include: Sequence[str] = ("parameters", "buffers"),
        tied: str = "drop",
        overwrite: bool = False,
        name_map: Mapping[str, str] | None = None,
        assets: str | Path | None = None,
        verify: bool = True,
        timeout_s: float | None = None,
    ) -> AsyncExport:
        """Begins to write a checkpoint of one step; training goes on. See docs/exports.md.

        Args:
            destination: Name of a configured destination, "/", a relative key, such as
                "checkpoints/step-100".
            format: "safetensors" as Hugging Face lays models out, or "dcp".
            max_shard_size: Most bytes of tensors in one file of safetensors, a number or
                a text such as "5GB", which is the default.
            dtype: Cast floating tensors to it; None keeps each one's own.
            include: Some of "parameters", "buffers", "optimizer".
            tied: "drop" writes tied tensors once, "keep" under each name.
            overwrite: Whether what stands at the key may be replaced.
            name_map: Names in the model to names in the files; each may hold one "*".
            assets: Directory whose plain files are copied beside, 64 MiB in all.
            verify: Read everything back before it becomes visible.
            timeout_s: The export fails after so many seconds; None: the control plane's limit.

        Returns:
            The export under way; its `wait()` returns when it is there.

        Raises:
            UsageError: an argument is wrong, or the destination's name or key is none.
            NotFoundError: no such destination. DeniedError: the role does not suffice.
            ExhaustedError: too many exports wait.
        """
        body = export_body(
            destination, format, max_shard_size, dtype, include, tied, name_map, verify
        ) | {"overwrite": overwrite}
        if timeout_s is not None:
            body["timeout_s"] = timeout_s
        return AsyncExport(self._exports, await self._exports.create(body, assets))

    async def exports(self, *, state: str | None = None, limit: int = 100) -> list[ExportInfo]:
        """The newest exports of the job, newest first; without their files.

        Raises:
            UsageError: `state` is no state.
        """
        return await self._exports.all(state=state, limit=limit)

    async def get_export(self, export_id: str) -> ExportInfo:
        """One export, with its files. Raises NotFoundError."""
        return await self._exports.get(export_id)

    async def cancel_export(self, export_id: str) -> ExportInfo:
        """Ends an export. Raises ConflictError when it has ended in another way."""
        return await self._exports.cancel(export_id)

    async def export_ended(
        self, info: ExportInfo, timeout: float | None = None, progress: ExportProgress | None = None
    ) -> ExportInfo:
        """The export once it has ended. Args, Raises: as `AsyncExport.wait`."""
        return await self._exports.ended(info, timeout, progress)

    async def download(
        self,
        path: str | Path,
        *patterns: str,
        dtype: torch.dtype | None = None,
        buffers: bool = False,
        replace: bool = False,
        name_map: Mapping[str, str] | None = None,
        timeout: float | None = None,
        moved: Callable[[int, int], object] = lambda done_bytes, size_bytes: None,
        said: Callable[[str], object] = lambda text: None,
    ) -> Downloaded:
        """Full tensors of one step into a local safetensors file; training goes on.

        After a break (of the network, or of this program) the same call goes on where it
        was, with the same step, while the snapshot's lease of two minutes lives; else it
        begins anew and says so. Bytes that are here are checked before they count.

        Args:
            path: The file; it appears when it is whole. Its partial file and journal stand
                beside it, hidden.
            patterns: Globs over names, as in `summon`; all when none is given.
            dtype: Dtype of all tensors; None keeps each one's own.
            buffers: Whether buffers may match.
            replace: Whether a file of that name may be replaced.
            name_map: Names in the model to names in the file; each may hold one "*".
            timeout: Seconds; None waits for as long as it takes.
            moved: Told bytes that are there, and bytes in all.
            said: Told in words when it goes on, tries again or begins anew.

        Raises: as `summon`, and
            ConflictError: the name is taken, or another process downloads to it.
            ExhaustedError: the disk has not the room.
        """
        await self._transfer.load_torch()
        content = Content(
            patterns=patterns or ("*",),
            dtype=dtype,
            buffers=buffers,
            name_map=NameMap.of(name_map) if name_map else NameMap(),
        )
        file = PartialFile(Path(path))
        file.check(replace=replace)
        download = Download(self._reach, file, replace=replace, moved=moved, said=said)
        return await download.run(content, deadline(timeout, 0.0))

    async def restore(
        self,
        destination: str,
        *,
        if_step: int | None = None,
        reset_moments: bool = False,
        note: str | None = None,
        timeout: float | None = None,
        moved: Callable[[int, int], object] = lambda done_bytes, size_bytes: None,
    ) -> Edit:
        """Writes the parameters of a safetensors export into the running mesh, as one edit.

        On all ranks at one step, or on none. Buffers and the optimizer's state stay as they
        are. What was renamed gets its name back; what was cast is cast back.

        Args:
            destination: Name of a configured destination, "/", key.
            if_step: As in `edit`.
            reset_moments: Zero the optimizer's state of the parameters, too.
            note: Why, for the log; None says what was restored.
            timeout: Seconds; None waits for as long as it takes.
            moved: Told bytes read of the export, and bytes in all.

        Raises: as `edit`, and
            NotFoundError: no export stands there, or it has not all parameters.
            UsageError: it is no export of safetensors, or a shape differs.
            DataLossError: its files are not what was exported.
        """
        await self._transfer.load_torch()
        files = ExportFiles(self._rest, self.job, destination)
        values, said = await files.values(await self.read_layout(), moved)
        return await self.edit(
            set=values,
            if_step=if_step,
            reset_moments=reset_moments,
            note=note if note is not None else said,
            timeout=timeout,
        )

    async def create_export_schedule(
        self,
        destination: str,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        format: str = "safetensors",
        max_shard_size: str | int | None = None,
        dtype: str | None = None,
        include: Sequence[str] = ("parameters", "buffers"),
        tied: str = "drop",
        name_map: Mapping[str, str] | None = None,
        assets: str | Path | None = None,
        verify: bool = True,
    ) -> dict[str, Any]:
        """Exports every so many steps or seconds, until it is deleted.

        Args:
            destination: As in `export`. "{step}" in the key becomes the step; without it
                each export goes to "<key>/step-<step>".
            every_steps: At, or soon after, each multiple of it.
            every_s: So many seconds after the last one began.
            keep_last: The newest so many stay; None removes none.
            keep_every: Beside them every so many-th stays.

        An occasion that comes while the previous export runs is skipped. Retention removes
        only what this schedule itself wrote. Other Args, Raises: as `export`.
        """
        body = export_body(
            destination, format, max_shard_size, dtype, include, tied, name_map, verify
        )
        cadence = {
            "every_steps": every_steps,
            "every_s": every_s,
            "keep_last": keep_last,
            "keep_every": keep_every,
        }
        body |= {key: value for key, value in cadence.items() if value is not None}
        return await self._exports.create_schedule(body, assets)

    async def export_schedules(self) -> list[dict[str, Any]]:
        """Schedules in force, oldest first."""
        return await self._exports.schedules()

    async def delete_export_schedule(self, schedule_id: str) -> dict[str, Any]:
        """Ends a schedule; what it exported stays. Raises NotFoundError."""
        return await self._exports.delete_schedule(schedule_id)

    async def destinations(self) -> list[dict[str, Any]]:
        """Names and kinds of the places that exports may go to."""
        return await self._exports.destinations()

    def _deadline(self, timeout: Timeout) -> float:
        return deadline(timeout, self._timeout_s)
