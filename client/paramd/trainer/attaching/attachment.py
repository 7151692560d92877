"""The object that `attach` returns: the training's handle on the service."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol, Unpack

import torch

from paramd import gone, inside, places
from paramd.clock import seconds_of
from paramd.errors import ConflictError, UsageError
from paramd.memory.arena import HostArena
from paramd.memory.control_page import ControlPage, Word
from paramd.trainer.attaching.exchange import Exchange
from paramd.trainer.attaching.exporting import ExportOptions, MadeExport, Place, export
from paramd.trainer.boundary.boundary import Boundary
from paramd.trainer.boundary.edits import Editor
from paramd.trainer.boundary.gradients import GradientCapture
from paramd.trainer.boundary.signals import Signals
from paramd.trainer.helpers.control_link import ControlLink, Tracking, token_of
from paramd.trainer.helpers.sidecar_link import Identity, SidecarLink
from paramd.trainer.home.device import DeviceMemory
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.resume.keeper import Keeper, Keeping
from paramd.trainer.resume.optimizer_home import OptimizerHome
from paramd.trainer.resume.rewinding import Rewinder, Rollback
from paramd.trainer.resume.state_record import StateRecord
from paramd.trainer.resume.succession import Resumed
from paramd.trainer.settings import AttachSettings

log = logging.getLogger("paramd")

Models = torch.nn.Module | Mapping[str, torch.nn.Module] | None
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


class Missing(Enum):
    """An argument that was not given, as opposed to None."""

    OPTIMIZER = "optimizer"


MAX_LABEL = 100
"""Most characters of a label."""

attached: dict[int, Attachment] = {}
"""Live attachments by id of their model; kept alive here even if the caller drops them."""


def _forget_in_child() -> None:
    for attachment in attached.values():
        attachment._forget_in_child()
    attached.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _states_of(optimizers: Collection[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """The tensors that these optimizers keep by parameter."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (one for one in state.values() if type(one) is torch.Tensor)


@dataclass(frozen=True, slots=True)
class Stalls:
    """Time that updates spent waiting: for copies in progress, or to have parameters that got new
    memory brought back.
    """

    count: int
    total_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Parts:
    """What an attachment is made of, from one attach to the next."""

    model: torch.nn.Module
    identity: Identity
    page: ControlPage
    arena: HostArena | DeviceMemory
    home: ParameterStorage
    boundary: Boundary
    editor: Editor
    record: StateRecord | None
    keeper: Keeper | None
    state: OptimizerHome | None
    rewinder: Rewinder | None
    resumed: Resumed | None
    gradients: GradientCapture
    exchange: Exchange
    sidecar: SidecarLink
    control: ControlLink | None
    url: str
    settings: AttachSettings


class Again(Protocol):
    """Attaches the parameters of an attachment anew, in the same helpers."""

    def __call__(self, attachment: Attachment, model: Models, optimizer: Any) -> None: ...


