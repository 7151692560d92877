"""AsyncMesh: a running job's parameters, for asyncio programs."""

# `timeout=` is what users of every other client write; it bounds retries, not one await.
# ruff: noqa: ASYNC109

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from paramd.errors import UsageError
from paramd.layout.plan import ReadPlan
from paramd.layout.select import select
from paramd.layout.types import Layout
from paramd.mesh.edits.methods import AsyncEditing
from paramd.mesh.exports.methods import AsyncExporting
from paramd.mesh.loop import DEFAULT_TIMEOUT_S, UNSET, Timeout, deadline
from paramd.mesh.peers.control import Find, RestClient
from paramd.mesh.peers.discovery import Reach
from paramd.mesh.peers.pins import Pinned
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.select import choose, pinned, while_pinned
from paramd.mesh.reading.stream import keep_freed_memory
from paramd.mesh.reading.summary import compute_stats
from paramd.mesh.reading.transfer import Transfer, Transport, check_transport
from paramd.mesh.results import MeshStatus, ParamInfo, Params, StatsTable, Summoned, mesh_status
from paramd.mesh.streaming import AsyncStreaming
from paramd.security.tls import ClientTls

if TYPE_CHECKING:
    import torch

    from paramd.mesh.reading.views import SnapshotView

Result = TypeVar("Result")


class AsyncMesh(AsyncEditing, AsyncExporting, AsyncStreaming):
    """A running job, read from outside. Use as `async with`, or call `close`.

    Everything it answers belongs to one (epoch, step). Methods may run concurrently. A
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
        self._reach = Reach(self._rest, job, tls=tls)
        self._transfer = Transfer()
        self._views: set[AsyncExitStack] = set()

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
        await self._stop_holding()
        await self._end_streams()
        while self._views:
            await self._views.pop().aclose()
        await self._reach.close()
        self._transfer.close()

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._reach.document.job

    @property
    def epoch(self) -> int:
        """Incarnation of the job, as last heard."""
        return self._reach.document.epoch

    async def read_layout(self) -> Layout:
        """All tensors and their pieces in the present epoch.

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
            A dict from every name that matched to its tensor, with `step` and `epoch`.

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
                epoch=pins.epoch,
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

    def _deadline(self, timeout: Timeout) -> float:
        return deadline(timeout, self._timeout_s)
