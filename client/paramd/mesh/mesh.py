"""Mesh: a running job's parameters, for programs without asyncio, and for notebooks.

A thin shell: every method runs its twin of AsyncMesh on the shared loop thread. Methods
may be called from several threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from paramd.errors import UsageError
from paramd.layout.types import Layout
from paramd.mesh import loop
from paramd.mesh.amesh import AsyncMesh
from paramd.mesh.editing.shell import Editing
from paramd.mesh.exporting.shell import Exporting
from paramd.mesh.results import MeshStatus, Params, StatsTable, Summoned
from paramd.mesh.streaming import Streaming
from paramd.mesh.timeouts import UNSET, Timeout
from paramd.mesh.transfer import Transport
from paramd.tls import ClientTls

if TYPE_CHECKING:
    import torch

    from paramd.mesh.editing.upload import Progress
    from paramd.mesh.views import SnapshotView

Result = TypeVar("Result")


class Mesh(Editing, Exporting, Streaming):
    """A running job, read from outside. `paramd.connect` makes one; `close` ends it.

    Everything it answers belongs to one (epoch, step).
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        job: str | None = None,
        timeout_s: float | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        """Connects. Arguments and errors as those of `paramd.connect`."""
        thread = loop.acquire()
        try:
            self._mesh = thread.run(_opened(url, token, job, timeout_s, tls))
        except BaseException:
            loop.release()
            raise
        self._thread = thread
        # A mesh that is forgotten, not closed, must not keep connections or threads.
        self._end = weakref.finalize(self, _close, thread, self._mesh)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"epoch {self._mesh.epoch}" if self._end.alive else "closed"
        return f"<paramd.Mesh of job {self._mesh.job!r}, {state}>"

    def close(self) -> None:
        """Releases everything: leases, connections, threads. Idempotent."""
        self._end()

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._mesh.job

    @property
    def epoch(self) -> int:
        """Incarnation of the job, as last heard."""
        return self._mesh.epoch

    @property
    def layout(self) -> Layout:
        """All tensors and their pieces."""
        return self._run(self._mesh.read_layout())

    def status(self, *, timeout: Timeout = UNSET) -> MeshStatus:
        """Every rank's state now; a rank that does not answer says so in its row."""
        return self._run(self._mesh.status(timeout=timeout))

    def params(self, *patterns: str, buffers: bool = False, timeout: Timeout = UNSET) -> Params:
        """The parameters that match any pattern (all, when none is given).

        Raises:
            NotFoundError: a pattern matches nothing; the text offers similar names.
        """
        return self._run(self._mesh.params(*patterns, buffers=buffers, timeout=timeout))

    def stats(
        self,
        *patterns: str,
        buffers: bool = False,
        histogram: bool = False,
        timeout: Timeout = UNSET,
    ) -> StatsTable:
        """Statistics of full tensors, computed where they lie; every element counts once.

        Args:
            patterns: Globs over names, as in `summon`; all parameters when none is given.
            buffers: Whether buffers may match.
            histogram: Count binary exponents too, several times the cost of all the rest.
            timeout: Seconds; None waits for as long as it takes.

        Raises: as `summon`.
        """
        return self._run(
            self._mesh.stats(*patterns, buffers=buffers, histogram=histogram, timeout=timeout)
        )

    @overload
    def summon(
        self,
        *patterns: str,
        writeback: Literal[False] = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
        buffers: bool = False,
        timeout: Timeout = UNSET,
        transport: Transport = "auto",
    ) -> Summoned: ...
    @overload
    def summon(
        self,
        *patterns: str,
        writeback: Literal[True],
        hold: bool = True,
        mode: str | None = None,
        if_step: bool = False,
        reset_moments: bool = False,
        note: str = "",
        timeout: Timeout = UNSET,
        progress: Progress | None = None,
    ) -> AbstractContextManager[Summoned]: ...
    def summon(
        self, *patterns: str, writeback: bool = False, **options: Any
    ) -> Summoned | AbstractContextManager[Summoned]:
        """Full tensors by name, all at one step. Training goes on meanwhile.

        With `writeback=True` it is a block, at whose end what was changed is written back:

            with mesh.summon("head.*", writeback=True) as params:
                params["head.weight"].mul_(0.5)

        Args, Returns, Raises: as `AsyncMesh.summon`, and as `AsyncMesh.writeback`.
        """
        if writeback:
            return self.writeback(*patterns, **options)
        return self._run(self._mesh.summon(*patterns, **options))

    @contextmanager
    def view(
        self, *patterns: str, buffers: bool = False, timeout: Timeout = UNSET
    ) -> Iterator[SnapshotView]:
        """Shards of one step on the sidecars' own memory, without a copy; same host only.

        Tensors taken from the view stay right after it has ended. Raises: as `summon`.
        """
        viewing = self._mesh.view(*patterns, buffers=buffers, timeout=timeout)
        found = self._run(viewing.__aenter__())
        try:
            yield found
        finally:
            found.drop()
            # A closed mesh has ended its views already.
            if self._end.alive:
                self._run(viewing.__aexit__(None, None, None))

    @property
    def _alive(self) -> bool:
        return self._end.alive

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._end.alive:
            work.close()
            raise UsageError(f"this mesh of job {self._mesh.job!r} is closed; connect again")
        return self._thread.run(work)


async def _opened(
    url: str, token: str, job: str | None, timeout_s: float | None, tls: ClientTls | None
) -> AsyncMesh:
    return await AsyncMesh(url, token, job=job, timeout_s=timeout_s, tls=tls).__aenter__()


def _close(thread: loop.LoopThread, mesh: AsyncMesh) -> None:
    if thread.is_current():
        # The garbage collector may run a finalizer on any thread; this one cannot wait for itself.
        threading.Thread(target=_close, args=(thread, mesh), name="paramd-close").start()
        return
    try:
        thread.run(mesh.close())
    finally:
        loop.release()