@gone.tells
class Attachment:
    """One rank's attachment. Made by `paramd.attach`; lives until `detach` or process exit."""

    def __init__(self, parts: Parts) -> None:
        self._tracking: Tracking | None = None
        self._again: Again | None = None
        """Set by `attach`."""
        self.resumed = parts.resumed
        """The state from which this training resumed (`step`, `how`, `lost_steps`, `reason`); None
        after a fresh start."""
        self._take(parts)

    def _take(self, parts: Parts) -> None:
        """Go on with these parts; those before have been closed."""
        identity, boundary, editor = parts.identity, parts.boundary, parts.editor
        gradients, rewinder = parts.gradients, parts.rewinder
        self._model = model = parts.model
        self._page = parts.page
        self._arena = parts.arena
        self._home = parts.home
        self._boundary = boundary
        self._editor = editor
        self._record = parts.record
        self._gradients = gradients
        boundary.gradients = gradients
        gradients.iteration = boundary.iteration
        self._signals = Signals(model, boundary)
        self._exchange = parts.exchange
        self._sidecar = parts.sidecar
        self._control = parts.control
        self._updating = threading.local()
        self._detached = False
        self._is_childs = False
        self._last_step = 0
        self._last_edits = 0
        self.keeper = boundary.keeper = parts.keeper
        self._state = parts.state
        self._rewinder = boundary.rewinder = rewinder
        if rewinder is not None:
            editor.rollback = partial(Rollback, rewinder)
            editor.groups_changed = rewinder.keeper.groups_changed
        self._at_detach = ExitStack()
        """Closed when the attachment ends, once the parameters have moved out."""
        self._identity = identity
        self.job = identity.job
        self.incarnation = identity.incarnation
        self.rank = identity.rank
        self._url = parts.url
        self._settings = parts.settings
        self._training = inside.Training(
            job=identity.job,
            incarnation=identity.incarnation,
            rank=identity.rank,
            socket_path=str(places.socket_path(identity.job, identity.rank)),
            host_id=places.host_id(),
            by=lambda: boundary.by,
        )

    @property
    def url(self) -> str:
        """URL of the job's control plane; empty where it has not come up. One that comes up after
        `attach` is known on rank 0 alone."""
        if not self._url and self._control is not None:
            self._url = self._control.url
        return self._url

    @property
    def step(self) -> int:
        """Number of finished updates; after `detach`, the last value."""
        return self._boundary.step if not self._detached else self._last_step

    @property
    def edits(self) -> int:
        """Number of edits applied in this run; after `detach`, the last value."""
        return self._page[Word.EDITS] if not self._detached else self._last_edits

    @contextmanager
    def update(self) -> Iterator[None]:
        """A window for code that changes parameters outside `optimizer.step`.

        All ranks must pass the same windows in the same order: each counts as one step, and
        optimizer steps inside belong to it. Windows of different threads may overlap. If the
        block raises, the window stays open, since parameters may be half changed, and closes
        with the next successful `update`, or when training continues after an optimizer's step.
        """
        nested = getattr(self._updating, "now", False)
        if self._detached or nested:
            yield
            return
        self._updating.now = True
        try:
            self._boundary.begin(self)
            yield
            self._boundary.end(self)
        except BaseException:
            self._boundary.raised(self)
            raise
        finally:
            self._updating.now = False
        # The end of the block declares this update complete.
        self._boundary.settle()

    @contextmanager
    def swapped_weights(self, label: str) -> Iterator[None]:
        """A block in which the module has other weights than those being trained.

            with attachment.swapped_weights("ema"):
                ema.swap_in(model)
                evaluate(model)
                ema.swap_out(model)

        Inside, reads of this rank are refused with `label`; `unsettled=True` accepts the other
        weights, and the answer's `label` names them. Training does not wait. Bring the weights back
        before the block ends. From then on, reads see a resting state if samples match those taken
        before the block, and a settled state once training continues. If the block raises and
        samples differ, the label stays until then. A step that was served before the block and
        comes back with other values (rounded ones, say) is not served again; the next one is.

        Enter it on every rank that swaps weights; others need not. Blocks may be nested, and then
        the answers have all labels. Keep updates outside: one inside still counts, but an edit just
        agreed on is then not applied. After `detach` and in forked children the block does nothing.

        Args:
            label: 1 to 100 printable characters.

        Raises:
            UsageError: the label is longer, empty or not printable.
        """
        if not 0 < len(label) <= MAX_LABEL or not label.isprintable():
            raise UsageError(
                f"label: {label[:MAX_LABEL]!r}; expected 1 to {MAX_LABEL} printable characters"
            )
        if self._detached or not self._boundary.stand_in(label):
            yield
            return
        failed = True
        try:
            yield
            failed = False
        finally:
            self._boundary.training_weights_again(label, failed=failed)

    def _track(self, settings: AttachSettings) -> None:
        """Log to the trackers that these settings name, until `detach`."""
        self._tracking = Tracking(self.job, settings, places.job_dir(self.job))
        if self._control is not None:
            # A tracker that finds no job ends at once.
            self._control.when_up(self._tracking.open)
        else:
            self._tracking.open()

    @contextmanager
    def rollback_scope(self) -> Iterator[None]:
        """A block that `mesh.rollback` leaves, so that the loop over batches starts again.

            while attachment.step < steps:
                with attachment.rollback_scope():
                    for batch in loader:
                        ...

        At the beginning of a forward, a rollback puts parameters, optimizers and everything in
        `extra_state` back to an earlier step; the current batch belongs to a later one. The block
        then ends as if it were complete, on every rank, and `attachment.step` is the earlier step.
        Outside of such a block a rollback is refused. Blocks may be nested; the innermost is left.
        Without resume="auto" the block does nothing.
        """
        if self._rewinder is None or self._detached or self._is_childs:
            yield
            return
        with self._rewinder.block():
            yield

    def end_iteration(self) -> None:
        """Mark the end of an iteration, so that a restarted script can continue exactly here.

        Call it on every rank at the end of the loop's body, after everything that changes
        parameters, schedulers or scalers. From the first call on, a state can be resumed only at
        such a mark. Scripts with several optimizers, or several updates in one iteration, have to
        call it. Without resume="auto" it does nothing.
        """
        if not self._detached and self.keeper is not None:
            self._boundary.kept()

    def resume_cost(self) -> Keeping | None:
        """Cost of recording the state for a restart; None without resume="auto" or detached."""
        return self.keeper.cost() if self.keeper is not None and not self._detached else None

    def begin_iteration(self) -> None:
        """Mark the start of the next iteration; changes made before belong to the previous update.

        Needed only if the attached module's own forward is never called and its parameters are
        sharded. Callbacks of frameworks call it as a batch begins. Call it on every rank at the
        same point, outside of an update. Without a new update it does nothing.
        """
        if not self._detached and not self._is_childs:
            self._boundary.settle()

    def _has(self, parameters: Collection[int]) -> bool:
        """Whether the attached model has one of these parameters, given by their `id`."""
        return any(id(parameter) in parameters for parameter in self._model.parameters())

    def _follow(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Count every step of these optimizers as an update, whatever their parameters.

        Steps of any other optimizer that has one of the model's parameters count as well.
        """
        attached[id(self._model)] = self
        inside.begins(self._training)
        self._signals.open()
        self._boundary.start()
        followed = self._signals.optimizers
        for optimizer in optimizers:
            followed.add(optimizer)
        # Weakly: an optimizer that the script dropped must not keep old parameters alive.
        self._editor.optimizers = followed
        self._home.states = partial(_states_of, followed)
        if self._record is not None:
            self._record.optimizers = followed
            self._editor.groups_changed = self._record.groups_changed
            self._boundary.follow_record(self._record.has_groups)
        given = [weakref.ref(optimizer) for optimizer in optimizers]
        self._editor.given = lambda: [one for ref in given if (one := ref()) is not None]
        if self.keeper is not None:
            self.keeper.followed = followed
            self._boundary.follow_record(self.keeper.has_groups)

    def clipped(self, total_norm: float | torch.Tensor, max_norm: float) -> None:
        """Record for gradient readers that the next update's gradients were clipped.

        Call it right after `torch.nn.utils.clip_grad_norm_`, with its result and its
        `max_norm`. Without it, readers cannot know.
        """
        norm = float(total_norm)
        self._gradients.clipped(min(1.0, max_norm / (norm + 1e-6)) if norm >= 0 else 0.0)

    def log(self, *, step: int | None = None, **numbers: float | torch.Tensor) -> None:
        """Log numbers of the script beside the weights: `log(loss=loss, lr=lr, tokens=n)`.

        The sidecar keeps them; the control plane adds them to its history and checks the rules of
        `[alerts] numbers`. Takes tens of microseconds and never waits: if the sidecar is away for
        long, the oldest are dropped. Call it on one rank, or on several to keep their numbers
        apart. After `detach` and in forked children it does nothing.

        Args:
            step: The step the numbers belong to; None means `attachment.step`.
            numbers: By name, at most 64: floats, ints or one-element tensors. A tensor on a
                device is copied there and read by another thread, so nothing here synchronises.

        Raises:
            UsageError: a name cannot be used or a value is no real number; none is kept then.
        """
        if self._detached or self._is_childs:
            return
        self._sidecar.insight.log(step if step is not None else self.step, numbers)

    def stalls(self) -> Stalls:
        """Time that updates have spent waiting since attach: for copies, or to have parameters that
        got new memory (`p.data = ...`) brought back.
        """
        page = self._page
        return Stalls(
            count=page[Word.STALL_COUNT],
            total_s=page[Word.STALL_TOTAL_NS] / 1e9,
            longest_s=page[Word.STALL_MAX_NS] / 1e9,
        )

    def export(
        self,
        destination: str | None = None,
        *,
        include: Sequence[str] = ("parameters", "buffers", "optimizer"),
        timeout: float | str = 60.0,
        **options: Unpack[ExportOptions],
    ) -> MadeExport:
        """Export a checkpoint of this very boundary, and return once it is published.

            if scheduler_warned():  # the same answer on every rank
                attachment.export("checkpoints/last", timeout=25)
                break

        Collective: every rank calls it at the same point, between two updates; training stands
        still meanwhile. `mesh.export` of a client in the same script would wait for a boundary
        that its own caller holds up.

        Args:
            destination: As in `Mesh.export`.
            include: Any of "parameters", "buffers", "optimizer".
            timeout: Seconds, or a text such as "30s", that the export may take; it is cancelled
                then, and training continues.
            options: The others of `Mesh.export`: format, overwrite, dtype and so on.

        Raises:
            ConflictError: a rank is inside an update or `swapped_weights`, or has detached; or the
                export failed.
            DeadlineError: it did not end in time.
            UnreachableError: the control plane does not respond.
            ParamdError: any other error of `Mesh.export`; all ranks raise the same.
        """
        grace_s = seconds_of(timeout, "timeout")
        if not grace_s > 0:
            raise UsageError(f"timeout: {timeout!r}; expected more than 0")
        if self._detached or self._is_childs:
            raise ConflictError("export: this attachment has ended")

        def look() -> tuple[str, Place | None]:
            if self._boundary.is_inside:
                return "is inside an update or a block of other weights; call it after that", None
            if self.rank != 0:
                return "", None
            if not self.url:
                return "has no control plane yet", None
            site = self._control is None
            token = token_of(self._settings) if site else ""
            return "", Place(job=self.job, url=self.url if site else "", token=token)

        asked = {"include": tuple(include), **options}
        return export(self._exchange, self._boundary, look, destination, asked, grace_s)

    @torch.inference_mode(False)
    def refresh(
        self, model: Models = None, optimizer: Optimizers | Missing | None = Missing.OPTIMIZER
    ) -> None:
        """Serve the parameters again after they have changed in shape or number.

            grow_vocabulary(model, 1024)  # or prune, or densify
            optimizer = torch.optim.AdamW(model.parameters())
            attachment.refresh(optimizer=optimizer)

        Collective: every rank calls it at the same point, between two updates, and after the change
        before the next forward. Sidecars and control plane go on, at the same addresses and with
        the same tokens; `step` goes on counting; the job has its next run (`incarnation`). Clients
        read the layout again by themselves. Subscriptions, snapshots, marks and edits that can be
        undone belong to the run before, and end with it; what `resume="auto"` keeps begins anew.

        Args:
            model: As in `attach`; None: the same as there, as it is now.
            optimizer: As in `attach`; not given: the same as there, if it still exists.

        Raises:
            UsageError, ConflictError: on all ranks when an argument is wrong on any, or one is
                inside an update or has detached; all are attached as before.
            Exception: any other failure on any rank: all ranks have detached, and training may
                continue.
        """
        if self._detached or self._is_childs or self._again is None:
            raise ConflictError("refresh: this attachment has ended")
        self._again(self, model, optimizer)

    def _leave_memory(self) -> None:
        """Move everything back to private memory; the helpers stay."""
        self._last_step = self._boundary.step
        self._last_edits = self._page[Word.EDITS]
        self._detached = True
        attached.pop(id(self._model), None)
        inside.ends(self._training)
        self._signals.close()
        self._close_parts()
        self._page.close()
        self._arena.close()

    def _close_parts(self) -> None:
        for one in (self._boundary, self._gradients, self._editor, self._record, self._rewinder):
            if one is not None:
                one.close()
        if self.keeper is not None and self._state is not None:
            self.keeper.close()
            self._state.close()
        self._home.move_out()
        self._at_detach.close()

    @torch.inference_mode(False)
    def detach(self) -> None:
        """Move the parameters back to private memory and end the sidecar.

        Call it on every rank after the same step. Idempotent. Training may continue. In a
        forked child it only moves the child's copy of the parameters: the service belongs to
        the parent.
        """
        if self._detached:
            return
        self._last_step = self._boundary.step
        self._last_edits = self._page[Word.EDITS]
        self._detached = True
        attached.pop(id(self._model), None)
        inside.ends(self._training)
        self._signals.close()
        if self._is_childs:
            self._home.move_out()
            if self._state is not None:
                self._state.move_out()
            return
        if self._control is not None and not self.url:
            # Or it could come up now, and start trackers.
            self._control.release()
        if self._tracking is not None:
            # Before the sidecar ends: a sample in progress still needs it.
            self._tracking.close()
        self._close_parts()
        if self._control is not None:
            # First, or the supervisor would restart it when it ends with the last sidecar.
            self._control.release()
        self._sidecar.close()
        if self._control is not None:
            self._control.close()
        self._exchange.close()
        self._page.close()
        self._arena.close()

    def _forget_in_child(self) -> None:
        """Go inert: rounds, page words, memory and helper processes belong to the parent."""
        self._is_childs = True
        self._boundary.forget()

    def __repr__(self) -> str:
        state = "detached" if self._detached else f"at {self.url}" if self.url else "not reachable"
        return (
            f"<paramd.Attachment job={self.job!r} run={self.incarnation} rank={self.rank} "
            f"step={self.step}, {state}>"
        )
