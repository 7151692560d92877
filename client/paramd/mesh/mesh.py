"""Mesh: the synchronous client, for scripts and notebooks.

Every method runs its namesake of AsyncMesh on the shared loop thread, with the same arguments,
result and docstring. Thread-safe.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from difflib import get_close_matches
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from paramd import gone
from paramd.errors import ParamdError, UsageError
from paramd.layout.select import Pattern, SelectedTensor
from paramd.layout.types import Layout, TensorKind
from paramd.mesh import loop
from paramd.mesh.amesh import AsyncMesh
from paramd.mesh.edits.calls import Edit, Pause
from paramd.mesh.exports.calls import Export
from paramd.mesh.loop import UNSET, Timeout
from paramd.mesh.options import EditOptions, StatsOptions, SummonOptions
from paramd.mesh.parts.host import MeshPart
from paramd.mesh.reading.stream import Transport
from paramd.mesh.results import ParamInfo, Summoned, TensorStats, html_table, shape_text

if TYPE_CHECKING:
    import torch

    from paramd.mesh.edits.editing import Progress
    from paramd.mesh.insight.compare import Diff

CARD_S = 5.0
"""Seconds that the card of a notebook may wait for the ranks."""

P = ParamSpec("P")
Result = TypeVar("Result")
Other = TypeVar("Other")


def _as(method: Callable[..., Any]) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Give a method of Mesh the name and docstring of its namesake, as users see them."""

    def named(run: Callable[P, Result]) -> Callable[P, Result]:
        run = functools.wraps(method)(run)
        run.__qualname__ = f"Mesh.{method.__name__}"
        return run

    return named


