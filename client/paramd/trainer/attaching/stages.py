"""The last stage, which moves the parameters in and serves them."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from paramd.memory.arena import HostArena
from paramd.memory.control_page import ControlPage, Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.handover import Descriptors
from paramd.trainer.attaching.attachment import Attachment
from paramd.trainer.attaching.checks import changes_in_forward
from paramd.trainer.attaching.discovering import Found
from paramd.trainer.attaching.exchange import collective_timeout_s
from paramd.trainer.attaching.opening import Opening
from paramd.trainer.boundary.agreement import Agreement
from paramd.trainer.boundary.boundary import Boundary
from paramd.trainer.boundary.edits import Editor
from paramd.trainer.boundary.gradients import GradientCapture
from paramd.trainer.boundary.hold import cap_s
from paramd.trainer.helpers.sidecar_link import Identity
from paramd.trainer.home.device import DeviceMemory, DeviceState
from paramd.trainer.home.mirrored import MirroredHome
from paramd.trainer.home.owned import ParameterStorage
from paramd.trainer.model import partitions
from paramd.trainer.resume.keeper import Keeper
from paramd.trainer.resume.optimizer_home import OptimizerHome
from paramd.trainer.resume.rewinding import Rewinder
from paramd.trainer.resume.state_record import CopiedState, MovedState, StateRecord
from paramd.trainer.resume.succession import Resumed

log = logging.getLogger("paramd")


class Stages(Opening):
    """The stages of attaching; after each, every rank knows the outcome on all."""

    def move_in(
        self,
        found: Found,
        identity: Identity,
        mesh: dict[str, Any],
    ) -> Attachment:
        """Move the parameters into the arena and serve them, on all ranks or none."""
        sidecar = self._sidecar
        assert sidecar is not None
        shared = sidecar.own_descriptors()
        page = ControlPage(shared.page)
        self._undo.callback(page.close)
        arena = found.home.open_arena(shared.arena, page)
        self._undo.callback(arena.close)

        succession = self._succession
        optimizer_memory = SparseMemory(shared.optimizer)
        state_memory: DeviceState | None = None
        # Where parameters stay in the trainer's own memory, the optimizers' state does, too.
        stays = found.home.mirrored or partitions.are_declared(found.model)
        moves = succession is not None or not stays

        def move() -> dict[str, Any]:
            nonlocal state_memory
            self._undo.callback(found.home.move_out)
            if moves:
                most_bytes = optimizer_memory.size_bytes
                state_memory = found.home.open_state(shared.state, most_bytes, sidecar.add_state)
            if succession is None or succession.resumed is None:
                arena.populate()
                found.home.move_in(arena.buffer)
                if self._exported is not None:
                    self._exported.fill(arena.buffer)
                    found.home.restore_buffers()
            else:
                if succession.survived is None:
                    arena.populate()
                    succession.fill(arena, optimizer_memory, state_memory)
                found.home.adopt(arena.buffer)
            self._pass("moved")
            return {}

        made: list[Attachment] = []

        def begin() -> dict[str, Any]:
            state = None
            if moves:
                state = self._optimizer_home(optimizer_memory, state_memory, page, found)
            page[Word.MOMENTS_LIVE] = int(moves)
            self._introduce(page, identity, found.first_step)
            agreement = Agreement(
                self._exchange.group,
                timeout_s=self._settings.agreement_timeout_s,
                edit_timeout_s=self._settings.attach_timeout_s,
            )
            keeper = self._keeper(shared, page, found, state, agreement)
            record: StateRecord | None = None
            if keeper is None:
                record = _state_record(shared, page, found.home, state, optimizer_memory)
            made.append(self._attachment(found, identity, page, arena, shared, agreement, record))
            self._undo.callback(made[0].detach)
            if succession is not None and succession.resumed is not None:
                # Before that: a failed resume must not end the sidecar that has the state.
                self._undo.callback(self._let_go_of_sidecar)
            made[0].keep_with(keeper, state, self._resumed)
            if keeper is not None and state is not None and succession is not None:
                made[0].rewind_with(self._rewinder(found, page, arena, state, keeper))
            made[0].follow(found.optimizers)
            sidecar.serve(mesh, found.layout)
            return {}

        # Two stages, so that no rank serves before all have moved in.
        self._together(move)
        self._together(begin)
        # Attached on all ranks: point of no return.
        self._undo.pop_all()
        self._go_on(made[0], found.first_step)
        return made[0]

    @property
    def _resumed(self) -> Resumed | None:
        """How this training is resumed."""
        if self._exported is not None and self._succession is not None:
            step = self._exported.offered.step
            lost = max(self._succession.steps_known - step, 0)
            return Resumed(step, "export", lost, "nothing is left in memory")
        return self._succession.resumed if self._succession is not None else None

    def _optimizer_home(
        self,
        memory: SparseMemory,
        on_device: DeviceState | None,
        page: ControlPage,
        found: Found,
    ) -> OptimizerHome:
        resumable = self._succession is not None
        state = OptimizerHome(memory, page, found.optimizers, on_device, resumable=resumable)
        self._undo.callback(state.close)
        if self._succession is not None:
            self._succession.restore(state)
        if self._exported is not None:
            begin, size_bytes = found.home.arena_address, found.home.arena_bytes
            self._exported.restore(found.optimizers, begin, size_bytes)
            self._exported.close()
        return state

    def _keeper(
        self,
        shared: Descriptors,
        page: ControlPage,
        found: Found,
        state: OptimizerHome | None,
        agreement: Agreement,
    ) -> Keeper | None:
        if state is None or self._succession is None:
            return None
        standing = self._settings.standing_every
        return Keeper(
            SparseMemory(shared.continuation),
            page,
            found.home,
            state,
            keep=self._keep,
            every=int(self._settings.keep_every),
            standing_every=int(standing) if standing is not None else None,
            agreed=agreement.standing,
            copies=agreement.copies if self._buddies else None,
        )

    def _rewinder(
        self,
        found: Found,
        page: ControlPage,
        arena: HostArena | DeviceMemory,
        state: OptimizerHome,
        keeper: Keeper,
    ) -> Rewinder:
        return Rewinder(
            page,
            arena,
            home=found.home,
            state=state,
            keeper=keeper,
            keep=self._keep,
            copied=bool(self._buddies),
            at_point=self._at_point,
        )

    def _go_on(self, attachment: Attachment, first_step: int) -> None:
        """Let the training continue with the random states it had. Last of all."""
        succession, keeper = self._succession, attachment.keeper
        if keeper is None or succession is None:
            return
        if succession.resumed is None:
            keeper.begin(first_step)
        else:
            succession.go_on(keeper)
        succession.close()

    def _attachment(
        self,
        found: Found,
        identity: Identity,
        page: ControlPage,
        arena: HostArena | DeviceMemory,
        shared: Descriptors,
        agreement: Agreement,
        record: StateRecord | None,
    ) -> Attachment:
        assert self._sidecar is not None
        model, home = found.model, found.home
        mirror = home if isinstance(home, MirroredHome) else None
        page[Word.MIRRORED] = int(mirror is not None)
        edits = SparseMemory(shared.edits)
        editor = Editor(
            page, arena, edits, at_point=self._at_point, mirror=mirror, finish=home.finish
        )
        boundary = Boundary(
            page,
            shared.wake,
            home,
            agreement,
            editor=editor,
            copy_buffers=home.copy_buffers,
            copy_state=record.copy_for if record is not None else lambda _: None,
            hold_cap_s=cap_s(collective_timeout_s()),
            stall_budget_ns=round(self._settings.stall_budget_ms * 1e6),
            mirror=mirror,
            order=home.device.publish if home.device is not None else None,
            settles=record.settle if record is not None else lambda _: None,
            always_strict=self._warned(changes_in_forward(model)),
            after_edit=partial(partitions.refresh, model),
        )
        return Attachment(
            model,
            identity,
            page=page,
            arena=arena,
            home=home,
            boundary=boundary,
            editor=editor,
            record=record,
            gradients=GradientCapture(
                page,
                shared.wake,
                shared.gradients,
                arena_bytes=home.arena_bytes,
                pieces=home.pieces,
                lossless_budget_ns=round(self._settings.lossless_budget_ms * 1e6),
            ),
            exchange=self._exchange,
            sidecar=self._sidecar,
            control=self._control,
            url=self._url,
        )

    @staticmethod
    def _warned(changes: str) -> str:
        if changes:
            log.warning(
                "paramd: %s: parameters are read at boundaries alone, while training waits within "
                "its stall budget (PARAMD_STALL_BUDGET_MS)",
                changes,
            )
        return changes


def _state_record(
    shared: Descriptors,
    page: ControlPage,
    home: ParameterStorage,
    state: OptimizerHome | None,
    optimizer_memory: SparseMemory,
) -> StateRecord:
    """How readers are told of the optimizers' state where no successor is."""
    memory = SparseMemory(shared.continuation)
    if state is not None:
        return MovedState(memory, page, home, state)
    locator = home.locator if isinstance(home, MirroredHome) else None
    return CopiedState(memory, optimizer_memory, page, home, locator=locator)
