"""AsyncMesh: a running job's parameters, for asyncio programs."""

# `timeout=` as in other clients; it bounds the whole call with its retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramd import gone
from paramd.clock import seconds_of
from paramd.errors import ConflictError, NotFoundError, UsageError
from paramd.filters import Filter, filter_of
from paramd.layout.edits.ops import EditTerms, ops_of
from paramd.layout.exports.settings import NameMap
from paramd.layout.select import Pattern, SelectedTensor, each_pattern, select
from paramd.layout.types import Layout
from paramd.mesh.edits.calls import (
    ELSEWHERE,
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
from paramd.mesh.exports.calls import (
    MAX_TIMEOUT_S,
    AsyncExport,
    ExportCalls,
    ExportFiles,
    ExportInfo,
    Exports,
    check_no_path,
    export_body,
    located,
)
from paramd.mesh.exports.calls import Progress as ExportProgress
from paramd.mesh.exports.download import Content, Download, Downloaded, PartialFile
from paramd.mesh.exports.pins import OptimizerRead, read_states
from paramd.mesh.frames.follow import FollowRequest, open_following
from paramd.mesh.frames.frames import GradFrame, Kind, ParamFrame
from paramd.mesh.frames.grads import GradRequest, open_stream
from paramd.mesh.frames.stepping import StepStream, frames_of
from paramd.mesh.insight.diff import MARK, Now, compute_diff
from paramd.mesh.insight.replay import Replay, compute_replay
from paramd.mesh.insight.reports import (
    Alerts,
    AlertState,
    RankLog,
    Why,
    ask_alerts,
    ask_log,
    ask_why,
)
from paramd.mesh.insight.spectrum import Spectrum, compute_spectrum
from paramd.mesh.insight.updates import Updates, compute_updates
from paramd.mesh.loop import UNSET, Timeout, allowed_s, deadline
from paramd.mesh.peers.control import Find, RestClient
from paramd.mesh.peers.discovery import JobRest, SidecarFinder
from paramd.mesh.peers.grpc import all_ended
from paramd.mesh.peers.relay import TunnelRelay
from paramd.mesh.peers.sidecars import Pinned, Sidecars
from paramd.mesh.reading.pin import choose, compared, pinned, samples_for, while_pinned
from paramd.mesh.reading.reductions import compute_stats
from paramd.mesh.reading.stream import Landed, Reading, Transport, keep_freed_memory
from paramd.mesh.reading.transfer import (
    Lane,
    Reach,
    Transfer,
    check_transport,
    find_lanes,
    find_reaches,
)
from paramd.mesh.results import (
    MeshStatus,
    OptimizerState,
    ParamInfo,
    Params,
    Records,
    StatsTable,
    Summoned,
    file_format,
    mesh_status,
)
from paramd.security.tls import ClientTls
from paramd.state import StateName
from paramd.wire import LEASE_S

if TYPE_CHECKING:
    import torch

    from paramd.mesh.edits.operands import Operand
    from paramd.mesh.insight.compare import Diff
    from paramd.mesh.reading.assemble import SnapshotView


@gone.tells
class AsyncMesh:
    """A running job, accessed from outside. Use as `async with`, or call `close`.

    Every result is of one (run, step). Methods may run concurrently. A cancelled call
    releases its pins; `close` leaves no task behind.

    `timeout=` is in seconds, or a text such as "5s", for a whole call; None means no limit. Every
    call raises UnreachableError if the control plane, or a sidecar that it needs, does not respond.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        job: str | None = None,
        timeout: Timeout = UNSET,
        tls: ClientTls | None = None,
        find: Find | None = None,
    ) -> None:
        """No I/O. `paramd.aio.connect` finds url and token.

        Args:
            url: The control plane's, for example "http://127.0.0.1:8470".
            token: Its token.
            job: Name of the job; optional when the control plane serves only one.
            timeout: As in `connect`.
            tls: Trust settings for https; None reads them from the environment.
            find: Returns the current url and token, for a job whose next run may have
                others.
        """
        self._timeout_s = allowed_s(timeout)
        self._rest = RestClient(url, token, tls=tls, find=find)
        self._reach = SidecarFinder(self._rest, job, tls=tls, relay=TunnelRelay(self._rest))
        self._transfer = Transfer()
        self._lender = Lender()
        self._job_rest = JobRest(self._rest, self._reach)
        self._edits = EditCalls(self._job_rest)
        self._holder = Holder(self._edits)
        self._marks = MarkCalls(self._edits)
        self._exports = ExportCalls(self._job_rest)
        self._views: set[AsyncExitStack] = set()
        self._streams: set[StepStream[Any, Any]] = set()

    def __await__(self) -> Generator[Any, None, AsyncMesh]:
        """`mesh = await paramd.aio.connect()`: as `async with`, for callers of `close`."""
        return self.__aenter__().__await__()

    async def __aenter__(self) -> AsyncMesh:
        # Before gRPC starts threads: the limit on malloc arenas applies to new ones only.
        keep_freed_memory()
        try:
            await self._rest.begun(self._timeout_s)
            await self._reach.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release open views, leases, connections and threads. Idempotent."""
        await self._holder.close()
        while self._streams:
            await self._streams.pop().close()
        while self._views:
            await self._views.pop().aclose()
        await self._reach.close()
        self._transfer.close()
        self._lender.close()

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._reach.document.job

    @property
    def url(self) -> str:
        """URL of the control plane and its dashboard."""
        return self._rest.url

    @property
    def incarnation(self) -> int:
        """Last known run of the job."""
        return self._reach.document.incarnation

    @property
    def world_size(self) -> int:
        """Ranks of the job, as last known."""
        return self._reach.document.world_size

    async def names(self, *patterns: Pattern, buffers: bool = False) -> list[str]:
        """Names of the parameters that match any pattern; all without patterns. As `params`."""
        return [row.name for row in await self.params(*patterns, buffers=buffers)]

    async def state_dict(self, *patterns: Pattern) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, all at one step, for `load_state_dict`. As `summon`."""
        return (await self.summon(*(patterns or "*"), buffers=True)).state_dict()

    async def read_layout(self) -> Layout:
        """All tensors and their pieces in the current run."""

        async def attempt(sidecars: Sidecars) -> Layout:
            return (await self._reach.index(sidecars)).layout

        return await self._reach.attempts(attempt, self._deadline(UNSET))

    async def status(self, *, timeout: Timeout = UNSET) -> MeshStatus:
        """Current state of every rank; the row of an unreachable rank says why."""
        deadline_s = self._deadline(timeout)

        async def attempt(sidecars: Sidecars) -> MeshStatus:
            return await mesh_status(sidecars, deadline_s)

        await self._reach.refresh()
        return await self._reach.attempts(attempt, deadline_s)

    async def alerts(
        self, *, state: AlertState = "all", incarnation: int | None = None, limit: int = 100
    ) -> Alerts:
        """The job's alerts: those firing, then those resolved, each newest first.

        Args:
            state: "firing" or "resolved" for those alone.
            incarnation: The run; None means the job's last one. Alerts of a past one may still be
                "firing" if its control plane ended before they were resolved.
            limit: Most alerts to return.

        Raises:
            UsageError: an argument is wrong.
        """
        return await ask_alerts(self._job_rest, state, incarnation, limit)

    async def why(self, *ranks: int, log_lines: int = 10) -> Why:
        """The ranks' present activity, and the rank that keeps the others waiting (`verdict`).

        Works while training hangs. Stacks, collectives, memory and the last lines of output come
        from the trainers through their sidecars, which neither stop nor slow them.

        Args:
            ranks: Those to ask, at most 64; none means all, or the 64 that look worst.
            log_lines: Last lines of each trainer's output, 0 to 100; of tokens that may not see
                logs, none.

        Raises:
            UsageError: an argument is wrong. NotFoundError: the job has no such rank.
            DeniedError: the token may not read.
        """
        return await ask_why(self._job_rest, ranks, log_lines)

    async def logs(self, rank: int, *, lines: int = 100) -> RankLog:
        """The last lines of a rank's sidecar, and of its trainer if that writes to a file.

        Also after the trainer has died, while its sidecar lingers: its last lines show why.
        Requires the editor or admin role, since logs may contain anything the script prints.

        Args:
            rank: Rank whose logs to read.
            lines: Most last lines of each log, 1 to 1000.

        Raises:
            UsageError: an argument is wrong. NotFoundError: the job has no such rank.
            DeniedError: the token may not see logs.
        """
        return await ask_log(self._job_rest, rank, lines)

    async def params(
        self,
        *patterns: Pattern,
        buffers: bool = False,
        trainable: bool | None = None,
        timeout: Timeout = UNSET,
    ) -> Params:
        """The parameters that match any pattern; all without patterns.

            mesh.params("layers.*", "numel>1M", "norm>10")

        Args:
            patterns: Globs over names, and terms that must all hold, as of `paramd params`.
            buffers: List buffers too.
            trainable: True or False lists only the parameters that did or did not require a
                gradient when the job was attached (`ParamInfo.trainable`), and no buffers.

        Raises:
            NotFoundError: a pattern matches nothing; the message suggests similar names.
        """

        wanted, deadline_s = filter_of(each_pattern(patterns)), self._deadline(timeout)
        chosen = await self._chosen(wanted, buffers=buffers, deadline_s=deadline_s)
        rows = [(ParamInfo.of(item.tensor), item.pattern) for item in chosen]
        if trainable is not None:
            rows = [(row, part) for row, part in rows if row.trainable is trainable]
        if not wanted.statistics or not rows:
            return Params(row for row, _ in rows)
        parts = [part for _, part in rows]
        numbers = await self._numbers(parts, buffers=buffers, deadline_s=deadline_s)
        pairs = zip(rows, numbers, strict=True)
        right = (row for (row, _), one in pairs if wanted.matches_numbers(one.summary))
        return Params(right, step=numbers.step, unsettled=numbers.unsettled)

    async def find_one(self, name: str) -> SelectedTensor:
        """The parameter or buffer of this name, or the slice of one ("w[0:4]").

        Raises:
            NotFoundError: there is none; the message suggests similar names.
            UsageError: it is a pattern that matches several.
        """

        async def attempt(sidecars: Sidecars) -> Sequence[SelectedTensor]:
            return select(await self._reach.index(sidecars), name, with_buffers=True)

        found = await self._reach.attempts(attempt, self._deadline(UNSET))
        if len(found) != 1:
            raise UsageError(
                f"{name!r} matches {len(found):,} tensors; expected the name of one. All of them: "
                f"mesh.summon({name!r})"
            )
        return found[0]

    async def _chosen(
        self, wanted: Filter, *, buffers: bool, deadline_s: float
    ) -> list[SelectedTensor]:
        """What patterns and terms about facts choose, with its slices."""

        async def attempt(sidecars: Sidecars) -> list[SelectedTensor]:
            index = await self._reach.index(sidecars)
            found = select(index, wanted.patterns, with_buffers=buffers)
            return [one for one in found if wanted.matches(ParamInfo.of(one.tensor).facts)]

        return await self._reach.attempts(attempt, deadline_s)

    async def _numbers(
        self,
        patterns: Sequence[str],
        *,
        buffers: bool,
        deadline_s: float,
        histogram: bool = False,
        unsettled: bool = False,
    ) -> StatsTable:
        return await while_pinned(
            self._reach,
            patterns,
            partial(compute_stats, with_exponents=histogram),
            deadline_s,
            buffers=buffers,
            unsettled=unsettled,
        )

    async def stats(
        self,
        *patterns: Pattern,
        buffers: bool = False,
        histogram: bool = False,
        unsettled: bool = False,
        timeout: Timeout = UNSET,
    ) -> StatsTable:
        """Statistics of full tensors, computed by the sidecars; replicas count once.

        Args:
            patterns: Globs and terms, as in `params`; none means all parameters.
            buffers: Match buffers too.
            histogram: Also count binary exponents, at several times the cost of the rest.
            unsettled: As in `summon`.

        Raises: as `summon`.
        """
        wanted, deadline_s = filter_of(each_pattern(patterns)), self._deadline(timeout)
        names: Sequence[str] = wanted.patterns
        if wanted.facts:
            chosen = await self._chosen(wanted, buffers=buffers, deadline_s=deadline_s)
            names = [one.pattern for one in chosen]
            if not names:
                raise NotFoundError(f"no tensor satisfies {' '.join(map(str, wanted.facts))}")
        found = await self._numbers(
            names, buffers=buffers, deadline_s=deadline_s, histogram=histogram, unsettled=unsettled
        )
        if not wanted.statistics:
            return found
        right = (row for row in found if wanted.matches_numbers(row.summary))
        return StatsTable(right, **vars(found))

    async def diff(
        self,
        a: Now | int | str | Path | Mark | Mapping[str, torch.Tensor] | AsyncMesh,
        b: Now | int | str | Path | Mark | Mapping[str, torch.Tensor] | AsyncMesh = "now",
        *patterns: Pattern,
        cells: int = 0,
        timeout: Timeout = UNSET,
    ) -> Diff:
        """The differences between the weights of a and b, tensor by tensor.

            mesh.diff("checkpoints/step-1000")         # a checkpoint and the training now
            mesh.diff("+1", "+101")                    # two steps to come, 100 steps apart
            mesh.diff("mark:before")                   # a restore point and now
            mesh.diff(params)                          # tensors summoned before, and now
            mesh.diff(other)                           # another job, and this one

        Reads tensor by tensor while both states are pinned, so memory is that of a few tensors.

        Args:
            a, b: "now"; a step of this job to come, or "+N": N steps after the next one that can
                surely be asked for (both states must fit into the snapshots' budget);
                a restore point, as "mark:NAME" or a `Mark` with a name; "mark:STEP", a standing
                snapshot that is still kept (`marks`); a safetensors file or directory on this
                machine, such as an export; tensors by name; another mesh, as it is now.
            patterns: Globs over names; none means all parameters.
            cells: Also a heat map of each tensor's difference (`row.cells`), of at most this many
                rows and columns, up to 512; 0 for none.
            timeout: Seconds for all of it; 60 by default, None means no limit.

        Returns:
            Rows with name, norm (of the difference), relative norm, cosine, changed elements and
            the rows that differ most, the largest relative difference first.

        Raises:
            UsageError: an argument is wrong. ConflictError: a step is past, or the training has
                ended before it; or there is no such restore point. DeadlineError: it did not
                come in time. NotFoundError: a pattern matches nothing, a path does not exist.
            ParamdError: as `summon`.
        """
        await self._transfer.load_torch()
        return await compute_diff(
            self._reach,
            self._transfer,
            f"{MARK}{a.name}" if isinstance(a, Mark) else a,
            f"{MARK}{b.name}" if isinstance(b, Mark) else b,
            patterns or ("*",),
            self._deadline(timeout),
            _reach_of,
            cells=cells,
        )

    async def updates(
        self, *patterns: Pattern, steps: int = 1, timeout: Timeout = UNSET
    ) -> Updates:
        """The changes of each parameter by the next updates: norm, and its ratio to the weight.

        The sidecars compute it from snapshots of two steps, so no weights travel. Large selections
        are taken in groups, each with its own `step`. With `resume="auto"` also Adam's second
        moment and the effective learning rate, from memory that trainer and sidecar share.

        Args:
            patterns: Globs over names; none means all parameters.
            steps: Number of updates to measure together.

        Raises:
            UsageError: `steps` is out of range. ConflictError: the parameters are mirrored.
            DeadlineError: training is too quick or has stopped, so no two steps could be pinned.
            ParamdError: as `summon`.
        """
        return await compute_updates(
            self._reach, patterns or ("*",), self._deadline(timeout), steps
        )

    async def spectrum(self, name: str, k: int = 8, *, timeout: Timeout = UNSET) -> Spectrum:
        """The largest singular values of one weight, and its dead and equal rows.

        The sidecars multiply their shards with narrow matrices, so the weight never travels. Work
        is bounded: at most 256 products with a column. A weight with a side of at most 128 is
        exact, with all its singular values; of larger ones the condition number is a lower bound.

        Args:
            name: A parameter of 2 dims or more (those beyond the second count as columns) and
                floating-point numbers, or a slice of it.
            k: Number of singular values, 1 to 32.

        Raises:
            UsageError: not exactly one matrix, k is out of range, or numpy is not installed.
            ParamdError: as `summon`.
        """
        return await compute_spectrum(self._reach, name, k, self._deadline(timeout))

    async def verify(self, *patterns: Pattern, rank: int = 0, timeout: Timeout = UNSET) -> Replay:
        """Repeat the next update of one rank, and compare it bit by bit.

        Its sidecar recomputes it on copies, with torch's own optimizer, from the parameters, the
        optimizer's state and the gradients that it consumed; training continues. A flipped bit is
        found without replicas. Needs `resume="auto"`, and Adam, AdamW or SGD of torch.optim.

        Args:
            patterns: Globs over names; none means all parameters.
            rank: Rank whose update to repeat.

        Returns:
            A row per parameter and kind of state, those that differ first; `clean` and `summary()`
            tell the verdict.

        Raises:
            ConflictError: the rank's optimizer state is not in memory that its sidecar shares.
            UsageError: no optimizer of the rank has a part of what matches.
            NotFoundError: the job has no such rank, or a pattern matches nothing.
            DeadlineError: training is too quick or has stopped, so no update was captured.
            ParamdError: as `summon`.
        """
        self._edits.check_outside("verify", ELSEWHERE)
        return await compute_replay(self._reach, rank, patterns or ("*",), self._deadline(timeout))

    async def lanes(self) -> Records[Lane]:
        """How this process would read each rank with `transport="auto"`, and why not faster."""
        return Records(await find_lanes(await self._reach.sidecars()))

    async def reaches(self) -> Records[Reach]:
        """How the job's hosts reach each other and the control plane, and why not.

        One sidecar of each host tries one of each other host. None for a job on one host, but for
        the control plane.
        """
        return Records(await find_reaches(await self._reach.sidecars()))

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
                first whose ranks all respond; the result's `replica` tells, and its
                `replicas_differ` what others hold otherwise at that step.
            transport: "same-host" for shared memory, "stream" for bulk streams over TCP, "grpc"
                for gRPC alone, "auto" for the first of these that a rank has. `lanes` tells.
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
        deadline_s = self._deadline(timeout)
        await self._transfer.load_torch()
        began_s = time.monotonic()

        if optimizer and unsettled:
            raise UsageError("optimizer: cannot be combined with unsettled=True; give one of them")

        landed = Landed(progress)

        async def attempt(sidecars: Sidecars) -> Summoned:
            chosen = await choose(self._reach, sidecars, patterns, buffers=buffers, replica=replica)
            targets = self._transfer.targets(chosen, dtype=dtype, device=device, into=into)
            landed.begin(chosen.plan.size_bytes)
            state: StateName | None = None
            rests = False
            moments: OptimizerState | None = None
            differ: tuple[str, ...] | None = None
            samples = samples_for(self._reach, sidecars, chosen.tensors)
            if optimizer:
                read = OptimizerRead(self._reach, sidecars, chosen, device, transport, deadline_s)
                held, moments = await read_states(read, self._transfer, targets)
                state, rests = held.state, held.unsettled
            elif not unsettled:
                live = await self._transfer.read_live(
                    sidecars,
                    chosen,
                    targets,
                    transport,
                    samples,
                    self._reach.leave_out,
                    landed,
                    deadline_s,
                )
                if (live is None or live[1] is None) and self._reach.costs():
                    # Without the ranks that were just found not to respond.
                    samples = samples_for(self._reach, sidecars, chosen.tensors)
                if live is not None:
                    state, differ = live
                    if differ is None:
                        differ = await compared(self._reach, sidecars, Pinned(state, {}), samples)
            if state is None:
                async with pinned(
                    self._reach, sidecars, chosen, deadline_s, unsettled=unsettled, samples=samples
                ) as pins:
                    landed.begin(chosen.plan.size_bytes)
                    reading = Reading(sidecars, pins, deadline_s, transport, landed)
                    copying = self._transfer.read(reading, chosen.plan, targets)
                    comparing = compared(self._reach, sidecars, pins, samples)
                    differ, _ = await all_ended([comparing, copying])
                state, rests = pins.state, pins.unsettled
            if not differ and self._reach.costs():
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

        return await self._reach.attempts(attempt, deadline_s)

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
        deadline_s = self._deadline(timeout)
        await self._transfer.load_torch()

        async def attempt(sidecars: Sidecars) -> OptimizerState:
            chosen = await choose(self._reach, sidecars, patterns or ("*",), buffers=False)
            read = OptimizerRead(self._reach, sidecars, chosen, device, transport, deadline_s)
            return (await read_states(read, self._transfer, None))[1]

        return await self._reach.attempts(attempt, deadline_s)

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
        deadline_s = self._deadline(timeout)
        await self._transfer.load_torch()

        async def attempt(sidecars: Sidecars) -> tuple[SnapshotView, AsyncExitStack]:
            async with AsyncExitStack() as stack:
                chosen = await choose(self._reach, sidecars, patterns, buffers=buffers)
                pins = await stack.enter_async_context(
                    pinned(self._reach, sidecars, chosen, deadline_s)
                )
                reading = Reading(sidecars, pins, deadline_s)
                return await self._transfer.view(reading, chosen, stack), stack.pop_all()

        found, stack = await self._reach.attempts(attempt, deadline_s)
        # Drop the shards before releasing the memory, or the sidecar cannot reuse it.
        stack.callback(found.drop)
        self._views.add(stack)
        try:
            yield found
        finally:
            self._views.discard(stack)
            await stack.aclose()

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
            deadline_s=self._deadline(timeout),
        )
        return await make_edit(
            self._edits, self._reach, self._transfer, ops, terms, sending, wait=wait
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
        await self._transfer.load_torch()
        from paramd.mesh.edits.operands import tensor_of

        return tensor_of(given)

    async def get_edit(self, edit_id: str, *, wait: bool = False, timeout: Timeout = UNSET) -> Edit:
        """One edit, by its id or its first characters, as `repr` and lists show them.

        With `wait`, returns once the edit has ended, or at the deadline.
        """
        edit = await self._edits.get(edit_id)
        return await self._edits.ended(edit, self._deadline(timeout)) if wait else edit

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
        wait: bool = True,
        timeout: Timeout = UNSET,
    ) -> Edit:
        """Undo an applied edit: subtract what was added, restore everything else.

        Optimizer state that it zeroed (`reset_moments`) stays zero; the result's `note` says so.

        Args:
            edit_id: The edit, its id, or the first characters of that; "last", the default, for
                the one in effect that was applied last, of those made with this token.
            force: Undo even if later edits changed some of the same elements.
            wait, timeout: As in `edit`.

        Returns:
            The edit that undoes it.

        Raises:
            ConflictError: its pre-images are gone, later edits overlap, or there is no "last".
        """
        deadline_s = self._deadline(timeout)
        if not isinstance(edit_id, str | Edit):
            raise UsageError(
                f"edit_id: {type(edit_id).__name__}; expected an edit, such as a row of "
                "mesh.edits(), or its id"
            )
        edit_id = edit_id if isinstance(edit_id, str) else edit_id.id
        if wait:
            self._edits.check_outside("undo")
        if edit_id == "last":
            own = str((await self._rest.send("GET", "/session"))["name"])
            edit_id = await self._edits.last_of(own)
        edit = await self._edits.undo(edit_id, force=force, deadline_s=deadline_s)
        return check_applied(await self._edits.ended(edit, deadline_s)) if wait else edit

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
        deadline_s = self._deadline(timeout)
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
        return await self._marks.groups(self._deadline(UNSET))

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
        return await self._marks.make(name, self._deadline(timeout))

    async def marks(self) -> Marks:
        """The states that training can return to: restore points and standing snapshots."""
        return await self._marks.all(self._deadline(UNSET))

    async def unmark(self, name: str | Mark) -> None:
        """Delete a restore point and free its memory. Idempotent."""
        await self._marks.drop(name.name if isinstance(name, Mark) else name, self._deadline(UNSET))

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
        deadline_s = self._deadline(timeout)
        if wait:
            self._edits.check_outside("rollback", ELSEWHERE)
        at = to.state if isinstance(to, Mark) else to
        edit = await self._marks.roll_back(at, note, deadline_s)
        return check_applied(await self._edits.ended(edit, deadline_s)) if wait else edit

    async def pause_state(self) -> PauseState:
        """Whether training is paused, by whom and for how long."""
        return await self._edits.pause("GET", "", None, self._deadline(UNSET))

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
        return await self._holder.pause(lease_s, renew=renew, deadline_s=self._deadline(timeout))

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
        return await self._holder.step(steps, wait=wait, deadline_s=self._deadline(timeout))

    async def resume(self, *, timeout: Timeout = UNSET) -> PauseState:
        """End the pause; training continues. Idempotent."""
        return await self._holder.resume(deadline_s=self._deadline(timeout))

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
            await self._transfer.load_torch()
            selection = await selected(self._reach, patterns)
            run = self._transfer.run
            # Sidecars of this host copy the written tensors from their memory.
            room = await run(lambda: lent_room(self._lender, self._reach, selection))
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
                    lender=self._lender, progress=progress, deadline_s=self._deadline(timeout)
                )
                await make_edit(self._edits, self._reach, self._transfer, ops, terms, sending)
        finally:
            if pause:
                # Not an error if the pause has expired: the edit was already refused for it.
                with suppress(ConflictError):
                    await self.resume(timeout=timeout)

    async def grads(
        self,
        *patterns: Pattern,
        every: int = 1,
        kind: Kind = "full",
        dtype: torch.dtype | str | None = None,
        rows: int | None = None,
        lossless: bool = False,
        transport: Transport = "auto",
    ) -> AsyncIterator[GradFrame[Any]]:
        """Stream gradients, one frame per update, as the optimizer consumes them.

        Each frame is complete and of one update on all ranks. Training never waits: a slow
        reader gets the newest frame, and the frames it missed are counted in `dropped`.

        Args:
            patterns: Globs over names of parameters; each may end in a slice.
            every: Yield a frame for each update whose number is a multiple of this.
            kind: "full" for full gradients; "stats" for statistics computed by the sidecars
                (norm, mean, std, min, max, zeros, NaN, Inf); "histogram" adds exponent counts.
            dtype: Dtype of full gradients; None means each parameter's own.
            rows: Sample this many evenly spaced rows of each first dim; None takes all.
            lossless: Miss no frame, if the trainer's operator allows it: each update then waits
                for this reader, for a bounded time (PARAMD_LOSSLESS_BUDGET_MS).
            transport: As in `summon`.

        Yields:
            `frame.step` is the number of the update; `frame[name]` a tensor or a `Summary`, or
            None without a gradient. Iteration ends when the training detaches.

        Raises:
            UsageError, NotFoundError: as `summon`.
            ConflictError: a trainer ended, or a new run began (subscribe again); of
                `follow`, a rank has not served its parameters for 20 s; of `grads`, the updates of
                this training never have a frame. The message says why.
            UnreachableError: a rank did not respond for 20 s.
        """
        check_transport(transport)
        self._edits.check_outside("grads", ELSEWHERE)
        wanted = GradRequest(
            patterns=patterns,
            every=every,
            kind=kind,
            dtype=await self._transfer.dtype(dtype),
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
        *patterns: Pattern,
        every: int = 1,
        dtype: torch.dtype | str | None = None,
        transport: Transport = "auto",
        deltas: bool = False,
        merge: bool = False,
        adapter: str | None = None,
    ) -> AsyncIterator[ParamFrame]:
        """Stream parameters, one frame per update whose number is a multiple of `every`.

        Only tensors whose bytes changed since the last frame are read; the others are the same
        objects as in the last frame. Args, Yields, Raises: as `grads`.

        Args:
            deltas: Have the ranks send only the changed elements of changed tensors, where
                that takes fewer bytes (docs/engines.md). For links slower than a rank compares
                two states, some 5 Gbit/s a core; it takes memory here for another copy.
            merge: Merge an adapter (LoRA) into its base here, and name tensors as the base model
                does. The patterns are over the training's own names.
            adapter: The adapter to merge; None means the only one.
        """
        check_transport(transport)
        cast = await self._transfer.dtype(dtype)
        self._edits.check_outside("follow", ELSEWHERE)
        wanted = FollowRequest(
            patterns=patterns,
            every=every,
            dtype=cast,
            transport=transport,
            deltas=deltas,
            merge=merge,
            adapter=adapter if adapter is not None else "",
        )
        stream = await open_following(self._reach, self._transfer, wanted)
        async with frames_of(stream, self._streams) as frames:
            async for frame in frames:
                yield frame

    async def export(
        self,
        destination: str | None = None,
        *,
        format: str = "safetensors",
        max_shard_size: str | int | None = None,
        dtype: str | None = None,
        include: Sequence[str] = ("parameters", "buffers"),
        tied: str = "drop",
        names: Sequence[str] | None = None,
        replica: int = 0,
        overwrite: bool = False,
        name_map: Mapping[str, str] | None = None,
        adapter: str | None = None,
        merge: bool = False,
        weights_from: str | None = None,
        assets: str | Path | None = None,
        verify: bool = True,
        timeout: Timeout = UNSET,
    ) -> AsyncExport:
        """Start exporting a checkpoint of one step; training continues. See docs/exports.md.

        Args:
            destination: "NAME/KEY": one of `destinations` and a relative key, such as
                "checkpoints/step-100". A name alone stands for "NAME/step-{step}", a key alone for
                that key in "checkpoints", or in the only destination; None for both.
            format: "safetensors" in Hugging Face's file layout, "dcp", or "peft" for an adapter
                as `PeftModel.from_pretrained` loads it.
            max_shard_size: Maximum tensor bytes per safetensors file, a number or a text such
                as "5GB", the default.
            dtype: Cast floating tensors to it; None keeps each one's own.
            include: Any of "parameters", "buffers", "optimizer".
            tied: "drop" writes tied tensors once, "keep" under each name.
            names: Names and patterns of the tensors to write, each in full, with their optimizer
                state if that is included; None means all.
            replica: A rank; everything is of its replica, as in `summon`. The manifest names it,
                and in `replicas_differ` what others hold otherwise.
            overwrite: Replace an existing export at the key.
            name_map: Names in the model to names in the files; each may hold one "*".
            adapter: The adapter that format "peft" or `merge` is about; None means the only one.
            merge: Write the base model, under its own names, with the adapter (LoRA) merged in.
            weights_from: Write other weights than the parameters: a model that `attach` was
                given by name, such as "ema", a kind of the optimizers' state, or "schedule-free"
                (docs/averages.md).
            assets: Directory whose regular files are copied into the export, 64 MiB in total.
            verify: Read everything back before publishing.
            timeout: Seconds for the whole export, or a text such as "20m"; one hour by default,
                None means the longest that the control plane allows, a day.

        Returns:
            The running export; `wait()` returns when it is published.

        Raises:
            UsageError: an argument is wrong, or the destination's name or key is malformed.
            NotFoundError: no such destination. DeniedError: the role does not suffice.
            ExhaustedError: too many exports are queued.
        """
        where = await self._located(destination)
        body = export_body(
            where,
            format,
            max_shard_size,
            dtype,
            include,
            tied,
            name_map,
            verify,
            names,
            replica,
            adapter,
            merge,
            weights_from,
        ) | {"overwrite": overwrite}
        if timeout is not UNSET:
            body["timeout_s"] = MAX_TIMEOUT_S if timeout is None else allowed_s(timeout)
        return AsyncExport(self._exports, await self._exports.create(body, assets))

    async def exports(self, *, state: str | None = None, limit: int = 100) -> Exports:
        """The newest exports of the job, newest first; without their files.

        Raises:
            UsageError: there is no such state.
        """
        return Exports(await self._exports.all(state=state, limit=limit))

    async def get_export(self, export_id: str) -> ExportInfo:
        """One export, with its files, by its id or its first characters.

        Raises:
            NotFoundError, UsageError: none, or several, begin so.
        """
        return await self._exports.get(export_id)

    async def cancel_export(self, export_id: str) -> ExportInfo:
        """Cancel an export. Raises ConflictError when it is DONE or FAILED, and as `get_export`."""
        return await self._exports.cancel(export_id)

    async def export_ended(
        self, info: ExportInfo, timeout: float | None = None, progress: ExportProgress | None = None
    ) -> ExportInfo:
        """The export once it has ended. Args, Raises: as `AsyncExport.wait`."""
        return await self._exports.ended(info, timeout, progress)

    async def download(
        self,
        path: str | Path,
        *patterns: Pattern,
        dtype: torch.dtype | str | None = None,
        buffers: bool = False,
        replica: int | None = None,
        overwrite: bool = False,
        name_map: Mapping[str, str] | None = None,
        merge: bool = False,
        adapter: str | None = None,
        timeout: float | None = None,
        transport: Transport = "auto",
        progress: Callable[[int, int], object] = lambda done_bytes, size_bytes: None,
        on_message: Callable[[str], object] = lambda text: None,
    ) -> Downloaded:
        """Download full tensors of one step into a local safetensors file.

        After an interruption (of the network, or of this program) the same call resumes at the
        same step while the snapshot's two-minute lease lasts, and starts over otherwise. What
        the earlier attempt's bytes belong to is verified before they are used.

        Args:
            path: The file, "x.safetensors" or without a suffix; it appears once complete. A hidden
                partial file stands next to it until then.
            patterns: Globs over names, as in `summon`; none means all.
            dtype: Dtype of all tensors; None keeps each one's own.
            buffers: Match buffers too.
            replica: As in `summon`.
            overwrite: Replace an existing file.
            name_map: Names in the model to names in the file; each may hold one "*".
            merge: Merge an adapter (LoRA) into its base here, and name tensors as the base model
                does. The patterns are over the training's own names.
            adapter: The adapter to merge; None means the only one.
            timeout: Seconds; None, the default, means no limit.
            transport: As in `summon`.
            progress: Called with bytes done and total bytes.
            on_message: Called with a message when the download resumes, retries or starts over.

        Raises: as `summon`, and
            UsageError: the file's name says another format.
            ConflictError: the file exists, or another process downloads to it.
            ExhaustedError: not enough disk space.
        """
        check_transport(transport)
        if file_format(path) != "safetensors":
            raise UsageError(
                f"path: {str(path)!r}; a download is written as safetensors, so expected "
                "NAME.safetensors. A file for torch.load: "
                f"mesh.summon('*', buffers=True).save({str(path)!r})"
            )
        await self._transfer.load_torch()
        content = Content(
            patterns=patterns or ("*",),
            dtype=await self._transfer.dtype(dtype),
            buffers=buffers,
            name_map=NameMap.of(name_map) if name_map else NameMap(),
            replica=replica,
            merge=merge,
            adapter=adapter if adapter is not None else "",
        )
        file = PartialFile(Path(path))
        file.check(overwrite=overwrite)
        download = Download(
            reach=self._reach,
            transfer=self._transfer,
            file=file,
            overwrite=overwrite,
            transport=transport,
            moved=progress,
            said=on_message,
        )
        return await download.run(content, deadline(timeout, 0.0))

    async def restore(
        self,
        destination: str,
        *,
        if_step: int | None = None,
        reset_moments: bool = False,
        note: str | None = None,
        timeout: float | None = None,
        progress: Callable[[int, int], object] = lambda done_bytes, size_bytes: None,
    ) -> Edit:
        """Restore the parameters of a safetensors export into the running mesh, as one edit.

        Applied on all ranks at one step, or on none. Buffers and optimizer state are left
        alone. The export's renames and casts are reversed.

        Args:
            destination: "NAME/KEY", as in `export`.
            if_step: As in `edit`.
            reset_moments: Also zero the parameters' optimizer state.
            note: Reason, for the log; None names the export.
            progress: Called with bytes read and total bytes.

        Raises: as `edit`, and
            NotFoundError: there is no export, or it lacks a parameter.
            UsageError: it is not a safetensors export, or a shape differs.
            DataLossError: a file does not match the manifest's checksum.
        """
        self._edits.check_outside("restore")
        await self._transfer.load_torch()
        where = await self._located(destination)
        if "{" in where:
            raise UsageError(f"destination: {destination!r}; expected NAME/KEY, see mesh.exports()")
        files = ExportFiles(self._rest, self.job, where)
        values, said = await files.values(await self.read_layout(), progress)
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
        every_steps: int,
        keep_last: int | None = None,
        keep_every: int | None = None,
        format: str = "safetensors",
        max_shard_size: str | int | None = None,
        dtype: str | None = None,
        include: Sequence[str] = ("parameters", "buffers"),
        tied: str = "drop",
        names: Sequence[str] | None = None,
        replica: int = 0,
        name_map: Mapping[str, str] | None = None,
        adapter: str | None = None,
        merge: bool = False,
        weights_from: str | None = None,
        assets: str | Path | None = None,
        verify: bool = True,
    ) -> dict[str, Any]:
        """Schedule exports at multiples of a step, until the schedule is deleted.

        Args:
            destination: As in `export`. "{step}" in the key becomes the step; without it
                each export goes to "<key>/step-<step>".
            every_steps: Export at, or soon after, each multiple of this step.
            keep_last: Number of newest exports to keep; None keeps all.
            keep_every: Also keep every n-th export.

        An export due while the previous one runs is skipped. Retention removes only
        exports of this schedule. Other Args, Raises: as `export`.
        """
        where = await self._located(destination)
        body = export_body(
            where,
            format,
            max_shard_size,
            dtype,
            include,
            tied,
            name_map,
            verify,
            names,
            replica,
            adapter,
            merge,
            weights_from,
        )
        cadence = {"every_steps": every_steps, "keep_last": keep_last, "keep_every": keep_every}
        body |= {key: value for key, value in cadence.items() if value is not None}
        return await self._exports.create_schedule(body, assets)

    async def export_schedules(self) -> Records[dict[str, Any]]:
        """Active schedules, oldest first."""
        return Records(await self._exports.schedules())

    async def delete_export_schedule(self, schedule_id: str) -> dict[str, Any]:
        """Delete a schedule; its exports stay. Raises NotFoundError."""
        return await self._exports.delete_schedule(schedule_id)

    async def destinations(self) -> Records[dict[str, Any]]:
        """Names and kinds of the export destinations; for admins their roots, too."""
        found = await self._rest.send("GET", "/destinations")
        return Records(dict(one) for one in found["destinations"])

    async def add_destination(self, name: str, root: str) -> None:
        """Add an export destination, whose root then stays. Needs role admin. Idempotent.

        Args:
            root: Absolute path of a directory of the job's hosts, or "s3://bucket/prefix".

        Raises:
            UsageError: name or root is malformed. ExistsError: the name has another root.
            DeniedError: not an admin, or the operator configured `{}`: no destinations.
        """
        await self._rest.send("POST", "/destinations", {"name": name, "root": root})

    async def _located(self, given: str | None) -> str:
        """As "NAME/KEY". Raises as `check_no_path` and `located`."""
        check_no_path(given)
        if given is not None and "/" in given:
            return given
        return located(given, [str(one["name"]) for one in await self.destinations()])

    def _deadline(self, timeout: Timeout) -> float:
        return deadline(timeout, self._timeout_s)


def _reach_of(source: object) -> SidecarFinder | None:
    """What finds the sidecars of another job's mesh; None for anything else."""
    return source._reach if isinstance(source, AsyncMesh) else None