def _called(
    method: Callable[Concatenate[AsyncMesh, P], Result],
    mesh: Mesh,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Result:
    """Call a method of AsyncMesh. Raises UsageError for arguments that it does not take."""
    try:
        return method(mesh._mesh, *args, **kwargs)
    except TypeError as error:
        known = list(inspect.signature(method).parameters)[1:]
        near = [n for name in kwargs if name not in known for n in get_close_matches(name, known)]
        hint = f"did you mean {near[0]}=?" if near else f"see help(mesh.{method.__name__})"
        said = str(error).replace(method.__qualname__, f"Mesh.{method.__name__}")
        raise UsageError(f"{said}; {hint}") from None


def _blocking(
    method: Callable[Concatenate[AsyncMesh, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Mesh, P], Result]:
    return _blocking_as(method, lambda _, found: found)


def _blocking_as(
    method: Callable[Concatenate[AsyncMesh, P], Coroutine[Any, Any, Result]],
    shown: Callable[[Mesh, Result], Other],
) -> Callable[Concatenate[Mesh, P], Other]:
    @_as(method)
    def run(mesh: Mesh, /, *args: P.args, **kwargs: P.kwargs) -> Other:
        return shown(mesh, mesh._run(_called(method, mesh, *args, **kwargs)))

    return run


def _iterating(
    method: Callable[Concatenate[AsyncMesh, P], AsyncIterator[Result]],
) -> Callable[Concatenate[Mesh, P], Iterator[Result]]:
    @_as(method)
    def each(mesh: Mesh, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Result]:
        frames = _called(method, mesh, *args, **kwargs)
        mesh._iterated.add(frames)
        try:
            while True:
                try:
                    frame = mesh._run(_next(frames))
                except StopAsyncIteration:
                    return
                yield frame
        finally:
            mesh._leave(frames)

    return each


def _block(
    method: Callable[Concatenate[AsyncMesh, P], AbstractAsyncContextManager[Result]],
    *,
    ends_with_mesh: bool = False,
) -> Callable[Concatenate[Mesh, P], AbstractContextManager[Result]]:
    """`ends_with_mesh`: closing the mesh inside the block does the work of the block's end."""

    @_as(method)
    @contextmanager
    def entered(mesh: Mesh, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Result]:
        block = _called(method, mesh, *args, **kwargs)
        found = mesh._run(_awaited(block.__aenter__()))
        try:
            yield found
        except BaseException as error:
            if mesh._end.alive or not ends_with_mesh:
                mesh._run(_awaited(block.__aexit__(type(error), error, error.__traceback__)))
            raise
        if mesh._end.alive or not ends_with_mesh:
            mesh._run(_awaited(block.__aexit__(None, None, None)))

    return entered


async def _awaited(work: Any) -> Any:
    return await work


async def _next(frames: AsyncIterator[Result]) -> Result:
    return await anext(frames)


@gone.tells
class Mesh:
    """A running job, accessed from outside. Made by `paramd.connect`, ended by `close`.

    Every result is of one (run, step).
    """

    def __init__(self, mesh: AsyncMesh) -> None:
        """Connects. Raises as `paramd.connect`."""
        self._mesh = mesh
        thread = loop.shared.acquire()
        try:
            thread.run(mesh.__aenter__())
        except BaseException:
            loop.shared.release()
            raise
        self._thread = thread
        # A mesh that is dropped without `close` must not leak connections or threads.
        self._end = weakref.finalize(self, _close, thread, self._mesh)
        self._iterated = weakref.WeakSet[AsyncIterator[Any]]()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"run {self._mesh.incarnation}" if self._end.alive else "closed"
        step = "; .current_step asks for its step" if self._end.alive else ""
        return f"<paramd.Mesh of job {self._mesh.job!r}, {state}{step}>"

    def _repr_html_(self) -> str:
        """A card for notebooks: what `status` says in short, or why it cannot."""
        rows = [["job", self.job], ["run", str(self.incarnation)]]
        below = "closed; connect again"
        if self._end.alive and not self._thread.is_parents:
            try:
                found = self.status(timeout=CARD_S)
                healthy = sum(row.healthy for row in found)
                rows.append(["step", str(found.step) if found.step >= 0 else "-"])
                rows.append(["healthy ranks", f"{healthy} of {found.world_size}"])
                rows += [[f"rank {row.rank}", row.reason] for row in found if row.reason]
                below = f"{self.url}, or: paramd dashboard --job {self.job}"
            except ParamdError as error:
                below = str(error)
        return html_table(("", ""), rows, below)

    def close(self) -> None:
        """Release leases, connections and threads. Idempotent."""
        try:
            # An exception keeps loops that it left. Their generators end before those within them.
            for frames in [*self._iterated]:
                self._leave(frames)
        finally:
            self._end()

    def _leave(self, frames: AsyncIterator[Any]) -> None:
        """End an iteration, and so its subscription; an interrupted one that could not end in time
        ends with the mesh."""
        ours = self._end.alive and not self._thread.is_parents
        if ours and isinstance(frames, AsyncGeneratorType) and not frames.ag_running:
            self._run(_awaited(frames.aclose()))

    @property
    def parts(self) -> BlockingParts:
        """What installed packages add: `mesh.parts.NAME.METHOD()`, see docs/parts.md."""
        return BlockingParts(self)

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._mesh.job

    @property
    def url(self) -> str:
        """URL of the control plane and its dashboard."""
        return self._mesh.url

    @property
    def incarnation(self) -> int:
        """Last known run of the job."""
        return self._mesh.incarnation

    @property
    def world_size(self) -> int:
        """Ranks of the job, as last known."""
        return self._mesh.world_size

    @property
    def current_step(self) -> int:
        """Lowest step that a rank reports now; -1 when none does. Asks all ranks."""
        return self.status().step

    def __contains__(self, name: object) -> bool:
        return name in self.names(buffers=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __bool__(self) -> bool:
        # As of any object, without asking for names.
        return True

    def __getitem__(self, name: str) -> Parameter:
        """One parameter or buffer, or a slice of one: `mesh["head.weight"]`. Its shape and dtype
        are known at once, its values are read when asked for.

        Raises NotFoundError, with similar names; UsageError: several tensors match.
        """
        return Parameter(self, self._run(self._mesh.find_one(name)))

    if not TYPE_CHECKING:  # a type checker says by itself that there is none

        def __setitem__(self, name: str, value: object) -> None:
            raise UsageError(
                f"a mesh is changed by edits, on all ranks at one step: "
                f"mesh.edit({name!r}, set=value)"
            )

    @property
    def layout(self) -> Layout:
        """All tensors and their pieces."""
        return self._run(self._mesh.read_layout())

    read_layout = _blocking(AsyncMesh.read_layout)
    names = _blocking(AsyncMesh.names)
    state_dict = _blocking(AsyncMesh.state_dict)
    status = _blocking(AsyncMesh.status)
    alerts = _blocking(AsyncMesh.alerts)
    why = _blocking(AsyncMesh.why)
    logs = _blocking(AsyncMesh.logs)
    updates = _blocking(AsyncMesh.updates)
    spectrum = _blocking(AsyncMesh.spectrum)
    verify = _blocking(AsyncMesh.verify)
    optimizer = _blocking(AsyncMesh.optimizer)
    lanes = _blocking(AsyncMesh.lanes)
    reaches = _blocking(AsyncMesh.reaches)
    params = _blocking(AsyncMesh.params)
    stats = _blocking(AsyncMesh.stats)

    def diff(
        self, a: Any, b: Any = "now", *patterns: Pattern, cells: int = 0, timeout: Timeout = UNSET
    ) -> Diff:
        """Args, Returns, Raises: as `AsyncMesh.diff`; another mesh is a `Mesh` here."""
        one, other = (source._mesh if isinstance(source, Mesh) else source for source in (a, b))
        return self._run(self._mesh.diff(one, other, *patterns, cells=cells, timeout=timeout))

    edit = _blocking(AsyncMesh.edit)
    edits = _blocking(AsyncMesh.edits)
    get_edit = _blocking(AsyncMesh.get_edit)
    abort_edit = _blocking(AsyncMesh.abort_edit)
    undo = _blocking(AsyncMesh.undo)
    hyperparameters = _blocking(AsyncMesh.hyperparameters)
    set_hyperparameters = _blocking(AsyncMesh.set_hyperparameters)
    mark = _blocking(AsyncMesh.mark)
    marks = _blocking(AsyncMesh.marks)
    unmark = _blocking(AsyncMesh.unmark)
    rollback = _blocking(AsyncMesh.rollback)
    pause_state = _blocking(AsyncMesh.pause_state)
    resume = _blocking(AsyncMesh.resume)
    pause = _blocking_as(AsyncMesh.pause, lambda mesh, state: Pause.of(state, mesh.resume))
    step = _blocking(AsyncMesh.step)
    writeback = _block(AsyncMesh.writeback)

    export = _blocking_as(AsyncMesh.export, lambda mesh, begun: Export(mesh._run, begun))
    exports = _blocking(AsyncMesh.exports)
    get_export = _blocking(AsyncMesh.get_export)
    cancel_export = _blocking(AsyncMesh.cancel_export)
    export_ended = _blocking(AsyncMesh.export_ended)
    download = _blocking(AsyncMesh.download)
    restore = _blocking(AsyncMesh.restore)
    create_export_schedule = _blocking(AsyncMesh.create_export_schedule)
    export_schedules = _blocking(AsyncMesh.export_schedules)
    delete_export_schedule = _blocking(AsyncMesh.delete_export_schedule)
    destinations = _blocking(AsyncMesh.destinations)
    add_destination = _blocking(AsyncMesh.add_destination)

    grads = _iterating(AsyncMesh.grads)
    follow = _iterating(AsyncMesh.follow)

    @overload
    def summon(
        self,
        *patterns: Pattern,
        writeback: Literal[False] = False,
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
    ) -> Summoned: ...
    @overload
    def summon(
        self,
        *patterns: Pattern,
        writeback: Literal[True],
        pause: bool = True,
        mode: str | None = None,
        if_step: bool = False,
        reset_moments: bool = False,
        note: str = "",
        timeout: Timeout = UNSET,
        progress: Progress | None = None,
    ) -> AbstractContextManager[Summoned]: ...
    def summon(
        self, *patterns: Pattern, writeback: bool = False, **options: Any
    ) -> Summoned | AbstractContextManager[Summoned]:
        if writeback:
            return self.writeback(*patterns, **options)
        return self._run(_called(AsyncMesh.summon, self, *patterns, **options))

    summon.__doc__ = f"""{AsyncMesh.summon.__doc__}
        With `writeback=True` a context manager, as `writeback`, which has its own arguments:

            with mesh.summon("head.*", writeback=True) as params:
                params["head.weight"].mul_(0.5)
        """

    view = _block(AsyncMesh.view, ends_with_mesh=True)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._end.alive:
            work.close()
            raise UsageError(f"this mesh of job {self._mesh.job!r} is closed; connect again")
        if self._thread.is_parents:
            work.close()
            raise UsageError(
                f"this mesh of job {self._mesh.job!r} was opened by process {self._thread.pid}, of "
                f"which {os.getpid()} is a fork; it works only there. Start this process by spawn "
                "and open another one in it: paramd.connect(...)"
            )
        return self._thread.run(work)


class BlockingParts:
    """The parts that installed packages add, by name."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __dir__(self) -> list[str]:
        return dir(self._mesh._mesh.parts)

    def __getattr__(self, name: str) -> Any:
        return BlockingPart(self._mesh, getattr(self._mesh._mesh.parts, name))


class BlockingPart:
    """An added part whose asynchronous methods run on the mesh's thread, one call after another."""

    def __init__(self, mesh: Mesh, part: MeshPart) -> None:
        self._mesh = mesh
        self._part = part

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._part) if not name.startswith("_")]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._part, name)
        if not inspect.iscoroutinefunction(found):
            return found

        @functools.wraps(found)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._mesh._run(found(*args, **kwargs))

        return run


@gone.tells
class Parameter:
    """One parameter or buffer of a `Mesh`, or a slice of one: `mesh["head.weight"]`.

    Its shape and dtype are those of the layout; every other call reads the training again.
    """

    def __init__(self, mesh: Mesh, found: SelectedTensor) -> None:
        self._mesh = mesh
        self.name = found.name
        """As a user's state_dict has it."""
        self.info = ParamInfo.of(found.tensor)
        """Placement and ranks of the whole tensor."""
        self.shape = found.box.sizes
        """Shape of the tensor, or of the slice."""
        self._pattern = found.pattern
        self._buffers = found.tensor.kind is TensorKind.BUFFER

    def __repr__(self) -> str:
        return (
            f"<paramd.Parameter {self._pattern!r} {shape_text(self.shape)} {self.dtype} of job "
            f"{self._mesh.job!r}; .summon() reads it>"
        )

    @property
    def dtype(self) -> str:
        """torch dtype without its prefix, for example "bfloat16"."""
        return self.info.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Dims."""
        return len(self.shape)

    def summon(self, **options: Unpack[SummonOptions]) -> torch.Tensor:
        """The full tensor, or the slice. Args, Raises: as `Mesh.summon`."""
        if self._buffers:
            options.setdefault("buffers", True)
        found: Summoned = self._mesh.summon(self._pattern, **options)
        return next(iter(found.values()))

    def numpy(self, **options: Unpack[SummonOptions]) -> Any:
        """The values as a NumPy array. Args, Raises: as `Mesh.summon`, and UsageError for a dtype
        that NumPy does not have: give dtype="float32" for bfloat16."""
        tensor = self.summon(**options)
        try:
            return tensor.numpy()
        except TypeError as error:
            raise UsageError(
                f"NumPy has no dtype for {self._pattern!r}, which is {tensor.dtype}; give another: "
                'numpy(dtype="float32")'
            ) from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """For `numpy.asarray(mesh[name])`."""
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def norm(self, **options: Unpack[StatsOptions]) -> float:
        """Square root of the sum of squares. Args, Raises: as `Mesh.stats`."""
        return self.stats(**options).norm

    def stats(self, **options: Unpack[StatsOptions]) -> TensorStats:
        """Statistics of the parameter. Args, Raises: as `Mesh.stats`."""
        if self._buffers:
            options.setdefault("buffers", True)
        return self._mesh.stats(self._pattern, **options)[0]

    def edit(self, **options: Unpack[EditOptions]) -> Edit:
        """Edit it. Args, Raises: as `Mesh.edit`."""
        return self._mesh.edit(self._pattern, **options)


def _close(thread: loop.LoopThread, mesh: AsyncMesh) -> None:
    if thread.is_parents:
        # Connections and leases are the parent's, and continue.
        return
    if thread.is_current():
        # The garbage collector runs finalizers on any thread; the loop's own cannot join itself.
        threading.Thread(target=_close, args=(thread, mesh), name="paramd-close").start()
        return
    try:
        thread.run(mesh.close())
    finally:
        loop.shared.release()
